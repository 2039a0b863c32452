"""What one update allocates: gradient clipping, the optimizer's step, and the end of the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from effcli.errors import UsageError, first_line
from effcli.memory.state import StateSummary, paged_notes, predict_state
from effcli.memory.tape import Alloc, StepTapes
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.groups import is_decayed
from effcli.trace.kernels import Kernels
from effcli.trace.stand_in import StandIn, laws_of
from effcli.trace.step_recorder import Build, Rehearsal
from effcli.trace.step_tapes import STATE, Numbering
from effcli.units import Basis, ParamInfo, Placement, listed


def trace_update(
    entry: OptimizerEntry,
    parameters: Iterable[ParamInfo],
    hyper: Hyper,
    weight_decay: float,
    *,
    device: str,
    max_grad_norm: float,
    kernels: Kernels,
    one_by_one: bool = False,
) -> StepTapes:
    """Return what a first and a later update of the trainable parameters allocate on the device.

    The real optimizer steps on the meta device, where nothing has values, with the implementation that torch chooses
    for `device`. One whose entry says what a step takes (`step_workspace`) is replaced by its laws. So is one that
    cannot step there, or keeps there what its state law doesn't say; its temporaries are left out. `one_by_one` says
    that parameters are `DTensor`s in the run, for which torch never chooses foreach or fused implementations.

    Raises:
        UsageError: an override fits no parameter, or none is trained.
    """
    params = {param.name: param for param in parameters if param.trainable}
    if not params:
        raise UsageError("nothing to train: every parameter of the model is frozen; narrow --freeze")
    groups = _groups(params.values(), weight_decay)
    state = predict_state(entry, params.values(), hyper)
    notes = list(paged_notes(entry, state, device=device))

    def filled(tensors: Mapping[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [{**group, "params": [tensors[name] for name in group["names"]]} for group in groups]

    def tapes(build: Build, basis: Basis) -> StepTapes:
        rehearsal = Rehearsal(build, list(params.values()), device, kernels, one_by_one=one_by_one)
        numbering = Numbering()
        built = numbering.tape(rehearsal.built)
        first = numbering.tape(rehearsal.update(max_grad_norm))
        rehearsal.grow_old()
        later = numbering.tape(rehearsal.update(max_grad_norm))
        closed = sorted(rehearsal.closed_operators)
        if closed:
            basis = Basis.ASSUMED
            notes.append(f"{entry.name}: what {listed(closed)} may take for the time of a call is left out.")
        return StepTapes(built=built, first=first, later=later, basis=basis, notes=tuple(notes))

    def real(tensors: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        return entry.build(filled(tensors), hyper)

    if entry.step_workspace is None:
        try:
            traced = tapes(real, Basis.TRACED)
            if _state_bytes(traced) == _on_device(state, device):
                return traced
            why = "without values it keeps another state than with them"
        except Exception as error:  # whatever a class raises that wants values, or a package that isn't there
            why = first_line(error).partition(". ")[0]
        notes.append(f"{entry.name}: what a step takes beside its state is left out, it could not be traced ({why}).")
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    laws = laws_of(entry, params, decays, hyper, device)
    return tapes(lambda tensors: StandIn(filled(tensors), laws), Basis.ASSUMED)


def _groups(params: Iterable[ParamInfo], weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of `effcli.optim.groups.decay_groups` without parameters, which only have shapes here.

    A normalisation module's matrix, which that function would not decay, counts among the decayed.
    """
    split: dict[bool, list[ParamInfo]] = {True: [], False: []}
    for param in params:
        split[is_decayed(param.name, len(param.shape))].append(param)
    return [
        {
            "names": [param.name for param in members],
            "hidden": [param.hidden for param in members],
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for decayed, members in split.items()
        if members
    ]


def _on_device(state: StateSummary, device: str) -> int:
    return state.state_bytes if device == "cpu" else state.placements.get(Placement.DEVICE, 0)


def _state_bytes(tapes: StepTapes) -> int:
    events = (*tapes.built.events, *tapes.first.events)
    return sum(event.num_bytes for event in events if isinstance(event, Alloc) and event.kind == STATE)
