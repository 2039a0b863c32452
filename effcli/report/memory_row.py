"""One row of the table *estimated vs measured*, and how firm its prediction is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effcli.units import Basis, Category

if TYPE_CHECKING:
    from effcli.memory.plan import MemoryPlan

_FIRMEST_FIRST = (Basis.EXACT, Basis.TRACED, Basis.PROBED, Basis.LEARNT, Basis.ASSUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One amount: predicted, measured, and where the prediction comes from. None is shown as "n/a".

    `in_elements` says that the amount counts elements, not bytes. `is_sum` marks the total of the rows above, `is_part`
    a detail of the row above. `has_twin` says that the amount is one that can be measured.
    """

    label: str
    estimated: int | None
    measured: int | None
    basis: str
    in_elements: bool = False
    is_sum: bool = False
    is_part: bool = False
    has_twin: bool = True

    @property
    def difference(self) -> int | None:
        """Return measured minus estimated; None where either is missing."""
        return None if self.estimated is None or self.measured is None else self.measured - self.estimated


def total(amounts: Iterable[int | None]) -> int | None:
    """Return the sum; None where a part is missing, because a smaller total would mislead."""
    known = list(amounts)
    return None if None in known else sum(amount for amount in known if amount is not None)


def less(whole: int | None, part: int | None) -> int | None:
    """Return what is left of an amount; None where either is missing."""
    return None if whole is None or part is None else whole - part


def loosest(bases: Iterable[str]) -> str:
    """Return the least firm basis; one that is not known counts as looser than all, and none at all is empty."""
    return max((basis for basis in bases if basis), key=_looseness, default="")


def _looseness(basis: str) -> int:
    return _FIRMEST_FIRST.index(Basis(basis)) if basis in set(Basis) else len(_FIRMEST_FIRST)


def peak_basis(plan: MemoryPlan) -> str:
    """Return the looser basis of a peak's activations and of temporaries that it holds; empty where it has neither."""
    parts = [Category.ACTIVATIONS, *([Category.TEMPORARIES] if plan.at_peak and plan.at_peak.temporaries_bytes else [])]
    return loosest(plan.basis[part] for part in parts if part in plan.basis)
