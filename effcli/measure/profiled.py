"""`UpdateProfiler`: what torch's CPU allocator hands out during an update, as torch's profiler sees it from outside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from effcli.measure import torch_profiler
from effcli.measure.whereabouts import shape_of
from effcli.units import format_bytes

if TYPE_CHECKING:
    import torch

NUM_POINTS = 500
"""How many moments a recorded timeline has at most."""

_UNSEEN_SHARE = 0.001
"""The share of a peak that may have been given back unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recorded update: rows and tokens of its largest micro-batch, live bytes moment by moment, and the most."""

    rows: int
    tokens: int
    peak_allocated_bytes: int
    timeline_bytes: tuple[int, ...]


class NotRecordedError(Exception):
    """The allocator could not be recorded; the message says why, as the end of a sentence."""


class UpdateProfiler:
    """Records the allocator between two update boundaries, whichever engine makes the update.

    What is live is what model, optimizer and waiting batches hold at the start, and from there on what the profiler
    sees allocated and freed (torch 2.13). It does not see a block freed that was there before it: batches of the
    update before, which are gone before anything is computed and are not counted, and state that an optimizer puts
    anew in each step, which is refused. Buckets that gradients are views of (DDP) outlive them, and are held as well.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._profile: Any = None
        self._batches: list[ref[torch.Tensor]] = []
        self._held: list[_Held] = []
        self._waiting: list[_Held] = []
        self._buckets: list[ref[torch.Tensor]] = []
        self._shape = (0, 0)
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            optimizer.register_step_pre_hook(self._before_step),
        ]

    @property
    def is_recording(self) -> bool:
        """Return whether an update is being recorded."""
        return self._profile is not None

    def watching(self, collate: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[[Any], dict[str, torch.Tensor]]:
        """Return a collator that makes the same batches in this process, and lets their memory be known."""

        def watched(rows: Any) -> dict[str, torch.Tensor]:
            batch = collate(rows)
            alive = [tensor for tensor in self._batches if tensor() is not None]
            self._batches = alive + [ref(tensor) for tensor in batch.values()]
            return batch

        return watched

    def start(self) -> None:
        """Begin to record, at an update boundary.

        Raises:
            NotRecordedError: another profiler is running, or torch's does not start.
        """
        import torch

        if torch_profiler.is_running():
            raise NotRecordedError("another profiler is running")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints a line at each start and stop
        parameters = list(self._model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        buckets = [tensor for bucket in self._buckets if (tensor := bucket()) is not None]
        self._held = _held((*parameters, *self._model.buffers(), *gradients, *buckets, *_state(self._optimizer)))
        del gradients, buckets
        self._waiting = _held(tensor for batch in self._batches if (tensor := batch()) is not None)
        self._shape = (0, 0)
        unknown = torch.empty(1)
        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        try:
            self._profile.__enter__()
        except RuntimeError as error:
            self._profile = None
            raise NotRecordedError(f"torch's profiler did not start: {error}") from error
        with _unheard():
            # The first block freed that the allocator does not know, which it says; the next 999 it does not.
            del unknown

    def stop(self) -> Recorded:
        """Return what was recorded since the start.

        Raises:
            NotRecordedError: the profiler failed, nothing went through the model, or the optimizer replaced its state.
        """
        profile, self._profile = self._profile, None
        try:
            profile.__exit__(None, None, None)
            changes = torch_profiler.changes(profile)
        except RuntimeError as error:
            raise NotRecordedError(f"torch's profiler failed: {error}") from error
        if not changes or not self._shape[0]:
            raise NotRecordedError("torch's profiler saw no update")
        before = [*self._held, *(entry for entry in self._waiting if entry.is_there)]
        blocks = {entry.address: entry.num_bytes for entry in before}
        live = [sum(blocks.values()), *_played(changes, blocks)]
        peak_bytes = max(live)
        changed = {address for address, _ in changes}
        unseen_bytes = sum(entry.num_bytes for entry in before if entry.address not in changed and not entry.is_there)
        if unseen_bytes > _UNSEEN_SHARE * peak_bytes:
            raise NotRecordedError(
                f"{format_bytes(unseen_bytes)} of weights and optimizer state were replaced in the update, and torch's "
                "profiler does not see when the former ones are freed"
            )
        rows, tokens = self._shape
        return Recorded(
            rows=rows, tokens=tokens, peak_allocated_bytes=peak_bytes, timeline_bytes=tuple(_highest(live, NUM_POINTS))
        )

    def detach(self) -> None:
        """Stop without a result where an update is being recorded, and take the hook off. May be called again."""
        profile, self._profile = self._profile, None
        if profile is not None and torch_profiler.is_running():
            with suppress(RuntimeError):
                profile.__exit__(None, None, None)
        while self._handles:
            self._handles.pop().remove()

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._profile is not None:
            rows, tokens = shape_of(args, kwargs)
            if rows is not None and tokens is not None:
                self._shape = max(self._shape, (rows, tokens), key=lambda shape: shape[0] * shape[1])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep weak references to the buckets: the gradients, which lead to them, are gone when an update begins."""
        gradients = (parameter.grad for parameter in self._model.parameters())
        self._buckets = [ref(grad._base) for grad in gradients if grad is not None and grad._base is not None]


@dataclass(frozen=True, slots=True)
class _Held:
    """A storage that was there at the start; neither this nor the weak reference to its tensor keeps it alive."""

    tensor: ref[torch.Tensor]
    address: int
    num_bytes: int

    @property
    def is_there(self) -> bool:
        """Return whether the tensor still has this storage."""
        from effcli.storage import storages

        tensor = self.tensor()
        return tensor is not None and any(storage.handle.data_ptr() == self.address for storage in storages(tensor))


def _held(tensors: Iterable[torch.Tensor]) -> list[_Held]:
    """Return the storages on the CPU behind tensors, each once."""
    from effcli.storage import storages

    found = {
        address: _Held(ref(tensor), address, storage.num_bytes)
        for tensor in tensors
        for storage in storages(tensor)
        if storage.device == "cpu" and (address := storage.handle.data_ptr())
    }
    return list(found.values())


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer holds, also those inside plain objects."""
    import torch

    from effcli.storage import leaves

    return (leaf for _, leaf in leaves(vars(optimizer), "") if isinstance(leaf, torch.Tensor))


def _played(changes: Iterable[tuple[int, int]], blocks: dict[int, int]) -> Iterator[int]:
    """Yield the bytes that are live after each change, from blocks by their addresses.

    A block given out where another lived says that this one was freed unseen. A free of a block that is not known is
    none of this update: torch says so only of blocks that it saw allocated, now or when something else was recorded.
    """
    live_bytes = sum(blocks.values())
    for address, num_bytes in changes:
        live_bytes -= blocks.pop(address, 0)
        if num_bytes > 0:
            blocks[address] = num_bytes
            live_bytes += num_bytes
        yield live_bytes


def _highest(amounts: Sequence[int], num_points: int) -> Iterator[int]:
    """Yield at most `num_points` amounts in order, each the highest among its neighbours."""
    width = -(-len(amounts) // num_points)
    return (max(amounts[start : start + width]) for start in range(0, len(amounts), width))


@contextmanager
def _unheard() -> Iterator[None]:
    """Keep what torch's own code prints off the terminal; nothing where stderr is closed."""
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
