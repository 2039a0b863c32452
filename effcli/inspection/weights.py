"""Shapes and dtypes of the weights in a model's files: from their headers, no value is read. Needs torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from effcli.inspection.layout import Shape

_SAFE = ("model.safetensors", "adapter_model.safetensors")
_PICKLED = "pytorch_model.bin"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of a model's files."""

    shape: Shape
    dtype: str


def weights_in(folder: Path) -> dict[str, Weight]:
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
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shards = sorted({Path(str(shard)).name for shard in json.loads(index.read_bytes())["weight_map"].values()})
        return [folder / shard for shard in shards if (folder / shard).is_file()]
    return []


def _of_safetensors(path: Path) -> Iterator[tuple[str, Weight]]:
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_slice(key)
            dtype = str(tensor.get_dtype())
            yield key, Weight(shape=tuple(tensor.get_shape()), dtype=_DTYPES.get(dtype, dtype))


def _of_pickle(path: Path) -> Iterator[tuple[str, Weight]]:
    import torch

    from effcli.errors import EffcliError
    from effcli.saved.mapped import map_file
    from effcli.saved.torch_file import load_torch_file

    try:
        tensors = load_torch_file(map_file(path)).value
    except EffcliError:
        return
    for key, tensor in tensors.items() if isinstance(tensors, Mapping) else ():
        if isinstance(tensor, torch.Tensor):
            yield str(key), Weight(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
