"""From what Typer parsed to nested sections of a specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effcli.errors import UsageError
from effcli.flags import ESTIMATE_FLAG_OF, FLAG_OF, SEARCH_FLAG_OF, nest

FIELD_OF = {
    flag.removeprefix("--").replace("-", "_"): dotted
    for dotted, flag in {**FLAG_OF, **ESTIMATE_FLAG_OF, **SEARCH_FLAG_OF}.items()
}
"""Name of a parameter of a command -> dotted field."""


def given_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that explicit flags set; a flag that was not given is left to recipe and defaults."""
    given = {
        FIELD_OF[name]: value for name, value in parameters.items() if name in FIELD_OF and value not in (None, [], ())
    }
    if "optim.args" in given:
        given["optim.args"] = dict(_key_and_value(text) for text in given["optim.args"])
    if "optim.overrides" in given:
        given["optim.overrides"] = _overrides(given["optim.overrides"])
    return nest(given)


def one_model(argument: str | None, option: str | None) -> str | None:
    """Return the model that was named, by argument or by `--model`.

    Raises:
        UsageError: both were given and differ.
    """
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"the model is given twice: '{argument}' and --model '{option}'; keep one")
    return argument if argument is not None else option


def _key_and_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and key):
        raise UsageError(f"--optim-arg '{text}': write a key and a value, as in --optim-arg momentum=0.9")
    return key, value


def _overrides(texts: list[str]) -> dict[str, dict[str, str]]:
    """Return pattern -> key -> value of texts like `embed:lr=1e-5,beta2=0.98`; the last colon ends the pattern."""
    overrides: dict[str, dict[str, str]] = {}
    for text in texts:
        pattern, colon, settings = text.rpartition(":")
        pairs = [setting.partition("=") for setting in settings.split(",")]
        if not (colon and pattern) or not all(key.strip() and equals for key, equals, _ in pairs):
            raise UsageError(f"--override '{text}': write a pattern and settings, as in --override 'embed:lr=1e-5'")
        overrides.setdefault(pattern, {}).update({key.strip(): value.strip() for key, _, value in pairs})
    return overrides
