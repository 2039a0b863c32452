"""Versions of CUDA, as builds of torch and drivers name them: which build runs with which driver."""

from __future__ import annotations


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version such as "12.8"."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) or (0,)


def needs_newer_driver(built: str, served: str | None) -> bool:
    """Return whether a build for one CUDA is too new for a driver that serves another; None where that is not known.

    A build runs with every driver of its major version, or of a later one (NVIDIA's minor version compatibility).
    """
    return served is not None and version_numbers(built)[0] > version_numbers(served)[0]
