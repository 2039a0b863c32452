"""`Predictor`: replays of one model's updates under any settings, each thing traced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any, cast, get_args

from effcli.data.columns import Objective
from effcli.devices import weights_dtype
from effcli.engines.window import WindowLoss
from effcli.memory.allocator import Allocator
from effcli.memory.compose import updates
from effcli.memory.replay import Replay, replay
from effcli.memory.scale import NotAffineError, scaled
from effcli.memory.sharding.program import exchanging, held, stepping
from effcli.memory.sharding.share import ALONE, Sharding, Share
from effcli.memory.sharding.shares import shares
from effcli.memory.tape import Alloc, Begin, Free, MicroTape, Program, StepTapes
from effcli.trace.batches import BatchShape, fake_batch, logits_for, own_loss
from effcli.trace.optimizer import trace_update
from effcli.trace.tracer import Tracer
from effcli.units import ParamInfo

if TYPE_CHECKING:
    import torch

    from effcli.estimate_spec import EstimatedLoopSpec
    from effcli.optim.entry import Hyper, OptimizerEntry
    from effcli.spec import LoopSpec, OptimSpec
    from effcli.trace.kernels import Kernels

_ONE_AT_A_TIME = RLock()
"""Held while tracing, which sets modes of torch and redirects the output of the whole process."""

SIMULATED_MICRO_BATCHES = 3
"""Micro-batches of a window that are played: from the second on, each finds what the one before it found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What of a loop decides about memory; `padded` says whether rows are filled up to `max_length`.

    Targets of seq2seq have `max_target_length` tokens, none for as many. With `sharding` over several processes, rows
    and micro-batches are those of one of them, and the prediction is that of rank 0.
    """

    batch_size: int
    max_length: int
    max_target_length: int | None = None
    accum: int = 1
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    max_grad_norm: float = 1.0
    padded: bool = False
    sharding: Sharding = ALONE

    @classmethod
    def of(
        cls,
        loop: LoopSpec | EstimatedLoopSpec,
        *,
        max_length: int,
        max_target_length: int | None = None,
        sharding: Sharding,
    ) -> Settings:
        """Return what a loop's specification says, for full rows."""
        return cls(
            batch_size=loop.batch_size,
            max_length=max_length,
            max_target_length=max_target_length,
            accum=loop.accum,
            precision=loop.precision,
            gradient_checkpointing=loop.gradient_checkpointing,
            max_grad_norm=loop.max_grad_norm,
            sharding=sharding,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """What of a window is unlike its largest later micro-batch: the first one, and the bytes of all that are held."""

    first: Settings
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One optimizer with its hyperparameters."""

    entry: OptimizerEntry
    hyper: Hyper
    weight_decay: float

    @classmethod
    def of(cls, entry: OptimizerEntry, hyper: Hyper, asked: OptimSpec) -> Choice:
        """Return the choice of an optimizer whose settings were asked for."""
        return cls(entry=entry, hyper=hyper, weight_decay=asked.weight_decay if entry.takes_weight_decay else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that is predicted.

    `build` makes it on the meta device, from the dtype of its weights and whether activations are recomputed, which it
    need not be able to.
    """

    build: Callable[[str, bool], torch.nn.Module]
    config: Any
    task: str
    can_recompute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The device whose kernels and allocator are imitated; `allocator` makes a fresh one."""

    device: str
    kernels: Kernels
    allocator: Callable[[], Allocator]


class Predictor:
    """Predicts updates of one model on one device; tapes are kept, so that a second question costs only what is new."""

    def __init__(self, subject: Subject, target: Target) -> None:
        self._subject, self._target = subject, target
        self._tracers: dict[tuple[str, bool], Tracer] = {}
        self._micros: dict[tuple[object, ...], dict[int, MicroTape]] = {}
        self._steps: dict[tuple[object, ...], StepTapes] = {}
        self._shares: dict[tuple[str, Sharding], Share] = {}

    @property
    def device(self) -> str:
        """Return the kind of device that is imitated: cpu or cuda."""
        return self._target.device

    @property
    def can_recompute(self) -> bool:
        """Return whether the model can recompute activations in the backward pass."""
        return self._subject.can_recompute

    def program(self, settings: Settings, choice: Choice, unlike: Unlike | None = None) -> list[Alloc | Free | Begin]:
        """Return the events of the first and of a later update."""
        with _ONE_AT_A_TIME:
            return list(self._events(settings, choice, unlike))

    def _events(self, settings: Settings, choice: Choice, unlike: Unlike | None) -> Iterator[Alloc | Free | Begin]:
        tracer, sharding = self._tracer(settings), settings.sharding
        share = self._share(settings)
        steps = self.steps(settings, choice)
        return updates(
            held(tracer.parameters, tracer.buffers, share, sharding),
            exchanging(self.micro(settings), share, sharding, device=self.device),
            [stepping(step, share, sharding, settings.precision) for step in (steps.first, steps.later)],
            built=steps.built,
            accum=min(settings.accum, SIMULATED_MICRO_BATCHES),
            held_batches=settings.accum if self._target.device == "cpu" else 0,
            first=exchanging(self.micro(unlike.first), share, sharding, device=self.device) if unlike else None,
            held_bytes=unlike.held_bytes if unlike else None,
            hands_over=sharding.is_replicated,
        )

    def replay(self, settings: Settings, choice: Choice) -> Replay:
        """Return the highest moments of the first and of a later update on the target's allocator."""
        return self.play(self.program(settings, choice))

    def play(self, program: Program) -> Replay:
        """Return the highest moments of a program on the target's allocator."""
        return replay(program, self._target.allocator())

    def trace(self, settings: Settings) -> bool:
        """Trace these settings themselves; return whether that was still to do."""
        with _ONE_AT_A_TIME:
            traced = self._traced_sizes(settings)
            if settings.batch_size in traced:
                return False
            traced[settings.batch_size] = self._traced(settings)
            return True

    def micro(self, settings: Settings) -> MicroTape:
        """Return the tape of one micro-batch: traced at two batch sizes, worked out from those at any other."""
        traced = self._traced_sizes(settings)
        if settings.batch_size in traced:
            return traced[settings.batch_size]
        if len(traced) > 1:
            (first, smaller), (second, larger) = sorted(traced.items())[-2:]
            try:
                return scaled(smaller, larger, sizes=(first, second), to=settings.batch_size)
            except NotAffineError:
                pass
        self.trace(settings)
        return traced[settings.batch_size]

    def without_gradient(self, settings: Settings) -> tuple[ParamInfo, ...]:
        """Return the trainable parameters that the loss does not reach, such as those of a part that does not run."""
        reached = self.micro(settings).gradients
        parameters = self._tracer(settings).parameters
        return tuple(param for param in parameters if param.trainable and param.name not in reached)

    def steps(self, settings: Settings, choice: Choice) -> StepTapes:
        """Return the tapes of an optimizer's first and later steps; a parameter without gradient has no state."""
        dtype = weights_dtype(settings.precision)
        key = (
            *(choice.entry.name, repr(choice.hyper), choice.weight_decay),
            *(dtype, settings.max_grad_norm, settings.sharding),
        )
        if key not in self._steps:
            self._steps[key] = trace_update(
                choice.entry,
                self._stepped(settings),
                choice.hyper,
                choice.weight_decay,
                device=self._target.device,
                max_grad_norm=settings.max_grad_norm,
                kernels=self._target.kernels,
                one_by_one=settings.sharding.has_rows,
            )
        return self._steps[key]

    def _stepped(self, settings: Settings) -> list[ParamInfo]:
        """Return the parameters that the optimizer steps, as rank 0 holds them."""
        left_out = {param.name for param in self.without_gradient(settings)}
        stepped = self._share(settings).parameters
        return [param for param in stepped if param.trainable and param.name not in left_out]

    def _share(self, settings: Settings) -> Share:
        """Return what rank 0 holds; in stage 2 of ZeRO what the rank with most gradients does, all else being equal."""
        key = (settings.precision, settings.sharding)
        if key not in self._shares:
            parameters = self._tracer(settings).parameters
            held = shares(parameters, settings.sharding, settings.precision)
            self._shares[key] = max(held, key=lambda share: share.gradients_bytes)  # the first of equals
        return self._shares[key]

    def _traced_sizes(self, settings: Settings) -> dict[int, MicroTape]:
        """Return the tapes that were traced with settings like these, by batch size."""
        lengths = (settings.max_length, settings.max_target_length)
        key = (*lengths, settings.padded, _traced_precision(settings), settings.gradient_checkpointing)
        return self._micros.setdefault(key, {})

    def _traced(self, settings: Settings) -> MicroTape:
        subject = self._subject
        shape = BatchShape(
            batch_size=settings.batch_size,
            max_length=settings.max_length,
            max_target_length=settings.max_target_length,
        )
        forward, loss = _forward_and_loss(subject.task)
        return self._tracer(settings).micro(
            lambda: fake_batch(subject.config, subject.task, shape),
            forward=forward,
            loss=loss,
            precision=_traced_precision(settings),
            padded=settings.padded,
        )

    def _tracer(self, settings: Settings) -> Tracer:
        key = (weights_dtype(_traced_precision(settings)), settings.gradient_checkpointing)
        if key not in self._tracers:
            self._tracers[key] = Tracer(lambda: self._subject.build(*key), self._target.kernels)
        return self._tracers[key]


def _traced_precision(settings: Settings) -> str:
    """Return the precision that the model's code runs in: DeepSpeed casts the model, and there is no autocast."""
    return "bf16-pure" if settings.sharding.is_flat and settings.precision != "fp32" else settings.precision


def _forward_and_loss(task: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what the engines do for the tasks that they train; for others the loss is the model's own."""
    if task in get_args(Objective):
        window = WindowLoss(cast("Objective", task))
        return logits_for(lambda logits, labels: window.scaled(logits, labels, labels.numel()))
    return own_loss, lambda value, batch: value
