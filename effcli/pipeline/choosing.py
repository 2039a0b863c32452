"""`search`: settings of one model that fit a card, and the recipe of the chosen ones. Imports torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from effcli.devices import weights_dtype
from effcli.errors import UsageError
from effcli.estimate_spec import EstimateSpec, build_estimate_spec
from effcli.history.context import Context, context_for
from effcli.measure.record import BatchFacts
from effcli.measure.search_record import Configuration, SearchRecord, Way
from effcli.memory.plan import MemoryPlan
from effcli.memory.sharding.share import Sharding
from effcli.models.attention import FLASH, check_attention
from effcli.models.flags import ALL_LINEAR
from effcli.packages import is_installed
from effcli.pipeline.chosen_flags import chosen_flags
from effcli.pipeline.chosen_recipe import check_out, write_chosen
from effcli.pipeline.estimating import Described, describe
from effcli.pipeline.launching import precision_fault
from effcli.pipeline.peak_settings import Room, gpu_facts, has_bfloat16, room, with_defaults
from effcli.pipeline.planning import Limits, plan_memory
from effcli.pipeline.predicting import Choice, Predictor, Settings
from effcli.pipeline.searching import Candidate, Found, Planned, Space, search
from effcli.pipeline.settling import quiet_transformers
from effcli.pipeline.sharing import held_by_rank_0, left_out, shard_faults, shards_tried
from effcli.pipeline.subjects import estimated, target
from effcli.ranks.launch import launch_command
from effcli.search_spec import SearchSpec
from effcli.spec import Task

ADAPTER_RANK = 8
"""Rank of the adapters that are tried where nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """A model with its optimizers, and what predicts their updates."""

    spec: EstimateSpec
    described: Described
    predictor: Predictor
    context: Context
    gpus: int

    def sharding(self, candidate: Candidate) -> Sharding:
        """Return how a configuration is spread over the cards."""
        return Sharding(shard=candidate.shard, world_size=self.gpus)

    def plan(self, candidate: Candidate) -> MemoryPlan:
        """Return the plan of a configuration."""
        settings = Settings(
            batch_size=candidate.batch_size,
            max_length=self.spec.data.max_length or 0,
            max_target_length=self.spec.data.max_target_length,
            accum=candidate.accum,
            precision=candidate.precision,
            gradient_checkpointing=candidate.recompute,
            max_grad_norm=self.spec.loop.max_grad_norm,
        )
        settings = replace(settings, sharding=self.sharding(candidate))
        at = candidate.optimizer
        choice = Choice.of(self.described.entries[at], self.described.settled[at], self.spec.optim[at])
        return plan_memory(self.predictor, settings, choice, Limits.of(budget_bytes=None, context=self.context))


def search_fitting(spec: SearchSpec, *, overwrite: bool = False, notes: Sequence[str] = ()) -> SearchRecord:
    """Return the configurations that fit the card with the margin to spare; `--out` writes the chosen one.

    Raises:
        UsageError: see `effcli.pipeline.estimating.estimate`; a recipe that could not be trained, or is there already;
            cards that do not divide the update, or ways to share it that nothing runs with.
        WriteError: the recipe cannot be written.
    """
    loop, out = spec.loop, spec.output.out
    estimate_spec = _estimate_spec(spec)
    given = room(estimate_spec)
    assert given.gpu is not None
    shards = shards_tried(loop)
    precisions = _precisions(spec, given)
    for precision in precisions:
        check_attention(spec.model.attn, precision)
        if precision.startswith("bf16") and given.card and not has_bfloat16(given.card):
            raise UsageError(
                f"--precision {precision}: {given.card.name} has no bfloat16; use --precision fp16 or fp32"
            )
    question = _question(estimate_spec, given, loop.gpus)
    described = question.described
    if out is not None:
        check_out(Path(out), described.shapes.task, overwrite=overwrite)
    allowed = int(given.gpu.num_bytes * (1 - loop.margin / 100))
    faults = shard_faults(described, shards, precisions, loop.gpus)
    space = Space(
        eight_bit=[entry.eight_bit for entry in described.entries],
        precisions=precisions,
        effective_batch=loop.effective_batch,
        world_size=loop.gpus,
        shards=shards,
        runs=lambda *kind: kind not in faults,
    )
    if not space.kinds:
        raise UsageError(next(iter(faults.values())))
    found = search(space, question.plan, allowed)
    record = SearchRecord(
        model=described.model,
        gpu=gpu_facts(loop.gpu, given.gpu),
        gpus=loop.gpus,
        margin_percent=loop.margin,
        allowed_bytes=allowed,
        effective_batch=loop.effective_batch,
        max_length=question.spec.data.max_length,
        max_target_length=question.spec.data.max_target_length,
        tried={
            "optimizers": tuple(entry.name for entry in described.entries),
            "precisions": tuple(space.precisions),
            **({"shards": tuple(shards)} if loop.gpus > 1 else {}),
        },
        num_predictions=found.num_predictions,
        context_bytes=question.context.num_bytes,
        context_basis=question.context.basis,
        context_source=question.context.source,
        assumed=space.assumed,
        configurations=tuple(_configuration(planned, question, given.gpu.num_bytes) for planned in found.fitting),
        closest=None if found.fitting else _configuration(found.closest, question, given.gpu.num_bytes),
        ways_out=() if found.fitting else tuple(_ways_out(found.closest, question, given, space)),
        notes=tuple(dict.fromkeys((*notes, *described.notes, *left_out(faults), *_plan_notes(found)))),
    )
    if out is None or not found.fitting:
        return record
    if spec.output.choose > len(found.fitting):
        few = len(found.fitting)
        there = "is 1 configuration that fits" if few == 1 else f"are {few} configurations that fit"
        raise UsageError(f"--choose {spec.output.choose}: there {there}")
    write_chosen(record, found.fitting[spec.output.choose - 1].candidate, question.spec, out, number=spec.output.choose)
    return record.model_copy(update={"chosen": spec.output.choose, "recipe": out})


