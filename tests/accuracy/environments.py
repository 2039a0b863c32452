"""Throwaway environments with an older transformers, which share the torch that is installed here."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ADDED = ("numpy<2", "pydantic>=2.10", "peft==0.13.2", "accelerate==1.0.1")
"""Beside transformers: what the tracer imports, and what trained the measured adapters."""


def python_of(version: str, folder: Path) -> Path:
    """Return the interpreter of an environment with that version of transformers; make it if it isn't there."""
    home = folder / f"transformers-{version}"
    python, done = home / "bin" / "python", home / ".installed"
    if not done.exists():
        print(f"making {home}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(home)], check=True)
        _share_torch(home)
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run(
            [*install, "--disable-pip-version-check", f"transformers=={version}", *ADDED],
            check=True,
            stdout=sys.stderr,
        )
        done.touch()
    return python


def _share_torch(home: Path) -> None:
    """Link torch and what it needs into a folder of the environment that comes last on its path."""
    shared = home / "shared"
    shared.mkdir()
    for name in _needed_by("torch", set()):
        distribution = metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "bin")}:
            if not (shared / top).exists():
                (shared / top).symlink_to(Path(str(distribution.locate_file(top))))
    for site in home.glob("lib*/python*/site-packages"):
        (site / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")


def _needed_by(name: str, seen: set[str]) -> Iterator[str]:
    """Yield a package and all that it requires here, as far as they are installed."""
    try:
        requires = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    if name in seen:
        return
    seen.add(name)
    yield name
    for requirement in requires:
        if "extra ==" not in requirement:
            match = re.match(r"[\w.-]+", requirement)
            assert match is not None
            yield from _needed_by(match[0].lower().replace("_", "-"), seen)
