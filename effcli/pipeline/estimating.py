"""`estimate`: what a model and several optimizers hold before activations, from shapes alone, and the peak on request.

No torch by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from effcli.devices import weights_dtype
from effcli.errors import UsageError
from effcli.estimate_spec import EstimateSpec
from effcli.measure.estimate_record import EstimateRecord
from effcli.measure.record import ModelFacts
from effcli.memory.eight_bit import eight_bit_note
from effcli.memory.layers import largest_tensors, layer_amounts
from effcli.memory.plan import MemoryPlan
from effcli.memory.sharding.share import Sharding, Share
from effcli.memory.state import StateSummary, paged_notes, predict_state
from effcli.models.attention import check_attention
from effcli.models.flags import check_model_flags
from effcli.models.known import KnownModel, known_model
from effcli.models.stable_embedding import MARKER
from effcli.optim import registry
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.overrides import override_notes
from effcli.optim.patterns import check_patterns, matches
from effcli.pipeline.amounts import model_facts, optimizer_facts
from effcli.pipeline.peak_settings import peak_facts, precision_notes, room, with_defaults
from effcli.pipeline.ranks import (
    check_layers,
    check_on_shares,
    check_processes,
    distribution,
    mode_amounts,
    mode_notes,
    spread,
)
from effcli.shapes import ModelShapes
from effcli.units import ParamInfo

if TYPE_CHECKING:
    from effcli.models.change import Changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A model as training holds it, and each optimizer with its hyperparameters and its state.

    Of several processes `held` is what each holds; the bytes of `model` and `states` are then those of the first. It is
    empty for one process.
    """

    known: KnownModel
    shapes: ModelShapes
    parameters: tuple[ParamInfo, ...]
    model: ModelFacts
    entries: tuple[OptimizerEntry, ...]
    settled: tuple[Hyper, ...]
    states: tuple[StateSummary, ...]
    notes: tuple[str, ...]
    sharding: Sharding
    held: tuple[Share, ...]

    @property
    def local(self) -> tuple[ParamInfo, ...]:
        """Return the parameters as the optimizer of the first process is given them."""
        return self.held[0].parameters if self.held else self.parameters


def estimate(spec: EstimateSpec, *, per_layer: bool = False, top: int = 0, notes: Sequence[str] = ()) -> EstimateRecord:
    """Return the bytes of weights, gradients and each optimizer's state, with the rule of thumb beside them.

    Settings that matter to the peak alone add each optimizer's plan of an update; the first one's has every detail.
    With `per_layer` also by parameter and by layer; `top` asks for that many of the largest tensors.
    `notes` are kept in the record. Of several processes the amounts are those of the first, and each has its own.

    Raises:
        UsageError: an unknown optimizer, hyperparameter, task or pattern, a model that cannot be used, or a way to
            share it that does not exist for it.
        UnreachableError: the model is neither in the catalogue nor on this machine, and the hub does not give it.
    """
    given = room(spec)
    check_attention(spec.model.attn, spec.loop.precision)
    described = describe(spec)
    local, states, sharding = described.local, described.states, described.sharding
    if per_layer or top:
        check_layers(sharding)
    counts = {parameter.name: parameter.num_elements for parameter in described.parameters}
    each = (described.entries, described.settled, states)
    optimizers = zip(described.entries, described.settled, strict=True)
    notes = (*notes, *described.notes, *mode_notes(sharding, spec.loop.precision, optimizers))
    plans: Sequence[MemoryPlan | None] = [None] * len(states)
    if spec.asks_for_peak:
        from effcli.pipeline import peaks  # torch

        spec, notes = with_defaults(spec, described.known), (*notes, *precision_notes(spec, given))
        plans = peaks.plans(described.known, spec, described.entries, described.settled, given)
    return EstimateRecord(
        precision=spec.loop.precision,
        distribution=distribution(sharding),
        model=described.model,
        buffers_bytes=described.shapes.buffers_bytes,
        tied=described.shapes.tied,
        peak=peak_facts(spec, given) if spec.asks_for_peak else None,
        optimizers=tuple(
            optimizer_facts(
                entry,
                hyper,
                state,
                described.model,
                device=spec.loop.device,
                plan=plan,
                per_parameter=per_layer,
                held=described.held,
            )
            for entry, hyper, state, plan in zip(*each, plans, strict=True)
        ),
        modes=mode_amounts(
            described.entries[0], described.settled[0], described.parameters, sharding.world_size, spec.loop.precision
        ),
        layers=layer_amounts(local, states, counts) if per_layer else (),
        largest=largest_tensors(local, states, top, counts),
        notes=(*notes, *_state_notes(*each, local, device=spec.loop.device)),
    )


