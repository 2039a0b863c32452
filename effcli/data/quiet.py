"""Quiet use of `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the progress bars of `datasets` and of the Hub, and the log, and restore them afterwards."""
    import datasets
    from datasets.utils import logging
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    bars_were_on = not datasets.are_progress_bars_disabled()
    hub_bars_were_on = not are_progress_bars_disabled()
    verbosity = logging.get_verbosity()
    datasets.disable_progress_bars()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # it also logs the errors that it raises
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars_were_on:
            datasets.enable_progress_bars()
        if hub_bars_were_on:
            enable_progress_bars()
