"""Set-up of the whole test suite: no network, no caches of the user, the same output on every machine."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.forked_runs import ForkServer
    from tests.launched import LaunchServer

pytest_plugins = ["tests.nvml.standin"]

CACHE = tempfile.mkdtemp(prefix="effcli-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

# These are read when the libraries are imported, so they are set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HOME"] = CACHE
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["NO_COLOR"] = "1"
os.environ["EFFCLI_HISTORY"] = "off"  # neither to be written to nor to be learnt from
for name in ("HF_TOKEN", "WORLD_SIZE", "RANK", "LOCAL_RANK", "FORCE_COLOR", "COLUMNS"):
    os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    """Spare later collections what is imported by now: transformers' Trainer collects once a run, half a second."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _without_waiting_for_the_disk() -> Iterator[None]:
    """Spare runs the wait until the disk has what they wrote: none has to outlive a loss of power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


# The fixtures import what they need themselves: the libraries below are to be loaded after the lines above.
@pytest.fixture
def distilbert(tmp_path: Path) -> Path:
    """Return the folder of the tiny classifier: a configuration without weights."""
    from tests.commands import TINY_DISTILBERT, model_folder

    return model_folder(tmp_path / "encoder", TINY_DISTILBERT)


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """Return the folder of the tiny language model: a configuration without weights."""
    from tests.commands import TINY_GPT2, model_folder

    return model_folder(tmp_path / "decoder", TINY_GPT2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a CSV file of twelve sentences with two labels."""
    from tests.commands import csv_file

    return csv_file(tmp_path / "d.csv")


@pytest.fixture(scope="session")
def fresh_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Return what runs commands in fresh processes, without the seconds that each would take to import torch."""
    from tests.forked_runs import PREPARATION, ForkServer

    log = tmp_path_factory.mktemp("fresh") / "log"
    with ForkServer((*PREPARATION, "effcli.engines.pytorch", "bitsandbytes"), log) as made:
        yield made


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchServer]:
    """Return what launches several processes of one run, without the seconds that each would take to import torch."""
    from tests.launched import LaunchServer

    with LaunchServer(tmp_path_factory.mktemp("launched")) as made:
        yield made


@pytest.fixture
def without_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare runs that are about something else the second that tracing takes."""
    monkeypatch.setattr("effcli.pipeline.run_plan.RunPlanner.plan", lambda *_: None)
