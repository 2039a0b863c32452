"""Models that are known without a network: configuration, published parameter count, shapes of the usual heads.

`models.json` holds facts from the models' public repositories; `shapes.jsonl` is generated from it by `make catalogue`
and holds the parameter shapes that the transformers version named in its first line builds. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from effcli.errors import UsageError, nearest
from effcli.shapes import ModelShapes, from_json

MODELS, SHAPES = "models.json", "shapes.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """One model of the catalogue.

    `own_class` is the class that its checkpoint was saved from and `own_task` that class's task; `published_parameters`
    the count stated for it in public, None where none was found, so that its configuration is unconfirmed.
    `count_note` says why the installed transformers counts otherwise, where it does. `organisation` holds the model on
    the hub today, where its name dates from before models had one.
    """

    name: str
    config: dict[str, Any]
    own_class: str
    own_task: str
    default_task: str
    num_parameters: int
    published_parameters: int | None
    count_note: str | None = None
    organisation: str | None = None


def models() -> tuple[CatalogueModel, ...]:
    """Return all models, in the order of the catalogue."""
    return tuple(_models().values())


def matching(pattern: str | None) -> tuple[CatalogueModel, ...]:
    """Return the models whose name or model type contains `pattern`, whatever the case; all of them without one.

    Raises:
        UsageError: there is none.
    """
    wanted = (pattern or "").strip().lower()
    found = tuple(m for m in models() if wanted in m.name.lower() or wanted in str(m.config["model_type"]))
    if not found:
        raise UsageError(f"no model known offline has '{pattern}' in its name.{suggestion(wanted)}")
    return found


def find(name: str) -> CatalogueModel | None:
    """Return the model of this full name (`distilbert/distilbert-base-cased`) or short one; None if there is none.

    The case of letters makes no difference, as on the hub.
    """
    return _models().get(_by_any_name().get(name.strip().lower(), ""))


def suggestion(name: str) -> str:
    """Return ` Did you mean ...?` with the nearest name of the catalogue, or nothing."""
    return nearest(name.lower(), {*_by_any_name(), *(model.name for model in models())})


def shapes(model: CatalogueModel, task: str, num_labels: int) -> ModelShapes | None:
    """Return the shapes of the model with the head of `task`; None where the catalogue has no such head."""
    for line in _lines():  # written with these two keys first, so that the others need not be parsed
        if line.startswith(f'{{"model":"{model.name}","task":"{task}"'):
            return from_json(json.loads(line), num_labels=num_labels)
    return None


def transformers_version() -> str:
    """Return the version of transformers whose model code the shapes were read from."""
    return str(_index()["transformers"])


@cache
def _models() -> dict[str, CatalogueModel]:
    facts, generated = json.loads(_text(MODELS)), _index()["models"]
    return {name: CatalogueModel(name=name, **facts[name], **generated[name]) for name in facts}


@cache
def _by_any_name() -> dict[str, str]:
    """Return lower-case name -> name; the part behind the organisation too, where only one model has it."""
    known: dict[str, str] = {}
    short: dict[str, list[str]] = {}
    for name, model in _models().items():
        known[name.lower()] = name
        short.setdefault(name.rpartition("/")[2].lower(), []).append(name)
        if model.organisation is not None:
            known[f"{model.organisation}/{name}".lower()] = name
    return {**{key: names[0] for key, names in short.items() if len(names) == 1}, **known}


@cache
def _index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads(next(_lines()))
    return index


def _lines() -> Iterator[str]:
    with resources.files(__package__).joinpath(SHAPES).open(encoding="utf-8") as file:
        yield from file


def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
