"""`inspect`: what a saved optimizer state holds, whose it looks like, and what others would take. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from effcli.measure.inspection import (
    Alternative,
    InspectionRecord,
    SavedAmount,
    SavedParameter,
)
from effcli.measure.optimizer_size import inspect_states
from effcli.memory.state import predict_state
from effcli.optim import registry
from effcli.optim.entry import Hyper
from effcli.optim.hyper import default_hyper
from effcli.optim.overrides import Override
from effcli.pipeline.look_alike import Fit
from effcli.pipeline.resemblance import resemblance
from effcli.pipeline.saved_bits import reasons
from effcli.pipeline.saved_layout import SavedState, saved_states
from effcli.pipeline.saved_names import Naming, name_parameters
from effcli.saved import SavedOptimizer, read_saved
from effcli.units import ParamInfo, count, format_bytes

ALTERNATIVES = ("adamw", "adafactor", "adam8bit", "adamw4bit", "lion8bit", "sgd")
"""What the state is compared with, by the entries' defaults."""


def inspect(path: Path, *, values: str | None = None) -> InspectionRecord:
    """Return the bytes and elements of the optimizer state in a file or folder, and what they say.

    `values` is a pattern of `parameter` or `parameter.state name`; tensors that fit it are shown as they are stored.

    Raises:
        UsageError: there is no such path, or the pattern fits nothing.
        DataError: it holds no optimizer state that can be read safely.
        MissingExtraError: its tensors are of a package that is not installed.
    """
    saved = read_saved(path)
    states = saved_states(saved.states, whole=_holds_whole_tensors(saved))
    naming = name_parameters(saved, states)
    found = resemblance(saved, states, naming)
    names = {label: naming.names.get(label, label) for label in saved.states}
    size = inspect_states((names[label], state) for label, state in saved.states.items())
    alternatives, notes = _alternatives(found.best, states, naming, size.state_bytes)
    return InspectionRecord(
        path=str(saved.path),
        format=saved.format,
        optimizer=found.best.entry.name if found.best else None,
        also_fits=tuple(fit.entry.name for fit in found.fits[1:]),
        resemblance=found.sentence,
        state_bytes=size.state_bytes,
        state_elements=size.state_elements,
        num_tensors=size.num_tensors,
        tensors={
            key: SavedAmount(elements=amount.elements, bytes=amount.bytes, dtype="+".join(size.dtypes[key]))
            for key, amount in size.tensors.items()
        },
        by_parameter=size.by_parameter,
        shared_bytes=size.shared_bytes,
        parameters=_parameters(states, names, naming, found.best, size.by_parameter),
        alternatives=alternatives,
        values=(),
        notes=(*saved.notes, *naming.notes, *notes),
    )


def _holds_whole_tensors(saved: SavedOptimizer) -> bool:
    """Return whether tensors have the shapes of statistics; DeepSpeed saves pieces of one flat tensor."""
    return "DeepSpeed" not in saved.format


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
    own = [] if best is None else [(best.entry, _as_found(best))]
    others = [registry.find(name) for name in ALTERNATIVES if best is None or name != best.entry.name]
    rows = [*own, *((entry, default_hyper(entry)) for entry in others)]
    alternatives = tuple(
        Alternative(name=entry.name, state_bytes=predict_state(entry, params, hyper).state_bytes)
        for entry, hyper in rows
    )
    if own and alternatives[0].state_bytes != state_bytes:
        notes = (*notes, f"Predicted for {own[0][0].name}: {format_bytes(alternatives[0].state_bytes)}, which differs.")
    return alternatives, notes


def _weights(
    best: Fit | None, states: Mapping[str, SavedState], naming: Naming
) -> tuple[list[ParamInfo], tuple[str, ...]]:
    """Return the parameters as laws see them: dtypes from the state, else the model beside, else float32."""
    params, assumed = [], 0
    for label in states:
        fitted = best.parameters[label] if best is not None else None
        told = fitted is not None and best is not None and best.by_dtype
        dtype = fitted.dtype if fitted is not None and told else naming.dtypes.get(label)
        assumed += dtype is None
        params.append(
            ParamInfo(
                name=label,
                shape=naming.shapes[label],
                dtype=dtype or "float32",
                hidden=fitted.hidden if fitted is not None else True,
            )
        )
    if not assumed:
        return params, ()
    whose = "the weights" if assumed == len(params) else f"{assumed} of {count(len(params), 'weight')}"
    return params, (f"Nothing tells the dtype of {whose}: other optimizers are sized as for float32.",)


def _as_found(fit: Fit) -> Hyper:
    """Return the hyperparameters of a fit, with an override for each parameter that it keeps in 32 bit."""
    kept = tuple(Override(pattern=f"={label}", values={"optim_bits": 32}) for label in fit.kept_whole)
    return {**fit.hyper, "overrides": kept}
