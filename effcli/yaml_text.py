"""Recipe files: YAML read without guessing types, written so that it reads back the same."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from effcli.errors import UsageError
from effcli.flags import FLAG_OF

_NULL = re.compile(r"(?:~|null|Null|NULL|)$")
_NULL_TAG = "tag:yaml.org,2002:null"


class _Loader(yaml.BaseLoader):
    """Reads scalars as texts and unquoted null, ~ and nothing as None.

    Refuses a key that is given twice, tags, which other programs run code for, and anchors, by which a few lines
    stand for any number of values.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            problem = f"'{sign}{event.anchor}' is an anchor; write the value where it belongs, or put it in quotes"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        if event.tag is not None:
            problem = f"'{event.tag}' is a tag; a recipe has none, so leave it out, or put the value in quotes"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
            if key.value in seen:
                problem = f"'{key.value}' is given twice, first in line {seen[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(_NULL_TAG, _NULL, ["~", "n", "N", ""])
_Loader.add_constructor(_NULL_TAG, lambda loader, node: None)


class _Dumper(yaml.SafeDumper):
    """Writes texts with line breaks and other invisible characters in escapes: unquoted, PyYAML 6 folds some away."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def dump(values: Mapping[str, Any]) -> str:
    """Return nested values as YAML that `parse` reads back, texts that look like something else in quotes."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def comment(text: str) -> str:
    """Return the lines of a text as YAML comments; characters that YAML refuses even there become question marks."""
    lines = ["".join(character if character.isprintable() else "?" for character in line) for line in text.splitlines()]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def is_null(text: str) -> bool:
    """Return whether an unquoted value means "not given"."""
    return _NULL.fullmatch(text.strip()) is not None


def read_text(path: Path) -> str:
    """Return the text of a recipe file, without a byte order mark.

    Raises:
        UsageError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the recipe '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read the recipe '{path}': it is not UTF-8 text") from error


def parse(text: str, source: str) -> dict[str, Any]:
    """Return the mapping that a YAML text holds, with texts for scalars and None for nothing; messages name `source`.

    Raises:
        UsageError: it is not readable as YAML, has a key twice in one place, or holds no mapping.
    """
    try:
        values = yaml.load(text, Loader=_Loader)  # noqa: S506 (a BaseLoader, which builds texts, lists and mappings alone)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        raise UsageError(f"{place}: not readable as YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(f"{source}, line {line}: not readable as YAML: {error.reason}") from error
    except RecursionError as error:
        raise UsageError(f"{source}: not readable as YAML: nested too deeply") from error
    if not isinstance(values, dict):
        sections = ", ".join(dict.fromkeys(field.split(".")[0] for field in FLAG_OF))
        raise UsageError(f"{source}: holds no sections; a recipe has some of {sections}, each with its keys")
    return values
