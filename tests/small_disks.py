"""Disks that are full, in the same process: every byte written in Python, C++ or Rust counts."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let the system refuse to write any file beyond so many bytes, with the signal that Python ignores."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def on_a_disk_of(num_bytes: int, folder: Path, write: Callable[..., Any]) -> Callable[..., Any]:
    """Return `write`, to which `num_bytes` less what files in `folder` take already are left."""

    def limited(*args: Any, **kwargs: Any) -> Any:
        taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        with files_of_at_most(max(0, num_bytes - taken)):
            return write(*args, **kwargs)

    return limited


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Mount a disk in memory at a folder; yields what changes its mount options. Skips where that is not allowed."""
    folder.mkdir()

    def mount(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    if not Path("/bin/mount").exists() or os.geteuid() != 0:
        pytest.skip("only root may mount a disk in memory")
    done = mount("-o", f"size={size}")
    if done.returncode:
        pytest.skip(f"no disk in memory can be mounted here: {done.stderr.strip()}")
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True) and None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
