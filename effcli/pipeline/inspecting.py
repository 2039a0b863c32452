"""`inspect`: what a saved optimizer state holds, whose it looks like, and what others would take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from effcli.errors import UsageError, nearest
from effcli.inspection.layout import SavedState, saved_states
from effcli.inspection.look_alike import Fit
from effcli.inspection.names import Naming, name_parameters
from effcli.inspection.resemblance import resemblance
from effcli.inspection.why_not_quantised import reasons
from effcli.measure.inspection_record import (
    Alternative,
    InspectionRecord,
    SavedAmount,
    SavedParameter,
    SavedValues,
)
from effcli.measure.optimizer_size import OptimizerSize, inspect_states
from effcli.memory.state import predict_state
from effcli.optim import registry
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.hyper import default_hyper
from effcli.optim.overrides import Override
from effcli.saved import READ, SavedOptimizer, read_saved, split_key, values_of
from effcli.state_entries import entries_of
from effcli.units import ParamInfo, count, format_bytes

ALTERNATIVES = ("adamw", "adafactor", "adam8bit", "adamw4bit", "lion8bit", "sgd")
"""What the state is compared with, by the entries' defaults."""
_KEPT = "\0kept "
"""Put before the names of parameters that an override is for."""


def inspect(
    path: Path, *, model: str | None = None, values: str | None = None, most_values: int | None = None
) -> InspectionRecord:
    """Return the bytes and elements of the optimizer state in a file or folder, and what they say.

    `model` names the model whose parameters were trained, where they have no names and none is beside the state.
    `values` is a pattern of `parameter` or `parameter.state name`: those that fit it, at most the first `most_values`,
    are read and shown as they are stored.

    Raises:
        UsageError: there is no such path or model, or the pattern fits nothing.
        DataError: it holds no optimizer state that can be read safely.
    """
    _check_exists(path)
    saved = read_saved(path)
    states = saved_states(saved.states, whole=saved.holds_whole_tensors)
    naming = name_parameters(saved, states, model)
    found = resemblance(saved, states, naming)
    names = {label: naming.names.get(label, label) for label in saved.states}
    size = inspect_states((names[label], state) for label, state in saved.states.items())
    alternatives, notes = _alternatives(found.best, _of_parameters(saved, states), naming, size.state_bytes)
    shown, more = ((), ()) if values is None else _values(saved, names, values, most_values)
    return InspectionRecord(
        path=str(saved.path),
        format=saved.format,
        optimizer=found.best.entry.name if found.best else None,
        also_fits=tuple(fit.entry.name for fit in found.fits[1:]),
        resemblance=found.sentence,
        names_known=saved.names_known,
        state_bytes=size.state_bytes,
        state_elements=size.state_elements,
        num_tensors=size.num_tensors,
        tensors=_by_name(size),
        by_parameter=size.by_parameter,
        shared_bytes=size.shared_bytes,
        parameters=_parameters(states, names, naming, found.best, size.by_parameter),
        alternatives=alternatives,
        values=shown,
        notes=(*saved.notes, *naming.notes, *notes, *more),
    )


def _by_name(size: OptimizerSize) -> dict[str, SavedAmount]:
    return {
        key: SavedAmount(elements=amount.elements, bytes=amount.bytes, dtype="+".join(size.dtypes[key]))
        for key, amount in size.tensors.items()
    }


def _check_exists(path: Path) -> None:
    """Raise where there is neither the path nor, for `PATH::KEY`, what stands before the key."""
    missing, _ = split_key(path)
    if os.path.lexists(missing):
        return
    while not missing.absolute().parent.is_dir():
        missing = missing.absolute().parent
    if missing.exists():
        raise UsageError(f"'{missing}' is a file, no folder")
    siblings: list[str] = []
    with suppress(OSError):  # a folder that may be entered but not listed
        siblings = [sibling.name for sibling in missing.absolute().parent.iterdir()]
    near = nearest(missing.name, siblings)
    raise UsageError(f"'{missing}' does not exist" + (f".{near}" if near else f"; give {READ}"))


