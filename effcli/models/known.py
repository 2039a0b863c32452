"""From a name to parameter shapes, by the shortest way: catalogue, cache, meta device. No torch before the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effcli.catalogue import lookup as catalogue
from effcli.collector import collector_paused
from effcli.errors import UnreachableError
from effcli.models.own_code import brings_own_code, config_of
from effcli.models.shape_cache import cache_key, load_shapes, store_shapes
from effcli.models.source import config_file, config_values
from effcli.shapes import ModelShapes

DEFAULT_NUM_LABELS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """Shapes of a model that was named, its configuration as written, and what should be said about it.

    `own_code` says that it is built from code which comes with it.
    """

    name: str
    config: Mapping[str, Any]
    shapes: ModelShapes
    notes: tuple[str, ...]
    own_code: bool = False

    def config_object(self) -> Any:
        """Return the configuration as an object; see `effcli.models.own_code.config_of`."""
        return config_of(self.name, self.config, trust=self.own_code)


def known_model(name: str, task: str | None, num_labels: int | None, *, trust_remote_code: bool = False) -> KnownModel:
    """Return the shapes of the model named, with the head of `task` (none: what people fine-tune it for).

    Names are looked up in the catalogue first, then among local folders, then on the hub, its cache first. Where
    `trust_remote_code` lets code run that comes with a folder or a hub id, the shapes are not cached.

    Raises:
        UsageError: no such folder, a quantised checkpoint, an unknown task, or no head for it.
        UnreachableError: neither in the catalogue nor on this machine, and the hub does not give it.
    """
    model = catalogue.find(name)
    if model is not None:
        return _from_catalogue(name, model, task, num_labels, trust_remote_code)
    try:
        path = config_file(name)
    except UnreachableError as error:
        raise UnreachableError(f"{error}.{catalogue.suggestion(name)}") from error
    config = config_values(name, path)
    own_code = trust_remote_code and brings_own_code(config)
    shapes = _traced(name, config, task, num_labels, own_code) if own_code else _shapes(name, config, task, num_labels)
    return KnownModel(name=name, config=config, shapes=shapes, notes=_stored_dtype(config), own_code=own_code)


def _from_catalogue(
    name: str, model: catalogue.CatalogueModel, task: str | None, num_labels: int | None, trust_remote_code: bool
) -> KnownModel:
    notes = []
    if (Path(name) / "config.json").is_file():
        notes.append(f"The folder '{name}' has a catalogue model's name; for the folder write ./{name}.")
    if trust_remote_code:
        notes.append(f"The catalogue has '{model.name}' as transformers builds it: code that comes with it is not run.")
    labels = num_labels or int(model.config.get("num_labels", DEFAULT_NUM_LABELS))
    return KnownModel(
        name=model.name,
        config=model.config,
        shapes=catalogue.shapes(model, task or model.default_task, labels)
        or _shapes(model.name, model.config, task, num_labels),
        notes=(*notes, *_stored_dtype(model.config)),
    )


def _shapes(name: str, config: Mapping[str, Any], task: str | None, num_labels: int | None) -> ModelShapes:
    """Return shapes from the cache, or from the meta device and into the cache."""
    key = cache_key(config, task, num_labels)
    shapes = load_shapes(key)
    if shapes is None:
        shapes = _traced(name, config, task, num_labels, False)
        store_shapes(key, shapes)
    return shapes


def _traced(
    name: str, config: Mapping[str, Any], task: str | None, num_labels: int | None, own_code: bool
) -> ModelShapes:
    with collector_paused():
        from effcli.models.shapes import meta_shapes
        from effcli.models.tasks import default_task

        made = config_of(name, config, trust=own_code)
        return meta_shapes(made, task or default_task(made), name=name, num_labels=num_labels)


def _stored_dtype(config: Mapping[str, Any]) -> tuple[str, ...]:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype in (None, "float32"):
        return ()
    return (f"The checkpoint is stored in {dtype}; what training holds is decided by --precision.",)
