"""The optimizer that a saved state looks like, and in a sentence what that rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from effcli.inspection.groups import Group, contradicted
from effcli.inspection.layout import SavedState
from effcli.inspection.look_alike import Fit, fitting
from effcli.inspection.named_optimizer import NamedOptimizer, named_optimizer
from effcli.inspection.names import Naming
from effcli.optim import registry
from effcli.saved import SavedOptimizer
from effcli.units import count, cut, format_count, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Resemblance:
    """The optimizers that fit, the most telling first, and a sentence on what that rests on."""

    fits: tuple[Fit, ...]
    sentence: str

    @property
    def best(self) -> Fit | None:
        """Return the fit that the state is taken for."""
        return self.fits[0] if self.fits else None


def resemblance(saved: SavedOptimizer, states: Mapping[str, SavedState], naming: Naming) -> Resemblance:
    """Return the optimizers whose laws say what the states hold.

    The run's own settings beside the state, and then the parameter groups, decide between those that keep the same.
    """
    places = (saved.path, saved.path.absolute().parent) if saved.path.is_dir() else (saved.path.parent,)
    named = next(filter(None, map(named_optimizer, places)), None)
    if not states:
        return _of_nothing(saved, named)
    if not saved.holds_whole_tensors:
        sentence = f"flat pieces of several parameters have no law to compare with; they hold {_keys(states)}"
        return Resemblance(fits=(), sentence=sentence)
    unknown = [label for label in states if label not in naming.shapes]
    if unknown:
        return Resemblance(fits=(), sentence=_untold(unknown, states))
    fits = fitting(states, naming.shapes, naming.dtypes, saved.groups)
    if not fits:
        alike = fitting(states, naming.shapes, naming.dtypes, saved.groups, unlikely=True)
        return Resemblance(fits=(), sentence=_unlisted(states, named, alike))
    if named is not None:  # the one that is named comes first
        fits = tuple(sorted(fits, key=lambda fit: fit.entry.name != named.name))
    return Resemblance(fits=fits, sentence=_sentence(fits, states, named))


def _sentence(fits: Sequence[Fit], states: Mapping[str, SavedState], named: NamedOptimizer | None) -> str:
    whose = fits[0].entry.name if len(fits) == 1 else f"each of these {len(fits)}"
    held = "the one state holds" if len(states) == 1 else f"the {count(len(states), 'state')} hold"
    parts = [f"{held} what {whose} keeps, to the byte"]
    whole = len(fits[0].kept_whole)
    if whole:
        parts.append(f"{format_count(whole)} of them kept in 32 bit")
    if named is not None:
        agrees = fits[0].entry.name == named.name
        parts.append(f"{'and' if agrees else 'but'} {named}")
    elif len(fits) > 1:
        parts.append("and nothing that was saved tells them apart")
    return ", ".join(parts)


def _of_nothing(saved: SavedOptimizer, named: NamedOptimizer | None) -> Resemblance:
    """Return what the groups and the run's settings say of an optimizer without state."""
    stateless = _stateless(saved.groups)
    if stateless:
        said = f", and {named}" if named else ""
        return Resemblance(
            fits=stateless,
            sentence=f"there is no state, and the parameter groups are those of sgd without momentum{said}",
        )
    said = f"; {named}" if named else ""
    return Resemblance(
        fits=(), sentence=f"there is no state: it was saved before the first update, or none is kept{said}"
    )


def _stateless(groups: Sequence[Group]) -> tuple[Fit, ...]:
    """Return SGD without momentum where the groups are its own."""
    entry = registry.find("sgd")
    if not groups or contradicted(entry, groups) or not all(group.get("momentum") == 0 for group in groups):
        return ()
    return (Fit(entry=entry, hyper=registry.default_hyper(entry), parameters={}),)


def _untold(unknown: Sequence[str], states: Mapping[str, SavedState]) -> str:
    return (
        f"the state of {format_count(len(unknown))} of {count(len(states), 'parameter')} does not tell the parameter's "
        f"shape, and no law can be tried without it; the states hold {_keys(states)}"
    )


def _unlisted(states: Mapping[str, SavedState], named: NamedOptimizer | None, alike: Sequence[Fit]) -> str:
    said = f"; {named}" if named is not None else ""
    if alike:
        names = listed([fit.entry.name for fit in alike], None, last="or")
        held = f"the states hold what {names} would keep, {_keys(states)}"
        return f"{held}, but the parameter groups are of another one{said}"
    if named is not None and named.is_listed:
        said = f"; {named}, which keeps something else"
    return f"no optimizer that `effcli optimizers` lists keeps this: the states hold {_keys(states)}{said}"


def _keys(states: Mapping[str, SavedState]) -> str:
    """Return the keys of the states in words, the most frequent first."""
    counts = Counter(key for state in states.values() for key in state.own)
    return cut(", ".join(key for key, _ in counts.most_common()), 200)
