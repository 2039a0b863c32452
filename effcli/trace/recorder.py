"""Notes every storage that comes to life or dies while a step runs under fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from effcli.memory.tape import Alloc, Event, Free, Mark
from effcli.trace.fake_by_shape import VIEWS, FakeByShape
from effcli.trace.kernels import Kernels
from effcli.trace.kinds import Landmarks, kind_of, relabelled
from effcli.trace.scalars import note_truth, scalar_answer
from effcli.units import Category

_BY_SHAPE = FakeByShape()
"""What operators return for which shapes: facts, shared by all recorders."""
_DEVICE = torch.ops.prim.device.default


class Recorder(TorchDispatchMode):
    """Writes a tape of the operators called while it is entered; enter it inside the fake mode, so that it comes first.

    Categories are those known at the time: `forward` or `backward` says which; `effcli.trace.micro`
    corrects them. `source` names the module that runs. `padded` says whether masks have padding in them.
    """

    def __init__(self, kernels: Kernels, *, padded: bool = False, known: Landmarks | None = None) -> None:
        super().__init__()
        self._landmarks = known or Landmarks()
        self._padded = padded
        self.events: list[Event] = []
        self.source = ""
        self.in_backward = False
        self._kernels = kernels
        self._blocks: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._merged: dict[int, int] = {}
        self._next_block = 0
        self._sum: tuple[int, int, int] | None = None

    def known(self, tensor: torch.Tensor) -> int:
        """Return the block of a tensor's storage, noted without an event if it is new: it lives outside the tape."""
        return self._noted(tensor.untyped_storage())

    def allocated(self, tensor: torch.Tensor, *, source: str, kind: str, category: Category) -> int:
        """Note a storage that no operator under this mode made; return its block."""
        storage = tensor.untyped_storage()
        block = self._noted(storage)
        self.events.append(Alloc(block, storage.nbytes(), category, source, kind))
        return block

    def block_of(self, tensor: torch.Tensor) -> int:
        """Return the block of a storage that was noted before."""
        block = self._blocks[id(tensor.untyped_storage())][1]
        return self._merged.get(block, block)

    def mark(self, name: str, number: int = 0) -> None:
        """Note a place on the tape."""
        self._sum = None
        self.events.append(Mark(name, number))

    def workspace(self, num_bytes: int, kind: str) -> int:
        """Note bytes that a kernel takes; return their block, which the caller frees or leaves."""
        block = self._number()
        self.events.append(Alloc(block, num_bytes, Category.TEMPORARIES, self.source, kind))
        return block

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return that the compiler need not be kept away: there is none, and keeping it away takes time."""
        return False

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the operator gives, by shape alone."""
        return _BY_SHAPE.answer(func, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and note the storages it made."""
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked thousands of times, so not passed on
            return args[0].fake_device
        if func in VIEWS:
            return self.answer(func, args, kwargs)
        if func is _DEVICE:
            return func(*args, **kwargs)
        self._sum = None
        if func is torch.ops.aten._local_scalar_dense.default:
            return scalar_answer(args[0], padded=self._padded)
        result = self.answer(func, args, kwargs)
        note_truth(func, args, result)
        made = [self._made(tensor, func, args) for tensor in _tensors(result)]
        sizes = self._kernels.workspace_bytes(func, args)
        self.events += map(Free, [self.workspace(num_bytes, "kernel workspaces") for num_bytes in sizes])
        if self.in_backward and func is torch.ops.aten.add.Tensor and made and made[0] is not None:
            self._sum = self._candidate(args, made[0])
        return result

    def _made(self, tensor: torch.Tensor, func: Any, args: Sequence[Any]) -> int | None:
        storage = tensor.untyped_storage()
        if id(storage) in self._blocks:
            self._relabel(func, id(storage))
            return None
        num_bytes = storage.nbytes()
        block = self._noted(storage)
        category = Category.TEMPORARIES if self.in_backward and not torch.is_grad_enabled() else Category.ACTIVATIONS
        kind = kind_of(func, args, tensor, in_backward=self.in_backward, source=self.source, known=self._landmarks)
        self.events.append(Alloc(block, num_bytes, category, self.source, kind))
        return block

    def _relabel(self, func: Any, key: int) -> None:
        """Name a storage after what is written into it, such as a mask that starts as an empty tensor."""
        kind = relabelled(func)
        if kind is None:
            return
        block = self._blocks[key][1]
        for position in range(len(self.events) - 1, max(-1, len(self.events) - 8), -1):
            event = self.events[position]
            if isinstance(event, Alloc) and event.block == block:
                self.events[position] = event._replace(kind=kind)
                return

    def _candidate(self, args: Sequence[Any], made: int) -> tuple[int, int, int] | None:
        """Return what is needed to take an addition for one in place: the place of its event, and both blocks.

        The autograd engine adds gradients that meet at one tensor in place where it holds the only reference
        (`can_accumulate_inplace`, torch/csrc/autograd/input_buffer.cpp, 2.13), but never with tensor subclasses. A
        view, such as the gradient of a linear layer's weight or of a reshaped input, holds another to its base.
        """
        first, second = args[0], args[1]
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return None
        if first._is_view():
            return None
        if id(first.untyped_storage()) not in self._blocks:
            return None
        return len(self.events) - 1, made, self.block_of(first)

    def _noted(self, storage: Any) -> int:
        key = id(storage)
        if key not in self._blocks:
            block = self._number()
            self._blocks[key] = (weakref.ref(storage, lambda _: self._died(key)), block)
        return self._blocks[key][1]

    def _number(self) -> int:
        self._next_block += 1
        return self._next_block

    def _died(self, key: int) -> None:
        _, block = self._blocks.pop(key)
        block = self._merged.pop(block, block)
        if self._sum is not None and self._sum[2] == block:
            position, made, _ = self._sum
            event = self.events[position]
            if isinstance(event, Alloc) and event.block == made:
                del self.events[position]
                self._merged[made] = block
                self._sum = None
                return
        self.events.append(Free(block))


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for item in result:
            yield from _tensors(item)
