"""Patterns of parameter names. Needs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from effcli.errors import UsageError


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a parameter name fits any pattern.

    A pattern with `*`, `?` or `[` is a shell-style pattern for the whole name; one that begins with `=` is the whole
    name itself; any other fits wherever it occurs in the name, so that `embed` means the same as `*embed*`.
    """
    return any(_fits(name, pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    if pattern.startswith("="):
        return name == pattern[1:]
    return fnmatchcase(name, pattern) if any(sign in pattern for sign in "*?[") else pattern in name


def check_patterns(patterns: Iterable[str], names: Iterable[str], flag: str, kind: str = "parameter") -> None:
    """Raise unless every pattern of `flag` fits at least one of the names; `kind` says of what they are names.

    Raises:
        UsageError: a pattern is empty or fits nothing.
    """
    known = list(names)
    for pattern in patterns:
        if not pattern or not any(matches(name, (pattern,)) for name in known):
            example = f"; a name looks like '{known[0]}'" if known else ""
            raise UsageError(f"{flag} '{pattern}' fits no {kind}{example}")
