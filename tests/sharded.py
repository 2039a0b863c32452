"""What torch's `fully_shard` and real optimizers hold in this process, measured; called by `tests.processes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from effcli.optim.groups import decay_groups
from effcli.optim.registry import find, resolve_hyper
from effcli.spec import OptimSpec
from tests.profiled import profiled_peak

WIDTH = 64
UPDATES = 3


class Layer(torch.nn.Module):
    """A layer whose matrices have a number of rows that few numbers of processes divide."""

    def __init__(self, width: int, inner: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, inner, bias=bias)
        self.down = torch.nn.Linear(inner, width, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Model(torch.nn.Module):
    """Embedding, layers and a head of two rows, one factor of a single element, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(1001, WIDTH)
        self.layers = torch.nn.ModuleList([Layer(WIDTH, 99), Layer(WIDTH, 130)])
        self.factor = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.frozen(hidden) * self.factor
        return torch.cat([hidden, self.head(hidden)], dim=-1)  # with two outputs alone gradients would have rank 2


def walk(cases: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return bytes of weights and gradients here, and for each optimizer with its arguments what `_trained` returns."""
    model = _sharded(Model())
    _backward(model, 0)
    local = [_local(parameter) for parameter in model.parameters()]
    gradients = [_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return {
        "shapes": [list(tensor.shape) for tensor in local],
        "weights_bytes": _bytes(local),
        "gradients_bytes": _bytes(gradients),
        "cases": [_trained(name, arguments) for name, arguments in cases],
    }


def _trained(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of state by key after some updates, the learning rate, and how far a run in one process is.

    Or the error that ended an update.
    """
    entry = find(name)
    hyper = resolve_hyper(entry, OptimSpec(name=name, args=arguments))
    models = [_sharded(Model()), Model()]
    decay = 0.01 if entry.takes_weight_decay else 0.0
    sharded, alone = (entry.build(decay_groups(model, decay), hyper) for model in models)
    try:
        for update in range(UPDATES):
            for model, optimizer in zip(models, (sharded, alone), strict=True):
                _backward(model, update)
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:  # upstream raises whatever its backend raises
        return {"error": f"{type(error).__name__}: {error}"}
    state: Counter[str] = Counter()
    for entries in sharded.state.values():
        for key, value in entries.items():
            state[key] += _bytes(_plain(value))
    far = 0.0
    for parameter, one in zip(models[0].parameters(), models[1].parameters(), strict=True):
        far = max(far, float((_whole(parameter) - one).detach().abs().max()))
    return {"state": dict(state), "lr": float(hyper["lr"] or 0.0), "far": far}


def gathered_at_most(world_size: int, sizes: list[tuple[int, int, int]]) -> list[int]:
    """Return the bytes that rank 0 of many allocates at most in a later micro-batch of each `chain`.

    The group is torch's fake one, in which each collective takes the buffers that it would take, and no time.

    One token runs through the model, so activations are next to nothing, and gradients are there from before.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return [_allocated_at_most(_sharded(chain(*each))) for each in sizes]


def _allocated_at_most(model: torch.nn.Module) -> int:
    def micro_batch() -> None:
        model(torch.zeros(1, dtype=torch.long)).sum().backward()

    micro_batch()
    micro_batch()
    return profiled_peak(micro_batch)


def chain(vocabulary: int, inner: int, layers: int) -> torch.nn.Sequential:
    """Return a model of even sizes: an embedding, layers in a list, and a head."""
    width = 256
    model = torch.nn.Sequential()
    model.add_module("embedding", torch.nn.Embedding(vocabulary, width))
    model.add_module("layers", torch.nn.Sequential(*(Layer(width, inner, bias=False) for _ in range(layers))))
    model.add_module("head", torch.nn.Linear(width, vocabulary, bias=False))
    return model


def _sharded(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with each layer a group of its own, and the rest one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _backward(model: torch.nn.Module, update: int) -> None:
    """Leave gradients that are the same in every process."""
    tokens = torch.randint(0, 1001, (4, 16), generator=torch.Generator().manual_seed(update))
    model(tokens).square().mean().backward()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside a value, in the plainest way."""
    if isinstance(value, DTensor):
        yield from _plain(value.to_local())
    elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "__dict__"):
        for inner in vars(value).values():
            yield from _plain(inner)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once; an empty one has none."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
