"""Parameter shapes of a model without the model: all that the state laws need. No torch.

A model's parameters are written folded: a run of equal layers is one block with its number of repeats, and a
dimension that is the number of labels is written as a word. So the shapes of a hundred models fit into a small file,
and a 405-billion-parameter model into two dozen lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from effcli.units import ParamInfo

NUM_LABELS = "num_labels"
"""Stands in a folded shape for the number of labels."""
OUTSIDE, FROZEN = "o", "f"
"""Marks of a folded parameter: outside the model's body (`ParamInfo.hidden` is false); never trained, as the model
itself says of fixed positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """A model as the laws see it: class, task, parameters in the order of `named_parameters`, bytes of buffers.

    A tied parameter is listed once; `tied` are the names under which it occurs again. Buffers (position ids, rotary
    frequencies) are no parameters: they are neither trained nor counted among them.
    """

    architecture: str
    task: str
    parameters: tuple[ParamInfo, ...]
    tied: tuple[str, ...] = ()
    buffers_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(parameter.num_elements for parameter in self.parameters)


def to_json(shapes: ModelShapes) -> dict[str, Any]:
    """Return the shapes as plain data, folded; `from_json` is its inverse."""
    rows = [(parameter.name, parameter.shape, _marks(parameter)) for parameter in shapes.parameters]
    return {
        "architecture": shapes.architecture,
        "task": shapes.task,
        "tied": list(shapes.tied),
        "buffers_bytes": shapes.buffers_bytes,
        "parameters": list(_fold(rows)),
    }


def from_json(values: dict[str, Any], *, num_labels: int | None = None) -> ModelShapes:
    """Return the shapes that plain data describes, with `num_labels` where a dimension is that number."""
    return ModelShapes(
        architecture=values["architecture"],
        task=values["task"],
        tied=tuple(values["tied"]),
        buffers_bytes=values["buffers_bytes"],
        parameters=tuple(
            ParamInfo(
                name=name,
                shape=tuple((num_labels or 0) if side == NUM_LABELS else int(side) for side in shape),
                hidden=OUTSIDE not in marks,
                trainable=FROZEN not in marks,
            )
            for name, shape, marks in _unfold(values["parameters"], "")
        ),
    )


def mark_num_labels(values: dict[str, Any], other: dict[str, Any], num_labels: int) -> dict[str, Any]:
    """Return folded shapes with a word for every dimension that is `num_labels` and differs in `other`.

    `other` are the shapes of the same model with another number of labels.
    """
    return {**values, "parameters": _mark(values["parameters"], other["parameters"], num_labels)}


Row = tuple[str, Sequence[Any], str]
"""Name, shape and marks of a parameter."""


def _marks(parameter: ParamInfo) -> str:
    return ("" if parameter.hidden else OUTSIDE) + ("" if parameter.trainable else FROZEN)


def _fold(rows: Sequence[Row]) -> Iterator[Any]:
    """Yield `[name, shape]`, with marks as a third item where there are any, and blocks of repeated layers."""
    position = 0
    while position < len(rows):
        prefix = _numbered_prefix(rows[position][0])
        if prefix is None:
            name, shape, marks = rows[position]
            yield [name, list(shape), marks] if marks else [name, list(shape)]
            position += 1
            continue
        layers: list[tuple[int, list[Row]]] = []
        while position < len(rows) and (split := _split(rows[position][0], prefix)) is not None:
            index, rest = split
            if not layers or layers[-1][0] != index:
                layers.append((index, []))
            layers[-1][1].append((rest, *rows[position][1:]))
            position += 1
        yield from _blocks(prefix, layers)


def _blocks(prefix: str, layers: Sequence[tuple[int, list[Row]]]) -> Iterator[dict[str, Any]]:
    block: dict[str, Any] | None = None
    for index, rows in layers:
        inner = list(_fold(rows))
        if block is not None and block["each"] == inner and block["from"] + block["repeat"] == index:
            block["repeat"] += 1
            continue
        if block is not None:
            yield block
        block = {"layers": prefix, "from": index, "repeat": 1, "each": inner}
    if block is not None:
        yield block


def _numbered_prefix(name: str) -> str | None:
    """Return what stands before the first number among the parts of a dotted name; None without a number."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return "".join(f"{before}." for before in parts[:index])
    return None


def _split(name: str, prefix: str) -> tuple[int, str] | None:
    """Return the layer number behind `prefix` and what follows it; None where the name goes on otherwise."""
    if not name.startswith(prefix):
        return None
    number, dot, rest = name[len(prefix) :].partition(".")
    return (int(number), dot + rest) if number.isdecimal() else None


def _unfold(items: Iterable[Any], prefix: str) -> Iterator[Row]:
    for item in items:
        if isinstance(item, dict):
            for index in range(item["from"], item["from"] + item["repeat"]):
                yield from _unfold(item["each"], f"{prefix}{item['layers']}{index}")
        else:
            name, shape, *marks = item
            yield f"{prefix}{name}", shape, "".join(marks)


def _mark(items: Sequence[Any], others: Sequence[Any], num_labels: int) -> list[Any]:
    marked: list[Any] = []
    for item, other in zip(items, others, strict=True):
        if isinstance(item, dict):
            marked.append({**item, "each": _mark(item["each"], other["each"], num_labels)})
        else:
            shape = [
                NUM_LABELS if here != there and here == num_labels else here
                for here, there in zip(item[1], other[1], strict=True)
            ]
            marked.append([item[0], shape, *item[2:]])
    return marked
