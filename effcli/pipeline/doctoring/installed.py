"""Versions: of the program, of the packages that it needs, and of those that it could use."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import distribution, requires
from shlex import quote

from effcli import __version__
from effcli.measure.doctor_record import Check
from effcli.packages import installed_version
from effcli.pipeline.doctoring.findings import Checks, note, ok, problem
from effcli.units import count, listed

SHOWN = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "huggingface-hub",
    "bitsandbytes", "torchao", "peft", "nvidia-ml-py")  # fmt: skip
"""Packages whose versions a report of a fault should have."""

_FOR_DEVELOPERS = "dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A package in the range that effcli declares for it; an `extra` is one that can do without."""

    name: str
    range: str
    extra: bool
    installed: str | None
    fits: bool


def versions() -> dict[str, str | None]:
    """Return versions by package, None for those that are not installed."""
    return {
        "effcli": __version__,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in SHOWN},
    }


def pip_install(package: str) -> str:
    """Return the command that installs a package in the range that effcli declares for it."""
    ranges = {wanted.name: wanted.range for wanted in wanted_packages()} if installed_version("effcli") else {}
    return f"pip install {quote(package + ranges.get(package, ''))}"


def check_program() -> Checks:
    """Return the line about this program and what runs it."""
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    return (ok("effcli", f"{__version__}, {platform.python_implementation()} {platform.python_version()}, {system}"),)


def check_packages() -> Checks:
    """Return whether installed packages lie in the ranges that effcli declares, and which pynvml there is."""
    if installed_version("effcli") is None:
        return (note("packages", "effcli is not installed, so the ranges of its packages are not known"),)
    return (_ranges(tuple(wanted_packages())), *_deprecated_pynvml())


def wanted_packages(declared: Iterable[str] | None = None) -> Iterator[Wanted]:
    """Yield what effcli needs and can use, once each; without `declared` by the metadata of its installation.

    Tools for work on effcli itself are left out.
    """
    from packaging.requirements import Requirement

    lines = (requires("effcli") or []) if declared is None else declared
    seen = set()
    for wanted in sorted(map(Requirement, lines), key=lambda one: "extra ==" in str(one.marker)):
        extra = "extra ==" in str(wanted.marker)
        if wanted.name in seen or f'extra == "{_FOR_DEVELOPERS}"' in str(wanted.marker):
            continue
        if not extra and wanted.marker is not None and not wanted.marker.evaluate():
            continue
        seen.add(wanted.name)
        found = installed_version(wanted.name)
        fits = found is not None and wanted.specifier.contains(found, prereleases=True)
        yield Wanted(name=wanted.name, range=str(wanted.specifier), extra=extra, installed=found, fits=fits)


def _ranges(wanted: tuple[Wanted, ...]) -> Check:
    """Return one line about all packages; those that are wrong are named with the command that mends them."""
    wrong = [one for one in wanted if not one.fits and (one.installed is not None or not one.extra)]
    if wrong:
        faults = [
            f"{one.name} {one.installed} is outside {one.range}" if one.installed else f"{one.name} is not installed"
            for one in wrong
        ]
        return problem(
            "packages", "; ".join(faults), "pip install " + " ".join(quote(f"{one.name}{one.range}") for one in wrong)
        )
    needed = [one for one in wanted if not one.extra]
    missing = [one.name for one in wanted if one.installed is None]
    shown = [
        f"{name} {found}" for name in ("transformers", "accelerate", "datasets") if (found := installed_version(name))
    ]
    text = f"all {count(len(needed), 'needed package')} in their ranges, {listed(shown)}"
    return ok(
        "packages", f"{text}; not installed, for some settings only: {listed(missing, None)}" if missing else text
    )


def _deprecated_pynvml() -> Iterator[Check]:
    """Yield a line where the deprecated package that is named pynvml is there, which shares a module's name."""
    found = installed_version("pynvml")
    if found is None:
        return
    files = {file.parts[0] for file in distribution("pynvml").files or ()}
    if files & {"pynvml.py", "pynvml"}:
        yield problem(
            "pynvml",
            f"the module pynvml comes from the deprecated package pynvml {found}, not from nvidia-ml-py",
            "pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py",
        )
    else:
        yield note("pynvml", f"the deprecated package pynvml {found} is installed and not used", "pip uninstall pynvml")
