"""From what Typer parsed to nested sections of a specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effcli.errors import UsageError
from effcli.flags import FLAG_OF, nest

FIELD_OF = {flag.removeprefix("--").replace("-", "_"): dotted for dotted, flag in FLAG_OF.items()}
"""Name of a parameter of a command -> dotted field."""


def given_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that explicit flags set; a flag that was not given is left to recipe and defaults."""
    given = {
        FIELD_OF[name]: value for name, value in parameters.items() if name in FIELD_OF and value not in (None, [], ())
    }
    if "optim.args" in given:
        given["optim.args"] = dict(_key_and_value(text) for text in given["optim.args"])
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
