"""One step of an optimizer class on stand-ins, and what its state keeps after it. Torch only inside."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from effcli.errors import UsageError
from effcli.optim.by_path.stand_ins import Shape
from effcli.optim.entry import Groups, Hyper
from effcli.optim.trial import trial_group
from effcli.units import Role

if TYPE_CHECKING:
    import torch

    from effcli.state_entries import Tally

_SEED = 0
"""Any fixed one: a layout is kept for the whole process, so it must not depend on earlier draws."""
_WEIGHT_SIZE = 0.02
"""Standard deviation of the weights, that of a freshly made transformer."""


class Builder(Protocol):
    """Makes the optimizer that is probed; equal and hashable, since layouts are kept by it."""

    @property
    def path(self) -> str:
        """Return how messages name the class."""

    def __call__(self, groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
        """Return a new optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What is asked for: a class with its hyperparameters, and a parameter's shape, dtype and place in the model."""

    build: Builder
    hyper: tuple[tuple[str, Any], ...]
    shape: Shape
    dtype: str
    hidden: bool

    def refusal(self, why: str) -> UsageError:
        """Return the error that names class, shape and reason."""
        shown = " x ".join(map(str, self.shape)) or "scalar"
        return UsageError(f"optimizer '{self.build.path}' cannot be sized for {self.dtype} weights {shown}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one key of a parameter's state keeps in one role; `on_host` whatever the device of the parameter."""

    key: str
    role: Role
    shared: bool
    on_host: bool = False
    num_elements: int = 0
    num_bytes: int = 0


Layout = tuple[Kept, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The layout of each parameter, with what belongs to the whole optimizer, and what ended the step early."""

    layouts: tuple[Layout, ...] = ()
    error: BaseException | None = None


def step(probe: Probe, shape: Shape, *, copies: int = 1, without_data: bool = False) -> Stepped:
    """Make one step on equal parameters with random gradients, or on the meta device, where nothing has values.

    Only there is known what lies on the host. An optimizer that cannot be made has no layouts.
    """
    with _undisturbed():
        params = [_parameter(shape, probe.dtype, seed, without_data) for seed in range(copies)]
        hyper = dict(probe.hyper)
        group = trial_group(params, hidden=probe.hidden, weight_decay=hyper.get("weight_decay", 0.0))
        error: BaseException | None = None
        try:
            optimizer = probe.build([group], {**hyper, "overrides": ()})
        except Exception as failure:  # whatever the class raises
            return Stepped(error=failure)
        try:
            optimizer.step()
        except (Exception, SystemExit) as failure:
            error = failure
        return Stepped(layouts=_layouts(optimizer, group["names"], params, without_data), error=error)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the random state, hide warnings and texts that the real run gives again, and compile nothing."""
    import torch

    with (
        torch.random.fork_rng(devices=[]),
        torch.compiler.set_stance("force_eager"),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(_SEED)
        yield


def _parameter(shape: Shape, dtype: str, seed: int, without_data: bool) -> torch.nn.Parameter:
    import torch

    def draw() -> torch.Tensor:
        if without_data:
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(draw() * _WEIGHT_SIZE)
    param.grad = draw()
    return param


def _layouts(
    optimizer: torch.optim.Optimizer, names: list[str], params: list[torch.nn.Parameter], without_data: bool
) -> tuple[Layout, ...]:
    from effcli.state_entries import states_of, tally

    counted = tally(states_of(optimizer, zip(names, params, strict=True)), params)
    return tuple(_layout(counted, name, set(names) - {name}, without_data) for name in names)


def _layout(counted: Tally, owner: str, others: set[str], without_data: bool) -> Layout:
    """Return what `owner` and the whole optimizer keep: per key first what it counts elements of."""
    layout: list[Kept] = []
    for (name, key), entry in counted.entries.items():
        if name in others:
            continue
        kinds: dict[tuple[Role, bool], Kept] = {}
        for held in counted.held.values():
            if held.key == key and name in held.owners:
                kind = (held.role, held.is_shared or name != owner)
                new = Kept(key=key, role=held.role, shared=kind[1], on_host=without_data)
                kept = kinds.get(kind, new)
                kinds[kind] = replace(
                    kept,
                    num_bytes=kept.num_bytes + held.storage.num_bytes,
                    on_host=kept.on_host and held.storage.device == "cpu",
                )
        role = Role.STEP if key == "step" else Role.STATISTIC
        if entry.num_elements or not kinds:
            shared = (role, False) not in kinds and ((role, True) in kinds or name != owner)
            new = Kept(key=key, role=role, shared=shared, on_host=entry.dtypes == {"number"})
            kinds[role, shared] = replace(kinds.get((role, shared), new), num_elements=entry.num_elements)
        layout += kinds.values()
    return tuple(layout)
