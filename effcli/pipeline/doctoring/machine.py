"""The machine itself: main memory, the terminal, and the history of what was measured here."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from effcli.main_memory import available_to_process, group_limit
from effcli.pipeline.doctoring.disk import existing, is_writable
from effcli.pipeline.doctoring.findings import Checks, note, ok, problem
from effcli.streams import is_terminal
from effcli.units import GIB, count, format_bytes

_ANOTHER_HISTORY = "export EFFCLI_HISTORY=FILE, a file of yours, or =off"

_NEEDED_BYTES = 2 * GIB
"""torch, transformers and the small built-in model take some 700 MiB."""


def check_memory() -> Checks:
    """Return the machine's memory, what is free for this process, and the limit of a container."""
    import psutil

    total = int(psutil.virtual_memory().total)
    free = available_to_process()
    limit = group_limit(total)
    text = f"{format_bytes(total)}, {format_bytes(free)} free" if free is not None else format_bytes(total)
    if limit is not None:
        text += f"; the control group (container) allows {format_bytes(limit)}"
    if free is not None and free < _NEEDED_BYTES:
        return (note("memory", f"{text}, which is little for a run", "end other programs, or use another machine"),)
    return (ok("memory", text),)


def check_terminal() -> Checks:
    """Return what the output goes to: its width, whether it has colours, and characters beyond ASCII."""
    encoding = sys.stdout.encoding or "ascii"
    if not is_terminal(sys.stdout):
        kind = "a terminal without control characters" if sys.stdout.isatty() else "not a terminal"
        return (ok("terminal", f"{kind}: no colour; {encoding}"),)
    colour = "without colour (NO_COLOR)" if os.environ.get("NO_COLOR") else f"colour ({os.environ.get('TERM', '')})"
    columns = shutil.get_terminal_size().columns
    return (ok("terminal", f"{columns} columns, {colour}, {encoding}"),)


def _can_be_added_to(file: Path) -> bool:
    return os.access(file, os.W_OK) if file.exists() else is_writable(existing(file.parent))


def check_history() -> Checks:
    """Return where the history of measured runs is kept, and how many it has."""
    from effcli.history.read import read_history

    history = read_history()
    if history.file is None and history.reason is None:
        return (note("history", "not kept, since EFFCLI_HISTORY is off"),)
    if history.reason is not None:
        text = f"{history.file or 'its file'} cannot be read: {history.reason}"
        return (problem("history", text, _ANOTHER_HISTORY),)
    text = f"{history.file}: {count(len(history.runs), 'run')}"
    if history.file is not None and not _can_be_added_to(Path(history.file)):
        return (problem("history", f"{text}, and no more can be written", _ANOTHER_HISTORY),)
    if history.num_damaged:
        return (note("history", f"{text}, and {count(history.num_damaged, 'line')} that could not be read"),)
    return (ok("history", text),)
