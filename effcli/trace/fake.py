"""Models whose tensors are fake: every shape and dtype is there, no memory is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_tensors() -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that opens one mode again and again, in which new tensors are fake.

    They are on the CPU, since without a device backward works only there.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def opened() -> Iterator[None]:
        with mode, _taken_for_real(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    return opened


@contextmanager
def _taken_for_real() -> Iterator[None]:
    """Let transformers look into masks and positions as it does in a run, so that it makes the masks that a run makes.

    It looks into no tensor that it knows to be fake (`is_tracing` in transformers/utils/import_utils.py, 5.24).
    """
    from transformers.utils import import_utils

    asked = getattr(import_utils, "is_fake_tensor", None)
    if asked is None:  # versions that don't ask
        yield
        return
    import_utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = asked


def make_fake(model: torch.nn.Module) -> None:
    """Replace every parameter and buffer of a model, which may be on the meta device, by a fake tensor on the CPU.

    To be called within `fake_tensors`. Tied parameters stay tied; what is trained stays trained.
    """
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)
