"""Text that is safe to print: one line, no control characters, no markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effcli.units import GIB, KIB, MIB, count, format_count

if TYPE_CHECKING:
    from effcli.measure.record import ModelFacts


def plain(text: str) -> str:
    """Return `text` on one line; control characters and other unprintable ones become backslash escapes."""
    return "".join(
        character
        if character.isprintable()
        else " "
        if character.isspace()
        else character.encode("unicode_escape").decode()
        for character in text
    )


def can_encode(text: str, encoding: str) -> bool:
    """Return whether an encoding, as a stream names it, has all characters of a text."""
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def plus_minus(encoding: str) -> str:
    """Return the sign before a deviation, in ASCII where the encoding lacks it."""
    return "\u00b1" if can_encode("\u00b1", encoding) else "+-"


def common_unit(largest: int) -> tuple[int, str]:
    """Return the unit, in bytes and by name, that suits all amounts of a table whose largest is given."""
    return (GIB, "GiB") if largest >= 10 * GIB else (MIB, "MiB") if largest >= MIB else (KIB, "KiB")


def in_unit(num_bytes: int, unit: int) -> str:
    """Return an amount in `unit` with two decimals, without the unit's name; nothing at all is a bare 0."""
    return f"{num_bytes / unit:,.2f}" if num_bytes else "0"


def duration(seconds: float) -> str:
    """Return seconds as `0:12`, `12:34` or `1:02:03`, rounded up to whole seconds."""
    whole = -int(-seconds // 1)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(lr: float) -> str:
    """Return a learning rate with two significant digits, such as `4.6e-05`."""
    return f"{lr:.2g}"


def tokens_of_rows(max_length: int | None, max_target_length: int | None) -> tuple[str, ...]:
    """Return how many tokens rows have, and their targets where these have others; nothing for rows without text."""
    if not max_length:
        return ()
    if max_target_length in (None, max_length):
        return (f"{count(max_length, 'token')} each",)
    return (f"{count(max_length, 'source token')} and {count(max_target_length or 0, 'target token')} each",)


def parameter_counts(model: ModelFacts) -> str:
    """Return trainable, frozen and total parameters, and in how many tensors they are."""
    frozen = model.num_parameters - model.num_trainable_parameters
    return (
        f"{format_count(model.num_trainable_parameters)} trainable + {format_count(frozen)} frozen = "
        f"{format_count(model.num_parameters)}, in {count(model.num_parameter_tensors, 'tensor')}"
    )
