"""Settings of a run by dotted name, and their values as a person would type them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effcli.spec import RunSpec

UNSET = "default"
"""The text of a setting that was left to its default."""


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value of a record if it is a mapping, else an empty one: records may have been edited."""
    return value if isinstance(value, Mapping) else {}


def dotted(settings: Mapping[str, Any], depth: int | None = None) -> dict[str, Any]:
    """Return nested settings by dotted name of at most `depth` parts; None goes all the way down.

    An empty mapping is a value.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value and depth != 1:
            inner = dotted(value, None if depth is None else depth - 1)
            flat |= {f"{key}.{name}": part for name, part in inner.items()}
        else:
            flat[str(key)] = value
    return flat


def run_settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by dotted name, those of output aside; what an older record lacks has its default.

    Each of several values under one name stands for itself, such as `optim.args.momentum`.
    """
    sections = RunSpec().model_dump(mode="json", exclude={"output"})
    flat = dotted({section: {**own, **mapping(spec.get(section))} for section, own in sections.items()})
    return {name: value for name, value in flat.items() if value != {}}


def setting_label(name: str) -> str:
    """Return how a setting is called without its section, such as `momentum`."""
    return (name.partition(".")[2] or name).removeprefix("args.")


def setting_text(value: Any, unset: str = UNSET) -> str:
    """Return a value as a person would type it, numbers in full; `unset` is the text of what has none."""
    if value is None or value in ([], {}, ()):
        return unset
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={setting_text(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
