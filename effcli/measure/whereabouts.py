"""`Whereabouts`: what a run is doing just now, seen from outside the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effcli.measure.device_record import Doing

if TYPE_CHECKING:
    import torch


class Whereabouts:
    """Follows a model and its optimizer through their hooks, so that a failure can be told by where it happened.

    `doing` is the part of the update; `rows` and `tokens` are the shape of the batch in the model, None between the
    step and the next batch, and where a model reads no text. `entered` is told of each part where work on it begins:
    what an engine does between a step and the next forward pass, such as freeing gradients, goes with the step there.
    The loss goes with the forward pass, as it does in a plan: beside a large vocabulary it takes more than the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        entered: Callable[[Doing], None] = lambda doing: None,
    ) -> None:
        self.doing: Doing = "forward"
        self._entered = entered
        self.rows: int | None = None
        self.tokens: int | None = None
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def watch(self, loss: torch.Tensor) -> None:
        """Let the backward pass begin where it reaches the loss of a batch; autograd may run it in its own thread."""
        loss.register_hook(self._before_backward)

    def detach(self) -> None:
        """Take the hooks off; what was seen last stays. May be called more than once."""
        while self._handles:
            self._handles.pop().remove()

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.doing = "forward" if model.training else "evaluation"
        self._entered(self.doing)
        self.rows, self.tokens = shape_of(args, kwargs)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self.doing = "backward"
        self._entered(self.doing)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.doing = "step"
        self._entered(self.doing)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.doing = "forward"
        self.rows = self.tokens = None


def shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return rows and tokens of the batch that a model is given, None each where it reads no text."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return (ids.shape[0], ids.shape[1]) if ids is not None and ids.dim() == 2 else (None, None)
