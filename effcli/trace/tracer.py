"""`Tracer`: one model on fake tensors, traced at any batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch

from effcli.errors import TraceError, UsageError, kind_and_line
from effcli.memory.extend import NotPeriodicError, Repetition, extended
from effcli.memory.tape import MicroTape
from effcli.models.build import parameter_infos
from effcli.trace.fake import fake_tensors, make_fake
from effcli.trace.kernels import Kernels
from effcli.trace.layers import buffer_bytes, layer_lists, repetitions, shorten
from effcli.trace.micro import Batch, Forward, Loss, trace_micro


class Tracer:
    """A model without memory whose forward and backward can be traced.

    `build` makes the model on the meta device, as it is trained: dtype, adapters, checkpointing, what is frozen.
    Lists of equal layers are traced at five units and lengthened; where that doesn't go, the whole model is traced.
    `parameters` are those of the whole model, `buffers` the bytes of its buffers by name.
    """

    def __init__(self, build: Callable[[], torch.nn.Module], kernels: Kernels, *, whole: bool = False) -> None:
        self._build, self._kernels = build, kernels
        self._mode = fake_tensors()
        self._repetitions: tuple[Repetition, ...] = ()
        model = build()
        self.parameters = parameter_infos(model)
        self.buffers = buffer_bytes(model)
        self._take(model, () if whole else repetitions(model))

    def micro(
        self,
        batch: Callable[[], Batch],
        *,
        forward: Forward,
        loss: Loss,
        precision: str = "fp32",
        keep_outputs: bool = False,
        padded: bool = False,
    ) -> MicroTape:
        """Return the tape of one micro-batch; `batch` makes it, the rest as in `effcli.trace.micro.trace_micro`.

        Raises:
            TraceError: the model's code needs values, or fails on this batch.
            UsageError: whatever `forward` and `loss` raise.
        """
        while True:
            try:
                with self._mode():
                    tape = trace_micro(
                        self._model,
                        batch(),
                        forward=forward,
                        loss=loss,
                        kernels=self._kernels,
                        precision=precision,
                        keep_outputs=keep_outputs,
                        layers=self._layers,
                        padded=padded,
                    )
            except UsageError:
                raise
            except Exception as error:  # whatever the model's code raises, perhaps because layers are missing
                if not self._repetitions:
                    raise TraceError(
                        "the peak cannot be predicted, since the model's code does not run without values "
                        f"({kind_and_line(error)}); ask for what comes before activations alone"
                    ) from error
            else:
                try:
                    return reduce(extended, self._repetitions, tape)
                except NotPeriodicError:
                    pass
            self._take(self._build(), ())

    @property
    def is_shortened(self) -> bool:
        """Return whether layers are left out while tracing."""
        return bool(self._repetitions)

    def _take(self, model: torch.nn.Module, shortened: tuple[Repetition, ...]) -> None:
        self._repetitions = shortened
        for repetition in shortened:
            shorten(model, repetition)
        self._layers = layer_lists(model)
        with self._mode():
            make_fake(model)
        model.train()
        self._model = model
