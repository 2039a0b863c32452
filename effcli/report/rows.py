"""Rows of the table *estimated vs measured*, as plain numbers; reads only the record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effcli.measure.record import RunRecord
from effcli.units import Basis, Category, StateAmount

if TYPE_CHECKING:
    from effcli.memory.plan import MemoryPlan

_FIRMEST_FIRST = (Basis.EXACT, Basis.TRACED, Basis.PROBED, Basis.LEARNT, Basis.ASSUMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One amount: predicted, measured, and where the prediction comes from. None is shown as "n/a".

    `in_elements` says that the amount counts elements, not bytes. `is_sum` marks the total of the rows above, `is_part`
    a detail of the row above.
    """

    label: str
    estimated: int | None
    measured: int | None
    basis: str
    in_elements: bool = False
    is_sum: bool = False
    is_part: bool = False

    @property
    def difference(self) -> int | None:
        """Return measured minus estimated; None where either is missing."""
        return None if self.estimated is None or self.measured is None else self.measured - self.estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRow:
    """Whole bytes and elements, predicted and measured; None where that side does not have the row.

    Elements mean something for the optimizer state alone (`has_elements`).
    """

    label: str
    estimated: StateAmount | None
    measured: StateAmount | None
    has_elements: bool = True
    is_sum: bool = False
    ends_section: bool = False


def runs_on_cuda(record: RunRecord) -> bool:
    """Return whether the run's device is a CUDA device."""
    return str(record.environment.get("device", "")).startswith("cuda")


def memory_rows(record: RunRecord) -> list[MemoryRow]:
    """Return the amounts held before activations, their sum, and the peak."""
    model, optimizer, measured = record.model, record.optimizer, record.measured
    given = optimizer.plan.basis if optimizer.plan else {}
    basis = {category: given.get(category, Basis.EXACT) for category in (Category.WEIGHTS, Category.GRADIENTS)}
    basis[Category.OPTIMIZER_STATE] = optimizer.basis
    parts = [
        MemoryRow(
            label="weights",
            estimated=model.weights_bytes,
            measured=measured.weights_bytes if measured else None,
            basis=basis[Category.WEIGHTS],
        ),
        MemoryRow(
            label="gradients",
            estimated=model.gradients_bytes,
            measured=measured.gradients_bytes if measured else None,
            basis=basis[Category.GRADIENTS],
        ),
        MemoryRow(
            label="optimizer state",
            estimated=optimizer.state_bytes,
            measured=measured.optimizer_state_bytes if measured else None,
            basis=optimizer.basis,
        ),
    ]
    total = MemoryRow(
        label="total before activations",
        estimated=optimizer.total_before_activations_bytes,
        measured=_sum(row.measured for row in parts),
        basis=max(basis.values(), key=_looseness),
        is_sum=True,
    )
    return [*parts, *_state_details(record), total, *_peak_rows(record)]


def _sum(amounts: Iterable[int | None]) -> int | None:
    """Return the sum; None where a part is missing, because a smaller total would mislead."""
    known = list(amounts)
    return None if None in known else sum(amount for amount in known if amount is not None)


def _looseness(basis: str) -> int:
    return _FIRMEST_FIRST.index(Basis(basis)) if basis in set(Basis) else len(_FIRMEST_FIRST)


def peak_basis(plan: MemoryPlan) -> str:
    """Return the looser basis of a peak's activations and of temporaries that it holds; empty where it has neither."""
    parts = [Category.ACTIVATIONS, *([Category.TEMPORARIES] if plan.at_peak and plan.at_peak.temporaries_bytes else [])]
    return max((plan.basis[part] for part in parts if part in plan.basis), key=_looseness, default="")


def _state_details(record: RunRecord) -> list[MemoryRow]:
    optimizer, measured = record.optimizer, record.measured
    details = [
        MemoryRow(
            label="elements",
            estimated=optimizer.state_elements,
            measured=measured.optimizer_state_elements if measured else None,
            basis=optimizer.basis,
            in_elements=True,
            is_part=True,
        )
    ]
    if optimizer.rule_of_thumb_bytes is not None:
        rule = optimizer.rule_of_thumb_bytes
        details.append(MemoryRow(label="rule of thumb", estimated=rule, measured=None, basis="rule", is_part=True))
    return details


def _peak_rows(record: RunRecord) -> list[MemoryRow]:
    """Return the allocator's peak where there is one, and on a CPU the process's, which means something else.

    Where an update was profiled, that of the plan is what it says of this update's batches.
    """
    plan, measured = record.optimizer.plan, record.measured
    estimated = record.comparable_planned_peak_bytes
    allocated = measured.peak_allocated_bytes if measured else None
    basis = peak_basis(plan) if plan else ""
    rows = []
    if estimated is not None or allocated is not None or measured is None or runs_on_cuda(record):
        rows.append(MemoryRow(label="peak allocated", estimated=estimated, measured=allocated, basis=basis))
    if measured is not None and not runs_on_cuda(record):
        rows.append(MemoryRow(label="peak resident set", estimated=None, measured=measured.peak_rss_bytes, basis=""))
    return rows


def exact_rows(record: RunRecord) -> list[ExactRow]:
    """Return weights, gradients, one row per state key (predicted ones first), the state's sum and the sum of all."""
    estimated, measured = record.optimizer.tensors, record.measured.tensors if record.measured else {}
    keys = list(dict.fromkeys((*estimated, *measured)))
    amounts = {row.label: row for row in memory_rows(record)}

    def bytes_only(label: str, source: str, **marks: bool) -> ExactRow:
        row = amounts[source]
        estimated, measured = _totals(0, row.estimated), _totals(0, row.measured)
        return ExactRow(label=label, estimated=estimated, measured=measured, has_elements=False, **marks)

    state, elements = amounts["optimizer state"], amounts["elements"]
    state_sum = ExactRow(
        label="state",
        estimated=_totals(elements.estimated, state.estimated),
        measured=_totals(elements.measured, state.measured),
        is_sum=True,
    )
    return [
        bytes_only("weights", "weights"),
        bytes_only("gradients", "gradients", ends_section=True),
        *(
            ExactRow(label=key, estimated=estimated.get(key), measured=measured.get(key), ends_section=key == keys[-1])
            for key in keys
        ),
        state_sum,
        bytes_only("total", "total before activations", is_sum=True),
    ]


def _totals(elements: int | None, num_bytes: int | None) -> StateAmount | None:
    return None if elements is None or num_bytes is None else StateAmount(elements=elements, bytes=num_bytes)
