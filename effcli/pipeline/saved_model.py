"""The model beside a saved optimizer state: what its files hold, and the order of its parameters. Needs torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effcli.errors import EffcliError, UsageError
from effcli.pipeline.saved_layout import Shape

_SAFE = ("model.safetensors", "adapter_model.safetensors")
_PICKLED = "pytorch_model.bin"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""What Trainer takes a name of a parameter without decay by, in lower case, beside modules of the class LayerNorm
(`Trainer.get_decay_parameter_names` in transformers/trainer.py, 5.24)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of a model's files."""

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a model; `decayed` says whether Trainer decays it."""

    name: str
    shape: Shape
    decayed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBeside:
    """The model in the folder of a state, or in the one above.

    `weights` are the tensors of its files by name, `parameters` its parameters in the order of `named_parameters`,
    empty where that is not known, for the reason `why`.
    """

    folder: Path
    weights: Mapping[str, Weight]
    parameters: Sequence[Parameter] = ()
    why: str = ""


def model_beside(path: Path, *, order: bool) -> ModelBeside | None:
    """Return the model beside a state, with the order of its parameters where that is asked for; None without one."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, folder.absolute().parent):
        weights = _weights(place)
        if weights or (place / "config.json").is_file():
            break
    else:
        return None
    if not order:
        return ModelBeside(folder=place, weights=weights)
    try:
        parameters = _parameters(place, weights)
    except EffcliError as error:
        return ModelBeside(folder=place, weights=weights, why=str(error))
    return ModelBeside(folder=place, weights=weights, parameters=parameters)


def _weights(folder: Path) -> dict[str, Weight]:
    """Return the tensors of the model files in a folder, of sharded ones too; empty where there are none to read."""
    for name in _SAFE:
        files = _files(folder, name)
        if files:
            return {key: weight for file in files for key, weight in _of_safetensors(file)}
    return {key: weight for file in _files(folder, _PICKLED) for key, weight in _of_pickle(file)}


def _files(folder: Path, name: str) -> list[Path]:
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return []
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = sorted({Path(str(shard)).name for shard in json.loads(index.read_bytes())["weight_map"].values()})
        return [folder / shard for shard in shards if (folder / shard).is_file()]
    return []


def _of_safetensors(path: Path) -> Iterator[tuple[str, Weight]]:
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            tensor = file.get_slice(key)
            dtype = str(tensor.get_dtype())
            yield key, Weight(shape=tuple(tensor.get_shape()), dtype=_DTYPES.get(dtype, dtype))


def _of_pickle(path: Path) -> Iterator[tuple[str, Weight]]:
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:  # whatever a foreign file makes torch raise: then there is no model to name parameters by
        return
    for key, tensor in tensors.items() if isinstance(tensors, Mapping) else ():
        if isinstance(tensor, torch.Tensor):
            yield str(key), Weight(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _parameters(folder: Path, weights: Mapping[str, Weight]) -> tuple[Parameter, ...]:
    """Return the parameters of a model in the order of `named_parameters`.

    Raises:
        UsageError: the folder has no configuration, or one that no model can be built from without code of its own.
        UnreachableError: it holds adapters, and the model that they are for is not on this machine.
    """
    if (folder / "adapter_config.json").is_file():
        raise UsageError("it holds adapters of peft")
    if not (folder / "config.json").is_file():
        raise UsageError("there is no config.json beside it, and files of weights do not keep the order")
    return _ordered(_built(str(folder)))


def _built(name: str) -> Any:
    """Return the model of a folder or hub id on the meta device, with the head that it was saved with."""
    from effcli.models.own_code import config_of
    from effcli.models.shapes import changed_model
    from effcli.models.source import config_file, config_values
    from effcli.models.tasks import default_task, own_task
    from effcli.spec import ModelSpec

    config = config_of(name, config_values(name, config_file(name)), trust=False)
    task = own_task(config) or default_task(config)
    return changed_model(config, task, ModelSpec(), "float32", name=name).model


def _ordered(model: Any) -> tuple[Parameter, ...]:
    from torch.nn import LayerNorm

    normalising = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, LayerNorm)
        for parameter in module.parameters()
    }
    return tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            decayed=id(parameter) not in normalising and _NO_DECAY.search(name.lower()) is None,
        )
        for name, parameter in model.named_parameters()
    )