def describe(spec: EstimateSpec) -> Described:
    """Return the model and the optimizers of an estimate, from shapes.

    Raises:
        UsageError: see `estimate`.
        UnreachableError: see `estimate`.
    """
    sharding = Sharding(shard=spec.loop.shard, world_size=spec.loop.world_size)
    check_processes(sharding)
    entries = tuple(registry.find(optim.name) for optim in spec.optim)
    settled: tuple[Hyper, ...] = tuple(
        registry.resolve_hyper(entry, optim) for entry, optim in zip(entries, spec.optim, strict=True)
    )
    if spec.model.name is None:
        raise UsageError("name a model: one that `effcli models` lists, a folder with a config.json, or a hub id")
    check_model_flags(spec.model)
    known = known_model(
        spec.model.name,
        spec.model.task,
        spec.model.num_labels,
        trust_remote_code=spec.model.trust_remote_code,
    )
    shapes, notes = known.shapes, known.notes
    if spec.model.stable_embedding or spec.model.lora_r is not None or MARKER in known.config:
        shapes, changed = _changed(known, spec)
        parameters, notes = shapes.parameters, (*notes, *changed.notes)
        settled = tuple(changed.hyper_for(entry, hyper) for entry, hyper in zip(entries, settled, strict=True))
    else:
        parameters = _held(shapes, spec)
    for entry, hyper in zip(entries, settled, strict=True):
        if sharding.has_many:
            check_on_shares(entry, hyper, sharding.shard)
    held = spread(parameters, sharding, spec.loop.precision)
    local = held[0].parameters if held else parameters
    return Described(
        known=known,
        shapes=shapes,
        parameters=parameters,
        model=model_facts(
            name=known.name,
            architecture=shapes.architecture,
            task=shapes.task,
            parameters=parameters,
            share=held[0] if held else None,
        ),
        entries=entries,
        settled=settled,
        states=tuple(predict_state(entry, local, hyper) for entry, hyper in zip(entries, settled, strict=True)),
        notes=notes,
        sharding=sharding,
        held=held,
    )


def _state_notes(
    entries: Sequence[OptimizerEntry],
    settled: Sequence[Hyper],
    states: Sequence[StateSummary],
    parameters: Sequence[ParamInfo],
    *,
    device: str,
) -> tuple[str, ...]:
    """Return what should be said about overrides, paging and 8-bit states; one optimizer stands for all 8-bit ones."""
    each = list(zip(entries, settled, states, strict=True))
    notes = dict.fromkeys(note for entry, hyper, _ in each for note in override_notes(entry, hyper))
    notes |= dict.fromkeys(note for entry, _, state in each for note in paged_notes(entry, state, device=device))
    eight_bit = (eight_bit_note(entry, parameters, hyper, state) for entry, hyper, state in each)
    return (*notes, *islice(filter(None, eight_bit), 1))


def _changed(known: KnownModel, spec: EstimateSpec) -> tuple[ModelShapes, Changed]:
    """Return the shapes of the model with StableEmbeddings or adapters, which only the model itself can say."""
    from effcli.models.shapes import changed_shapes  # torch

    return changed_shapes(
        known.config_object(),
        known.shapes.task,
        spec.model,
        weights_dtype(spec.loop.precision),
        name=known.name,
        num_labels=spec.model.num_labels,
    )


def _held(shapes: ModelShapes, spec: EstimateSpec) -> tuple[ParamInfo, ...]:
    """Return the parameters as training holds them: their dtype, and which of them are frozen.

    Raises:
        UsageError: a pattern of `--freeze` fits nothing.
    """
    check_patterns(spec.model.freeze, [parameter.name for parameter in shapes.parameters], "--freeze")
    return tuple(
        replace(
            parameter,
            dtype=weights_dtype(spec.loop.precision),
            trainable=parameter.trainable and not matches(parameter.name, spec.model.freeze),
        )
        for parameter in shapes.parameters
    )
