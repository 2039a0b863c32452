"""What a peak is predicted for: settings with their defaults filled in, and the memory they are held against."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

from effcli.errors import UsageError
from effcli.estimate_spec import EstimateSpec
from effcli.measure.estimate_record import GpuFacts, PeakFacts
from effcli.measure.record import BatchFacts
from effcli.memory.cards import Budget, Card, parse_budget
from effcli.models.known import KnownModel
from effcli.models.lengths import longest_row, longest_target

READ_NO_TEXT = ("image-classification", "audio-classification")
"""Tasks whose models are given no tokens, so that `--max-length` means nothing to them."""
_TRACED = ("torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much memory there is: what `--gpu` and `--budget` say, None where they were not given."""

    gpu: Budget | None
    budget: Budget | None

    @property
    def card(self) -> Card | None:
        """Return the card whose kernels run; None where no card was named."""
        return next((given.card for given in (self.gpu, self.budget) if given is not None and given.card), None)

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the compute capability of the card; None where no card was named."""
        return self.card.capability if self.card else None

    @property
    def num_bytes(self) -> int | None:
        """Return what a plan is held against: the budget before the card."""
        given = self.budget or self.gpu
        return None if given is None else given.num_bytes


def room(spec: EstimateSpec) -> Room:
    """Return how much memory there is.

    Raises:
        UsageError: an unknown card, an amount without a unit, or a card for a run on the CPU.
    """
    given = Room(gpu=_parsed("--gpu", spec.loop.gpu), budget=_parsed("--budget", spec.loop.budget))
    if spec.loop.device == "cpu" and given.card is not None:
        raise UsageError(
            f"--device cpu with the card '{given.card.key}': a run on the CPU has none; leave --device out, or give "
            "an amount such as --budget 16GiB"
        )
    return given


def with_defaults(spec: EstimateSpec, known: KnownModel) -> EstimateSpec:
    """Return the specification with the lengths of rows and targets that the model sets where none were asked for.

    Raises:
        UsageError: rows longer than the model reads or targets longer than it writes, or any length for a model that
            does neither.
    """
    asked, asked_target, task = spec.data.max_length, spec.data.max_target_length, known.shapes.task
    if asked_target is not None and task != "seq2seq":
        raise UsageError(f"--max-target-length {asked_target}: --task {task} has no target texts; leave it out")
    if task in READ_NO_TEXT:
        if asked is not None:
            raise UsageError(f"--max-length {asked}: '{known.name}' reads no text; leave it out")
        return spec
    config = known.config_object()
    lengths = {"max_length": longest_row(config, known.name, asked)}
    if task == "seq2seq":
        source = lengths["max_length"]
        lengths["max_target_length"] = longest_target(config, known.name, asked_target, longest_source=source)
    return spec.model_copy(update={"data": spec.data.model_copy(update=lengths)})


def peak_facts(spec: EstimateSpec, given: Room) -> PeakFacts:
    """Return what the record says about the settings of a peak."""
    loop = spec.loop
    return PeakFacts(
        device=loop.device,
        batch=BatchFacts.of(micro=loop.batch_size, accum=loop.accum, world_size=loop.world_size),
        max_length=spec.data.max_length,
        max_target_length=spec.data.max_target_length,
        gradient_checkpointing=loop.gradient_checkpointing,
        attn=spec.model.attn,
        max_grad_norm=loop.max_grad_norm,
        gpu=gpu_facts(loop.gpu or "", given.gpu) if given.gpu else None,
        budget_bytes=given.budget.num_bytes if given.budget else None,
        versions={package: version(package) for package in _TRACED},
    )


def precision_notes(spec: EstimateSpec, given: Room) -> tuple[str, ...]:
    """Return what should be said about a precision that the card does not compute in."""
    card, precision = given.card, spec.loop.precision
    if has_bfloat16(card) or not precision.startswith("bf16"):
        return ()
    name = card.name if card else "the card"
    return (f"{name} has no bfloat16: training with --precision {precision} is refused there; use fp16.",)


def has_bfloat16(card: Card | None) -> bool:
    """Return whether a card computes in bfloat16, which `effcli.devices.check_precision` asks for; one without a name
    is taken for a recent one."""
    return card is None or card.capability >= (8, 0)


def gpu_facts(asked: str, gpu: Budget) -> GpuFacts:
    """Return what the record says about a card, or about the bytes given in its place."""
    card = gpu.card
    return GpuFacts(
        asked=asked,
        name=card.name if card else None,
        usable_bytes=gpu.num_bytes,
        source=card.source if card else None,
    )


def _parsed(flag: str, text: str | None) -> Budget | None:
    if text is None:
        return None
    try:
        return parse_budget(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from error
