"""Shapes and dtypes of the weights in a model's files: from their headers, no value is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from effcli.errors import DataError, first_line
from effcli.inspection.layout import Shape
from effcli.saved.mapped import map_file
from effcli.saved.torch_file import load_torch_file

_SAFE = ("model.safetensors", "adapter_model.safetensors")
_PICKLED = "pytorch_model.bin"
_OTHERS = re.compile(r"(?:pytorch_)?model_(\d+)\.(?:safetensors|bin)")
"""Further models that accelerate saves beside the first (accelerate/checkpointing.py, 1.15)."""
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of a model's files."""

    shape: Shape
    dtype: str


def models_in(folder: Path) -> tuple[dict[str, Weight], ...]:
    """Return the tensors of each model whose files a folder has, of sharded ones too.

    Raises:
        DataError: a file of a model is damaged, or one that its index names is missing.
    """
    first = next(filter(None, (_files(folder, name) for name in (*_SAFE, _PICKLED))), None)
    if first is None:
        return ()
    matches = [match for name in os.listdir(folder) if (match := _OTHERS.fullmatch(name))]
    others = [[folder / match[0]] for match in sorted(matches, key=lambda match: int(match[1]))]
    return tuple({key: weight for file in files for key, weight in _read(file)} for files in (first, *others))


def _read(path: Path) -> Iterator[tuple[str, Weight]]:
    return _of_safetensors(path) if path.suffix == ".safetensors" else _of_pickle(path)


def _files(folder: Path, name: str) -> list[Path]:
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return []
    try:
        shards = {Path(str(shard)).name for shard in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"'{index}' is no index of a model's files") from error
    return [folder / shard for shard in sorted(shards)]


def _of_safetensors(path: Path) -> Iterator[tuple[str, Weight]]:
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_slice(key)
                dtype = str(tensor.get_dtype())
                yield key, Weight(shape=tuple(tensor.get_shape()), dtype=_DTYPES.get(dtype, dtype))
    except (OSError, SafetensorError) as error:
        raise DataError(f"'{path}' is no safetensors file that can be read: {first_line(error)}") from error


def _of_pickle(path: Path) -> Iterator[tuple[str, Weight]]:
    tensors = load_torch_file(map_file(path)).value
    for key, tensor in tensors.items() if isinstance(tensors, Mapping) else ():
        if isinstance(tensor, torch.Tensor):
            yield str(key), Weight(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
