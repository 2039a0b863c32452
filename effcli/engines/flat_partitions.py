"""Whole tensors of what DeepSpeed's processes hold as flat partitions, and partitions of whole tensors.

Weights are those in 32 bits that the optimizer steps, not what is left of them in the precision of the model. Read from
DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py` and `stage3.py`, whose attributes this uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from effcli.errors import TrainingFailedError
from effcli.ranks.group import is_main, rank, world_size

STEP = "step"
"""Key of a count in the state of a parameter, which every process holds: a tensor of one element is no share then."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flat:
    """One flat tensor that an optimizer steps, and the parameters of which it has a part, in their order.

    `each` says that every parameter is divided by itself (stage 3), rather than all of them as one vector.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    partition: torch.Tensor
    each: bool

    def whole(self, partition: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of all parameters in the host memory of rank 0, nothing elsewhere. Collective."""
        parts = [torch.empty_like(partition) for _ in range(world_size())]
        dist.all_gather(parts, partition.detach())
        if not is_main():
            return {}
        parts = [part.cpu() for part in parts]
        sizes = [shape.numel() for shape in self.shapes]
        if self.each:
            pieces = [part.split([-(-size // world_size()) for size in sizes]) for part in parts]
            vectors = [torch.cat(piece)[:size] for piece, size in zip(zip(*pieces, strict=True), sizes, strict=True)]
        else:
            vectors = [vector.clone() for vector in torch.cat(parts)[: sum(sizes)].split(sizes)]
        return {name: vector.view(shape) for name, shape, vector in zip(self.names, self.shapes, vectors, strict=True)}

    def mine(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this process's partition of whole tensors, padded with zeros."""
        vectors = [tensors[name].flatten() for name in self.names]
        if not self.each:
            return _part(torch.cat(vectors), self.partition.numel())
        return torch.cat([_part(vector, -(-vector.numel() // world_size())) for vector in vectors])


def _part(vector: torch.Tensor, size: int) -> torch.Tensor:
    mine = vector[size * rank() : size * (rank() + 1)]
    return torch.cat([mine, mine.new_zeros(size - mine.numel())])


_HERE = "_effcli_flat_partitions"
"""Attribute of a model and an optimizer that has their partitions, which end with them."""


class FlatPartitions:
    """The partitions of a model and of the optimizer that steps them, found by either.

    Made before DeepSpeed takes names and shapes away, and told what it has `made`.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._dtypes = {name: value.dtype for name, value in model.state_dict(keep_vars=True).items()}
        self._parameters = dict(model.named_parameters())
        self._shapes = {name: value.shape for name, value in self._parameters.items()}
        self._names = {id(value): name for name, value in self._parameters.items()}
        self._groups = [
            {**group, "params": [self._names[id(value)] for value in group["params"]]}
            for group in optimizer.param_groups
        ]
        self.flats: tuple[Flat, ...] = ()

    @classmethod
    def of(cls, owner: torch.nn.Module | torch.optim.Optimizer) -> FlatPartitions | None:
        """Return the partitions of a model or an optimizer; None where DeepSpeed made none."""
        found: FlatPartitions | None = getattr(owner, _HERE, None)
        return found

    def made(self, zero: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take what DeepSpeed made of them, and give the optimizer the flat tensors, each group those of its own."""
        each = hasattr(zero, "fp32_partitioned_groups_flat")
        parts = zero.fp16_groups if each else zero.bit16_groups
        masters = zero.fp32_partitioned_groups_flat if each else zero.single_partition_of_fp32_groups
        self.flats = tuple(
            self._flat([self._names[id(value)] for value in part], master, each=each)
            for part, master in zip(parts, masters, strict=True)
        )
        groups = []
        for index, (group, own) in enumerate(zip(optimizer.param_groups, self._groups, strict=True)):
            mine = [flat for flat in self.flats if flat.names[0] in set(own["params"])]
            names = [f"flat.{index}.{position}" for position in range(len(mine))]
            columns = {"params": [flat.partition for flat in mine], "names": names, "hidden": [True] * len(mine)}
            groups.append({**group, **columns})
        optimizer.param_groups = groups
        self._model, self._optimizer = model, optimizer
        for owner in (model, optimizer):
            setattr(owner, _HERE, self)

    def _flat(self, names: Iterable[str], partition: torch.Tensor, *, each: bool) -> Flat:
        names = tuple(names)
        return Flat(names=names, shapes=tuple(self._shapes[name] for name in names), partition=partition, each=each)

    def weights(self) -> dict[str, Any]:
        """Return the state dict of the model with whole tensors in rank 0, as they were before DeepSpeed cast them.

        Collective; other ranks get none of the parameters. Tied ones share their storage.
        """
        whole: dict[str, torch.Tensor] = {}
        for flat in self.flats:
            whole |= flat.whole(flat.partition)
        stepped = {name for flat in self.flats for name in flat.names}
        for name, parameter in self._parameters.items():
            if name in stepped:
                continue
            share = getattr(parameter, "ds_tensor", None)
            frozen = self._flat([name], share, each=True).whole(share) if share is not None else {name: parameter}
            whole |= {name: value.detach().cpu().to(self._dtypes[name]) for name, value in frozen.items()}
        return {
            name: whole.get(self._names[id(value)]) if id(value) in self._names else value.to(self._dtypes[name])
            for name, value in self._model.state_dict(keep_vars=True).items()
        }

    def load_weights(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take this process's partitions of whole tensors, and what the model has of them in its precision.

        No parameter may be gathered, as before the first forward pass.

        Raises:
            RuntimeError: names or shapes are not those of the model.
        """
        values = self._model.state_dict(keep_vars=True)
        if not set(saved) <= set(values):
            raise RuntimeError("the names of the weights are not those of the model")
        owners = {name: self._names.get(id(value)) for name, value in values.items()}
        tensors = {owner: saved[name] for name, owner in owners.items() if owner is not None and name in saved}
        if {name: tensor.shape for name, tensor in tensors.items()} != self._shapes:
            raise RuntimeError("the weights are not those of the model")
        with torch.no_grad():
            for name, value in values.items():
                if id(value) not in self._names and name in saved:
                    value.copy_(saved[name])
            for flat in self.flats:
                flat.partition.copy_(flat.mine(tensors))
            for name, parameter in self._parameters.items():
                share = getattr(parameter, "ds_tensor", None)
                if share is None:
                    parameter.copy_(tensors[name])
                else:
                    share.copy_(self._flat([name], share, each=True).mine(tensors))

    def state(self) -> dict[str, Any]:
        """Return the state dict that the optimizer would have over whole parameters, complete in rank 0. Collective.

        Raises:
            TrainingFailedError: it holds what belongs to no parameter.
        """
        order = [name for group in self._groups for name in group["params"]]
        entries: dict[str, dict[str, Any]] = {name: {} for name in order}
        for flat in self.flats:
            for key, value in self._optimizer.state[flat.partition].items():
                if key != STEP and isinstance(value, torch.Tensor) and value.dim():
                    if value.shape != flat.partition.shape:
                        raise TrainingFailedError(f"the optimizer's {key} cannot be taken apart into parameters")
                    for name, tensor in flat.whole(value).items():
                        entries[name][key] = tensor
                else:
                    for name in flat.names:
                        entries[name][key] = value
        index = {name: position for position, name in enumerate(order)}
        groups = [
            {**now, **{key: own[key] for key in ("names", "hidden") if key in own}}
            | {"params": [index[name] for name in own["params"]]}
            for now, own in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]
        return {"state": {index[name]: entry for name, entry in entries.items() if entry}, "param_groups": groups}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Load what `state` returned, or a run of one process saved; each process takes its partitions."""
        order = [name for group in self._groups for name in group["params"]]
        entries = {order[index]: entry for index, entry in saved["state"].items()}
        for group, other in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in other.items() if key not in ("params", "names", "hidden")})
        for flat in self.flats:
            first = entries.get(flat.names[0], {})
            self._optimizer.state[flat.partition] = {
                key: self._mine(flat, key, [entries[name][key] for name in flat.names]) for key in first
            }

    @staticmethod
    def _mine(flat: Flat, key: str, values: Sequence[Any]) -> Any:
        """Return this process's part of an entry of state, given that of each parameter of a flat tensor."""
        if key != STEP and isinstance(values[0], torch.Tensor) and values[0].dim():
            return flat.mine(dict(zip(flat.names, values, strict=True))).to(flat.partition.device)
        return values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]
