"""What the first steps of an optimizer add to torch's CUDA allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effcli.collector import CollectorPause

if TYPE_CHECKING:
    import torch

    from effcli.measure.cuda_allocator import Counters


class FirstSteps:
    """Reads by how many bytes the allocated rise around the first step of an optimizer, which makes its state.

    Bitsandbytes' paged optimizers keep it in managed memory, outside the allocator: two steps are taken together
    there, since all of it is in its place only then. A step that the fp16 scaler skips is none. The change has what
    the step leaves behind beside state, and nothing of what it frees before it ends. Python's garbage collector waits
    meanwhile: what it would free has nothing to do with the step.

    Hooks run in the order in which they were registered: make this before, and `arm` it after, all others that hold
    device memory.
    """

    def __init__(self, counters: Counters, optimizer: torch.optim.Optimizer, *, is_resumed: bool) -> None:
        self._counters, self._optimizer = counters, optimizer
        self._wanted = 2 if getattr(optimizer, "is_paged", False) else 1
        self._pause = CollectorPause()
        self._depth = self._done = self._change_bytes = self._before_bytes = 0
        self._reason = "the state was loaded with a checkpoint" if is_resumed else None
        self._handles = [optimizer.register_step_post_hook(self._after_step)] if not is_resumed else []

    def arm(self) -> None:
        """Register what runs before a step."""
        if self._handles:
            self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))

    @property
    def change_bytes(self) -> int | None:
        """Return the bytes, None where no step made the state."""
        return self._change_bytes if self._reason is None and self._done == self._wanted else None

    @property
    def reason(self) -> str | None:
        """Return why there is no change, None where there is one."""
        if self._reason is None and self._done < self._wanted:
            return "no step was made" if not self._done else "a paged optimizer is read after two steps: one was made"
        return self._reason

    def detach(self) -> None:
        """Take the hooks off; what was read stays. May be called more than once."""
        self._pause.end()
        while self._handles:
            self._handles.pop().remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1  # a class whose `step` calls that of its base may run the hooks twice (torch 2.13)
        if self._depth > 1 or self._is_over:
            return
        if not self._done and _has_state(optimizer):
            self._reason = "the optimizer had its state, or a part of it, before its first step"
            return
        self._pause.begin()
        self._before_bytes = self._counters.read().allocated_bytes

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth or self._is_over:
            return
        self._change_bytes += self._counters.read().allocated_bytes - self._before_bytes
        self._pause.end()
        self._done += 1

    @property
    def _is_over(self) -> bool:
        return self._done == self._wanted or self._reason is not None


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether anything is kept for a parameter; to look one up leaves an empty entry (schedulefree 1.4)."""
    return any(not isinstance(entry, dict) or entry for entry in optimizer.state.values())
