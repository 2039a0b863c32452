"""Names of the parameters whose states were saved by position, taken from the model beside.

torch saves states by the position of a parameter in its group. A name is taken only where nothing else could stand at
that position: the groups keep the model's order, and the shapes that the states tell decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from effcli.inspection.layout import SavedState, Shape
from effcli.inspection.look_alike import DTYPES
from effcli.inspection.model import KnownModel, Parameter, model_beside, named_model
from effcli.inspection.weights import Weight
from effcli.saved import SavedOptimizer
from effcli.units import count, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What is known of parameters, by label: names, shapes (from the state, else from the model beside), dtypes."""

    names: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def name_parameters(saved: SavedOptimizer, states: Mapping[str, SavedState], model: str | None = None) -> Naming:
    """Return names, shapes and dtypes of the parameters whose states were saved.

    `model` names the model that they are of; without it the one beside the state serves.

    Raises:
        UsageError: the model that was named is not on this machine.
    """
    told = {label: state.shape for label, state in states.items() if state.shape is not None}
    if not states:
        return Naming()
    labels = [label for group in saved.members for label in group]
    if model is not None and not saved.names_known:
        known: KnownModel | None = named_model(model, saved.path, num_parameters=len(labels))
    else:
        known = model_beside(saved.path, order=not saved.names_known, num_parameters=len(labels))
    names: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    if saved.names_known:
        names = {label: label for label in saved.states}
    elif known is None:
        notes = ("Parameters have their positions for names: no model is beside the state; --model names it.",)
    else:
        names, notes = _from(known, saved.members, told)
    if known is not None and known.unread:
        notes = (*notes, f"The weights of {known.name} are left out: {known.unread}.")
    weights = known.weights if known else {}
    parameters = {parameter.name: parameter for order in known.orders for parameter in order} if known else {}
    shapes = {label: told.get(label) or _shape(name, weights, parameters) for label, name in names.items()} | told
    return Naming(
        names=names,
        shapes={label: shape for label, shape in shapes.items() if shape is not None},
        dtypes=_dtypes(saved.states, names, known),
        notes=notes,
    )


def _dtypes(labels: Iterable[str], names: Mapping[str, str], known: KnownModel | None) -> dict[str, str]:
    """Return the dtype of each weight by its name; of those without, the one that all stored weights have."""
    if known is None:
        return {}
    weights = known.weights
    stored = {weight.dtype for model in known.models for weight in model.values()} & set(DTYPES)
    common = next(iter(stored)) if len(stored) == 1 else None
    found = {label: weights[names[label]].dtype if names.get(label) in weights else common for label in labels}
    return {label: dtype for label, dtype in found.items() if dtype in DTYPES}


def _shape(name: str, weights: Mapping[str, Weight], parameters: Mapping[str, Parameter]) -> Shape | None:
    if name in weights:
        return weights[name].shape
    return parameters[name].shape if name in parameters else None


def _from(
    known: KnownModel, members: Sequence[Sequence[str]], told: Mapping[str, Shape]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the names that a model gives, and what should be said about them."""
    labels = [label for group in members for label in group]
    named, why = _by_orders(known.orders, members, told), known.why or "others of its parameters fit as well"
    if not named and len(told) == len(labels):
        models = [{each.name: each.shape for each in order} for order in known.orders] or [
            {name: weight.shape for name, weight in model.items()} for model in known.models
        ]
        named = _by_shape(models, told)
    if len(named) == len(labels):
        return named, (f"Names of parameters are those of {known.name}, in its order: every shape agrees.",)
    if not named:
        why = why if known.why else "its parameters have other shapes"
        return {}, (f"Parameters have their positions for names: those of {known.name} are not taken: {why}.",)
    return named, (
        f"{format_count(len(named))} of {count(len(labels), 'parameter')} have the names of {known.name}; the others "
        f"have their positions: {why}.",
    )


def _by_orders(
    orders: Sequence[Sequence[Parameter]], members: Sequence[Sequence[str]], told: Mapping[str, Shape]
) -> dict[str, str]:
    """Return the names that all heads of a model give that fit: which of them was trained is not known."""
    fitting = [names for order in orders if (names := _by_order(order, members, told))]
    if not fitting:
        return {}
    return {label: name for label, name in fitting[0].items() if all(names.get(label) == name for names in fitting)}


def _by_order(
    parameters: Sequence[Parameter], members: Sequence[Sequence[str]], told: Mapping[str, Shape]
) -> dict[str, str]:
    """Return the names that the order of the model's parameters leaves no choice about.

    Trainer makes two groups, those with decay first. Where all parameters are trained, the sizes of its groups and
    every shape must agree; anything else is taken as groups that keep the model's order and leave some out.
    """
    decayed = [parameter for parameter in parameters if parameter.decayed]
    rest = [parameter for parameter in parameters if not parameter.decayed]
    for groups in ((decayed, rest), (parameters,)):
        if [len(group) for group in groups] == [len(group) for group in members]:
            pairs = [
                (label, parameter)
                for labels, group in zip(members, groups, strict=True)
                for label, parameter in zip(labels, group, strict=True)
            ]
            if all(told.get(label, parameter.shape) == parameter.shape for label, parameter in pairs):
                return {label: parameter.name for label, parameter in pairs}
    named: dict[str, str] = {}
    for labels in members:
        named |= _forced(labels, parameters, told)
    return named if len(set(named.values())) == len(named) else {}


def _forced(labels: Sequence[str], parameters: Sequence[Parameter], told: Mapping[str, Shape]) -> dict[str, str]:
    """Return the names of the positions for which every choice of parameters in the model's order is the same one.

    The earliest and the latest parameter that a position can have are found by going through the model from both ends.
    """
    shapes = [told.get(label) for label in labels]
    first = _earliest(shapes, parameters)
    last = _earliest(shapes[::-1], parameters[::-1])
    if first is None or last is None:
        return {}
    latest = [len(parameters) - 1 - index for index in reversed(last)]
    return {
        label: parameters[here].name for label, here, there in zip(labels, first, latest, strict=True) if here == there
    }


def _earliest(shapes: Sequence[Shape | None], parameters: Sequence[Parameter]) -> list[int] | None:
    """Return the first parameter that each position can have, in order; None where they are not all found."""
    found: list[int] = []
    for index, parameter in enumerate(parameters):
        if len(found) == len(shapes):
            break
        if shapes[len(found)] in (None, parameter.shape):
            found.append(index)
    return found if len(found) == len(shapes) else None


def _by_shape(models: Sequence[Mapping[str, Shape]], told: Mapping[str, Shape]) -> dict[str, str]:
    """Return the names of parameters whose shape no other has, in the one model that has just the shapes of the states.

    A part of a model is not named so: a parameter of something else could have the shape of one that was not trained,
    or of a buffer, which files don't tell from weights.
    """
    wanted = Counter(told.values())
    fitting = [model for model in models if Counter(model.values()) == wanted]
    if len(fitting) != 1:
        return {}
    by_shape = {shape: name for name, shape in fitting[0].items()}
    return {label: by_shape[shape] for label, shape in told.items() if wanted[shape] == 1}
