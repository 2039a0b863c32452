"""Real steps of a real optimizer, on weights without data, with every storage that comes and goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from effcli.memory.tape import Alloc, Free
from effcli.state_entries import states_of
from effcli.storage import leaves
from effcli.trace.by_shape import ByShape
from effcli.trace.kernels import Kernels
from effcli.trace.recorder import Recorder
from effcli.units import Category, ParamInfo

Build = Callable[[Mapping[str, torch.nn.Parameter]], torch.optim.Optimizer]
"""Parameters by name -> the optimizer over them."""

CLIPPING = "gradient clipping"
FOREACH = "foreach temporaries"
TEMPORARIES = "optimizer temporaries"

_OPEN = frozenset({"aten", "prim", "prims", "profiler"})
"""Namespaces of operators whose kernels' workspaces are known; of others only the results are seen."""

_LATER = 10
"""Updates by which step counts are put forward for a later one: RAdam rectifies from the sixth on (torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Events of one update, or of making the optimizer, under the recorder's block numbers.

    `gradients` are blocks by parameter, live at the start; `state` those that the state holds afterwards, named by
    owner and key. `replaced_weights` says whether a weight has another storage now.
    """

    events: tuple[Alloc | Free, ...]
    gradients: Mapping[str, int]
    state: Mapping[str, int]
    replaced_weights: bool = False


class StepRecorder(Recorder):
    """Notes what a step takes on the device: weights are meta tensors, and what is made on the host has values.

    The host counts only where it is the device. `kind` is what temporaries are called at the time.
    """

    def __init__(self, kernels: Kernels, *, with_host: bool) -> None:
        super().__init__(kernels)
        self.kind = TEMPORARIES
        self.on_host: set[int] = set()
        self.closed_operators: set[str] = set()
        self._with_host = with_host
        self._by_shape = ByShape()

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the operator gives, by shape alone."""
        return self._by_shape.answer(func, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and note the storages it made."""
        if func is torch.ops.aten._local_scalar_dense.default and not args[0].is_meta:
            return func(*args)
        if func.namespace not in _OPEN:
            self.closed_operators.add(func._schema.name)
        start = len(self.events)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        kind = FOREACH if self.kind == TEMPORARIES and isinstance(result, list) else self.kind
        for place in range(start, len(self.events)):
            event = self.events[place]
            if isinstance(event, Alloc) and event.category is not Category.TEMPORARIES:
                self.events[place] = event._replace(category=Category.TEMPORARIES, kind=kind)
        if not self._with_host and isinstance(result, torch.Tensor) and not result.is_meta:
            self.on_host.add(self.known(result))
        return result


class Rehearsal:
    """An optimizer over meta parameters, made by `build` from them, whose updates are recorded.

    `built` is what making it did.
    """

    def __init__(
        self,
        build: Build,
        params: Sequence[ParamInfo],
        device: str,
        kernels: Kernels,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._one_by_one = one_by_one
        self._parameters = {param.name: torch.nn.Parameter(_without_data(param)) for param in params}
        self._recorder = StepRecorder(kernels, with_host=device == "cpu")
        self._device = device
        self._weights = self._weight_blocks()
        with self._recording():
            self._optimizer = build(self._parameters)
        self.built = self._recorded({})

    def update(self, max_grad_norm: float) -> Recorded:
        """Clip the gradients, step and drop them, as `effcli.engines.pytorch` does; return what that did."""
        for parameter in self._parameters.values():
            parameter.grad = torch.empty_like(parameter)
        gradients = {name: self._recorder.known(parameter.grad) for name, parameter in self._parameters.items()}
        with self._recording():
            self._recorder.kind = CLIPPING
            norm = clip_grad_norm_(list(self._parameters.values()), max_grad_norm)
            self._recorder.kind = TEMPORARIES
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            del norm
        return self._recorded(gradients)

    @property
    def closed_operators(self) -> frozenset[str]:
        """Return the names of the operators whose kernels are not torch's own."""
        return frozenset(self._recorder.closed_operators)

    def grow_old(self) -> None:
        """Put step counts forward to those of a later update."""
        for counts in (*self._optimizer.state.values(), *self._optimizer.param_groups):
            step = counts.get("step") if isinstance(counts, dict) else None
            if isinstance(step, int) or (isinstance(step, torch.Tensor) and not step.is_meta):
                counts["step"] += _LATER

    def _recorded(self, gradients: Mapping[str, int]) -> Recorded:
        state = self._state_blocks()
        events = [event for event in self._recorder.events if isinstance(event, Alloc | Free)]
        self._recorder.events.clear()
        return Recorded(
            events=tuple(event for event in events if event.block not in self._recorder.on_host),
            gradients=gradients,
            state=state,
            replaced_weights=self._weight_blocks() != self._weights,
        )

    def _weight_blocks(self) -> dict[str, int]:
        return {name: self._recorder.known(parameter) for name, parameter in self._parameters.items()}

    def _state_blocks(self) -> dict[str, int]:
        """Return the blocks of the state on the device by parameter and key; one that several hold by the first."""
        found: dict[int, str] = {}
        for owner, state in states_of(self._optimizer, self._parameters.items()):
            for number, (part, leaf) in enumerate(leaves(state, "")):
                if isinstance(leaf, torch.Tensor):
                    found.setdefault(self._recorder.known(leaf), f"{owner} {part} {number}")
        return {name: block for block, name in found.items() if block not in self._recorder.on_host}

    @contextmanager
    def _recording(self) -> Iterator[None]:
        with (
            warnings.catch_warnings(),
            redirect_stdout(StringIO()),  # some classes print, and will do so again when the run makes them
            redirect_stderr(StringIO()),
            torch.random.fork_rng(devices=[]),
            _meta_taken_for(self._device, one_by_one=self._one_by_one),
            self._recorder,
        ):
            warnings.simplefilter("ignore")
            yield


def _without_data(param: ParamInfo) -> torch.Tensor:
    return torch.empty(param.shape, dtype=getattr(torch, param.dtype), device="meta")


@contextmanager
def _meta_taken_for(device: str, *, one_by_one: bool) -> Iterator[None]:
    """Let torch choose for meta tensors, while open, the implementation that it would choose on the device.

    On CUDA that is foreach wherever the class can and nothing else was asked for; fused kernels exist on both
    (`_default_to_fused_or_foreach` in torch/optim/optimizer.py and `_has_foreach_support` in
    torch/utils/_foreach_utils.py, 2.13), for tensors of torch's own types alone: `one_by_one` says that they are not.
    """
    optimizers, lists = map(import_module, ("torch.optim.optimizer", "torch.utils._foreach_utils"))
    fused, foreach = "_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"
    places = [(optimizers, fused), *([(optimizers, foreach), (lists, foreach)] if device == "cuda" else [])]
    places = [] if one_by_one else places
    kept = [getattr(module, name) for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, lambda: ["meta"])
        yield
    finally:
        for (module, name), function in zip(places, kept, strict=True):
            setattr(module, name, function)
