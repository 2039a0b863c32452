"""Words for what pydantic found wrong with a specification: every fault in one line, each with its field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from effcli.errors import nearest
from effcli.flags import FLAG_OF, field_label
from effcli.units import cut

if TYPE_CHECKING:
    from pydantic import ValidationError

_WORDS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda given, ctx: f"{given} is below the smallest allowed value {_number(ctx['ge'])}",
    "greater_than": lambda given, ctx: f"{given} is not above {_number(ctx['gt'])}",
    "less_than_equal": lambda given, ctx: f"{given} is above the largest allowed value {_number(ctx['le'])}",
    "less_than": lambda given, ctx: f"{given} is not below {_number(ctx['lt'])}",
    "int_parsing": lambda given, ctx: f"{given} is not a whole number",
    "int_parsing_size": lambda given, ctx: f"{given} is too large a number",
    "int_type": lambda given, ctx: f"{given} is not a whole number",
    "int_from_float": lambda given, ctx: f"{given} is not a whole number",
    "float_parsing": lambda given, ctx: f"{given} is not a number",
    "float_type": lambda given, ctx: f"{given} is not a number",
    "finite_number": lambda given, ctx: f"{given} is not a finite number",
    "bool_parsing": lambda given, ctx: f"{given} is neither true nor false",
    "bool_type": lambda given, ctx: f"{given} is neither true nor false",
    "string_type": lambda given, ctx: f"{given} is not a text",
    "string_too_short": lambda given, ctx: "the text is empty",
    "tuple_type": lambda given, ctx: f"{given} is not a list of texts",
    "too_long": lambda given, ctx: f"{ctx['actual_length']} values given, at most {ctx['max_length']} allowed",
    "dict_type": lambda given, ctx: f"{given} is not a set of keys with values",
    "model_type": lambda given, ctx: f"{given} is not a section of keys with values",
}
"""pydantic's error type -> words, from the value as shown and pydantic's context."""


def explain(error: ValidationError) -> str:
    """Return all faults of a specification in one line; each names the field, what was given and what is allowed."""
    faults = [_fault(detail) for detail in error.errors(include_url=False)]
    return faults[0] if len(faults) == 1 else f"{len(faults)} faults: " + "; ".join(faults)


def _fault(detail: Mapping[str, Any]) -> str:
    dotted = ".".join(str(part) for part in detail["loc"])
    kind, given, context = detail["type"], _shown(detail["input"]), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(dotted)
    if kind == "literal_error":
        allowed = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        hint = nearest(str(detail["input"]), allowed)
        return f"{field_label(dotted)}: {given} is not one of {', '.join(allowed)}.{hint}".rstrip(".")
    if kind == "value_error":  # raised by a validator of ours, which shows the value whole
        return f"{field_label(dotted)}: {str(context['error']).replace(repr(detail['input']), given)}"
    words = _WORDS.get(kind)
    text = words(given, context) if words else f"{given}: {detail['msg']}"
    return f"{field_label(dotted)}: {text}"


def unknown_key(dotted: str) -> str:
    """Return the fault of a key that no section has, with the nearest key that exists or else the list of keys."""
    section, _, key = dotted.rpartition(".")
    sections = list(dict.fromkeys(field.split(".")[0] for field in FLAG_OF))
    elsewhere = [field for field in FLAG_OF if field.endswith(f".{key}")]
    if section in sections:
        keys = [field.split(".")[1] for field in FLAG_OF if field.startswith(f"{section}.")]
        hint, known = nearest(key, keys), f"{section} has {', '.join(keys)}"
    else:
        hint, known = nearest(dotted, [*sections, *FLAG_OF]), f"the sections are {', '.join(sections)}"
    hint = f" Did you mean '{elsewhere[0]}'?" if elsewhere else hint
    return f"{dotted}: unknown key.{hint}" if hint else f"{dotted}: unknown key; {known}"


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e6 else str(int(value))


def _shown(value: Any) -> str:
    """Return a value as a message shows it: numbers bare even where they came as text, long values cut."""
    text = repr(value)
    if value is None:
        text = "an empty value"
    elif isinstance(value, str) and value.lstrip("+-").replace(".", "", 1).isdigit():
        text = value
    return cut(text)