def _values(
    saved: SavedOptimizer, names: Mapping[str, str], pattern: str, most: int | None
) -> tuple[tuple[SavedValues, ...], tuple[str, ...]]:
    """Return the tensors that fit a pattern, and a note where more of them do than are shown.

    Raises:
        UsageError: the pattern fits nothing.
    """
    found = tuple(islice(values_of(saved, pattern, names), most)) if pattern else ()
    if not found and not saved.states:
        return (), ("There are no values to show: there is no state.",)
    if not found:
        examples = [f"'{names[label]}.{key}'" for label, state in saved.states.items() for key, _ in entries_of(state)]
        example = f"; a state is called {examples[0]}" if examples else ""
        raise UsageError(f"--values '{pattern}' fits no state{example}")
    if len(found) == most:
        return found, (f"Values are those of the first {count(most, 'tensor')}; --values PATTERN chooses others.",)
    return found, ()


def _of_parameters(saved: SavedOptimizer, states: Mapping[str, SavedState]) -> Mapping[str, SavedState]:
    """Return the states that belong to parameters: beside flat pieces lie others, as of what fills these up."""
    labels = {label for group in saved.members for label in group}
    if saved.holds_whole_tensors or not labels:
        return states
    return {label: state for label, state in states.items() if label in labels}


def _parameters(
    states: Mapping[str, SavedState],
    names: Mapping[str, str],
    naming: Naming,
    best: Fit | None,
    by_parameter: Mapping[str, int],
) -> tuple[SavedParameter, ...]:
    """Return each parameter's amounts, the largest first."""
    why = reasons(best, states, naming.names)
    parameters = [
        SavedParameter(
            name=names[label],
            shape=naming.shapes.get(label),
            elements=state.num_elements,
            bytes=by_parameter[names[label]],
            quantised=state.quantised,
            reason=why.get(label),
        )
        for label, state in states.items()
    ]
    return tuple(sorted(parameters, key=lambda parameter: -parameter.bytes))


def _alternatives(
    best: Fit | None, states: Mapping[str, SavedState], naming: Naming, state_bytes: int
) -> tuple[tuple[Alternative, ...], tuple[str, ...]]:
    """Return what other optimizers would take for the same parameters, the recognised one first, and notes on that."""
    if not states:
        return (), ()
    if any(label not in naming.shapes for label in states):
        return (), ("What other optimizers would take is not known: not every parameter's shape is.",)
    params, notes = _weights(best, states, naming)
    others = [registry.find(name) for name in ALTERNATIVES if best is None or name != best.entry.name]
    rows: list[tuple[OptimizerEntry, Hyper, list[ParamInfo]]] = [
        (entry, default_hyper(entry), params) for entry in others
    ]
    if best is not None:
        rows.insert(0, (best.entry, *_as_found(best, params)))
    alternatives = tuple(
        Alternative(name=entry.name, state_bytes=predict_state(entry, named, hyper).state_bytes)
        for entry, hyper, named in rows
    )
    if best is not None and alternatives[0].state_bytes != state_bytes:
        size = format_bytes(alternatives[0].state_bytes)
        notes = (*notes, f"{best.entry.name} would take {size}: what all parameters share is saved more than once.")
    return alternatives, notes


def _weights(
    best: Fit | None, states: Mapping[str, SavedState], naming: Naming
) -> tuple[list[ParamInfo], tuple[str, ...]]:
    """Return the parameters as laws see them.

    The dtype of a weight is what its state tells, else that of the model beside, else the one that all other states
    tell, else float32, which is noted.
    """
    told = best.dtypes if best is not None else {}
    common = next(iter(told.values())) if len(set(told.values())) == 1 else None
    known = {label: told.get(label) or naming.dtypes.get(label) or common for label in states}
    params = [
        ParamInfo(
            name=label,
            shape=naming.shapes[label],
            dtype=known[label] or "float32",
            hidden=best.parameters[label].hidden if best is not None else True,
        )
        for label in states
    ]
    assumed = list(known.values()).count(None)
    if not assumed:
        return params, ()
    whose = "the weights" if assumed == len(params) else f"{assumed} of {count(len(params), 'weight')}"
    return params, (f"Nothing tells the dtype of {whose}: other optimizers are sized as for float32.",)


def _as_found(fit: Fit, params: Sequence[ParamInfo]) -> tuple[Hyper, list[ParamInfo]]:
    """Return the hyperparameters of a fit, an override of all that it keeps in 32 bit, and names to fit."""
    kept = set(fit.kept_whole)
    overrides = (Override(pattern=f"{_KEPT}*", values={"optim_bits": 32}),) if kept else ()
    named = [replace(param, name=_KEPT + param.name) if param.name in kept else param for param in params]
    return {**fit.hyper, "overrides": overrides}, named
