"""A driver library that plays a script, behind the real `pynvml`: fixture `driver` for every test.

    def test_something(driver: Driver) -> None:
        driver.play('''
            card GPU-aaaa NVIDIA H100 80GB HBM3
            memory 85899345920 1073741824 536870912
            process self 1000000000
        ''')

From then on, `pynvml.nvmlInit()` in this process opens the stand-in (`standin.c`, compiled once per session by gcc),
and so it does in a process that is started with `driver.environment()` among its variables. Without a script it answers
"driver not loaded". The script is read whenever the driver is opened first, so that a test may `play` another later.
When the test ends, everything that was opened in this process must have been closed.

Lines of a script (amounts are bytes or `n/a` for NVML's "not available"; what follows a card belongs to it):

| line | meaning |
|---|---|
| `driver 570.86.15`, `nvml 12.570.86.15`, `cuda 12080` | versions; these are the defaults |
| `wide` | newest lists of processes as by the first drivers of series 535: longer entries than `pynvml` reads |
| `card UUID NAME...` | a card; the order is the driver's, that of the PCI bus |
| `mig on`, `mig off` | the card can be divided, and is or isn't; without the line it can't |
| `instance UUID GI CI SLOT` | a MIG instance of the card above: its ids, and the index that the driver gives it |
| `memory TOTAL USED [RESERVED]` | USED has no part of RESERVED, as in version 2 of NVML's answer; version 1 adds them |
| `process PID BYTES [KIND [GI CI]]` | PID or `self`; KIND is `compute` (default), `graphics` or `mps` |
| `then N` | after N readings of this device's memory, the `memory` and `process` lines below hold |
| `fail FUNCTION CODE [after N] [on UUID]` | the function (any `_vN`) answers CODE: after N calls, for one device |

FUNCTION may be `*` for all but nvmlInit and nvmlShutdown; those two can be named.

Codes are NVML's: 1 uninitialized, 2 invalid argument, 3 not supported, 4 no permission, 6 not found, 9 driver not
loaded, 12 library not found, 13 function not found, 15 card lost, 16 reset required, 18 version mismatch, 999 unknown.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

Age = Literal["new", "old", "ancient"]
"""Whose symbols the library has: of a driver of today, of one without version 3 of the process lists and version 2 of
the memory (before 510), or of one without any process list that `pynvml` knows and without MIG (before 450)."""

AGES: tuple[Age, ...] = ("new", "old", "ancient")
SOURCE = Path(__file__).with_name("standin.c")
_UNINITIALIZED = 1


class Driver:
    """The stand-in as a test sees it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._library = library
        self._script = folder / "driver.txt"
        self._log = folder / "driver.log"

    def play(self, script: str | bytes) -> None:
        """Take this script from the next opening on."""
        text = script if isinstance(script, bytes) else textwrap.dedent(script).encode()
        self._script.write_bytes(text)

    def calls(self, pid: int | None = None) -> list[tuple[str, int]]:
        """Return each opening ("init") and closing ("shutdown") with NVML's answer, of all processes or of one."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        parts = [line.split() for line in lines]
        return [(what, int(code)) for made_by, what, code in parts if pid in (None, int(made_by))]

    def num_open(self, pid: int | None = None) -> int:
        """Return how many openings have not been closed."""
        calls = self.calls(pid)
        return calls.count(("init", 0)) - sum(what == "shutdown" for what, _ in calls)

    def environment(self) -> dict[str, str]:
        """Return the variables with which another process finds the stand-in as its driver library."""
        folders = [str(self._library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {**self.variables(), "LD_LIBRARY_PATH": os.pathsep.join(folders)}

    def variables(self) -> dict[str, str]:
        """Return the variables by which the library finds script and log."""
        return {"NVML_STANDIN_SCRIPT": str(self._script), "NVML_STANDIN_LOG": str(self._log)}


def built(folder: Path, age: Age = "new") -> Path | None:
    """Compile the stand-in and return the library; None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "libnvidia-ml.so.1"
    # It has no name inside: a CUDA build of torch that asks for the driver's library later would get this one.
    options = ["-O1", "-shared", "-fPIC", f"-DSTANDIN_AGE={AGES.index(age)}"]
    subprocess.run([compiler, *options, "-o", str(library), str(SOURCE), "-lpthread"], check=True)
    return library


@pytest.fixture(scope="session")
def compiled_driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Age], Path]:
    """A function that returns the library of an age, compiled at its first call."""

    @cache
    def compiled(age: Age) -> Path:
        library = built(tmp_path_factory.mktemp(f"driver-{age}"), age)
        if library is None:
            pytest.skip("no C compiler for the stand-in of the driver library")
        return library

    return compiled


@pytest.fixture
def driver_age() -> Age:
    """The age of the driver; parametrise a test with it (`indirect` is not needed) for an older one."""
    return "new"


@pytest.fixture
def driver(
    compiled_driver: Callable[[Age], Path], driver_age: Age, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    """The stand-in, in place of the machine's own driver, for one test."""
    import pynvml

    path = compiled_driver(driver_age)
    folder = tmp_path / "nvidia-driver"
    folder.mkdir()
    standin = Driver(folder, path)
    for name, value in standin.variables().items():
        monkeypatch.setenv(name, value)
    library = ctypes.CDLL(str(path))
    # What `pynvml` would keep from the first load in this process: a library, its functions, how often it is open.
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    yield standin
    left_open = standin.num_open(os.getpid())
    while library.nvmlShutdown() != _UNINITIALIZED:
        pass
    assert left_open == 0, "the driver was opened and not closed"
