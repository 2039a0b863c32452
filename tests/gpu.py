"""Runs the tests that need a CUDA device; says so, with exit code 4, where there is none: `python -m tests.gpu`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

NO_DEVICE = 4
TESTS = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Return the exit code of pytest, which is given what its command line was, or that of a missing device."""
    if not torch.cuda.is_available():
        why = "it is a build for CPUs" if torch.version.cuda is None else "effcli doctor says more"
        print(f"error: torch {torch.__version__} finds no CUDA device to test on: {why}", file=sys.stderr)
        return NO_DEVICE
    print(f"on {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    return int(pytest.main(["-q", "-s", "-n", "0", "-m", "gpu", *(arguments or [str(TESTS)])]))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