def _plan_notes(found: Found) -> Iterator[str]:
    for planned in found.fitting or (found.closest,):
        yield from planned.plan.notes


def _estimate_spec(spec: SearchSpec, **model: Any) -> EstimateSpec:
    """Return the estimate of the same model and optimizers, with other settings of the model where they are given."""
    return build_estimate_spec(
        {
            "model": {**spec.model.model_dump(), **model},
            "optim": [optim.model_dump() for optim in spec.optim],
            "data": spec.data.model_dump(),
            "loop": {"gpu": spec.loop.gpu, "max_grad_norm": spec.loop.max_grad_norm},
        }
    )


def _precisions(spec: SearchSpec, given: Room) -> tuple[str, ...]:
    """Return the precisions that are tried: those asked for, or the card's 16 bit and, where attention bears it, 32."""
    half = "bf16" if has_bfloat16(given.card) else "fp16"
    return spec.loop.precision or ((half,) if spec.model.attn == FLASH else (half, "fp32"))


def _question(spec: EstimateSpec, given: Room, gpus: int) -> _Question:
    quiet_transformers()
    described = describe(spec)
    spec = with_defaults(spec, described.known)
    return _Question(
        spec=spec,
        described=described,
        predictor=Predictor(estimated(described.known, spec), target("cuda", given.capability)),
        context=context_for(given.card.key if given.card else None),
        gpus=gpus,
    )


def _configuration(planned: Planned, question: _Question, gpu_bytes: int) -> Configuration:
    candidate, plan, described = planned.candidate, planned.plan, question.described
    entry, hyper = described.entries[candidate.optimizer], described.settled[candidate.optimizer]
    dtype = weights_dtype(candidate.precision)
    parameters = [replace(parameter, dtype=dtype) for parameter in described.parameters]
    gpus = question.gpus
    held = held_by_rank_0(entry, hyper, parameters, question.sharding(candidate), candidate.precision)
    learnt, model = described.shapes.task in get_args(Task), shlex.quote(described.known.name)
    flags = chosen_flags(candidate, question.spec, entry.name, learnt=learnt)
    start = f"{launch_command(gpus)} train" if learnt else "effcli estimate"
    there = ["--world-size", str(gpus)] if gpus > 1 and not learnt else []
    return Configuration(
        optimizer=entry.name,
        precision=candidate.precision,
        batch=BatchFacts.of(micro=candidate.batch_size, accum=candidate.accum, world_size=gpus),
        gradient_checkpointing=candidate.recompute,
        shard=candidate.shard,
        weights_bytes=held.weights_bytes,
        gradients_bytes=held.gradients_bytes,
        optimizer_state_bytes=held.optimizer_state_bytes,
        peak_allocated_bytes=plan.peak_allocated_bytes or 0,
        peak_phase=plan.peak_phase or "",
        device_total_bytes=planned.need_bytes,
        spare_bytes=gpu_bytes - planned.need_bytes,
        flags=" ".join(flags),
        command=" ".join([start, model, *flags, *there]),
    )


def _ways_out(closest: Planned, question: _Question, given: Room, space: Space) -> Iterator[Way]:
    """Yield what the closest configuration takes with changes that nobody asked for, those of the model included."""
    candidate = closest.candidate
    is_trained = precision_fault(candidate.shard, "bf16-pure") is None
    if is_trained and "bf16-pure" not in space.precisions and has_bfloat16(given.card):
        yield _way("--precision bf16-pure", question, replace(candidate, precision="bf16-pure"))
    model = question.spec.model
    untouched = model.lora_r is None and not model.freeze and not model.stable_embedding
    if untouched and is_installed("peft"):
        adapters = {"lora_r": ADAPTER_RANK, "lora_targets": (ALL_LINEAR,)}
        adapted = question.spec.model_copy(update={"model": model.model_copy(update=adapters)})
        adapted_question = _question(adapted, given, question.gpus)
        yield _way(f"--lora-r {ADAPTER_RANK} --lora-targets {ALL_LINEAR}", adapted_question, candidate)


def _way(flags: str, question: _Question, candidate: Candidate) -> Way:
    plan = question.plan(candidate)
    return Way(flags=flags, device_total_bytes=plan.device_total_bytes or 0)
