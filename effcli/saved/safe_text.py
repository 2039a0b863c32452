"""Text out of a file, as a message may show it."""

from __future__ import annotations

from effcli.units import cut


def safe(text: str, length: int = 60) -> str:
    """Return a text in one line: at most `length` characters, `?` in the place of each that cannot be printed."""
    return "".join(character if character.isprintable() else "?" for character in cut(text, length))
