"""Rows of the table *estimated vs measured*, as plain numbers; reads only the record."""

from __future__ import annotations

from dataclasses import dataclass

from effcli.measure.record import RunRecord
from effcli.report.device_rows import allocator_rows, driver_rows, state_rows
from effcli.report.memory_row import MemoryRow, loosest, peak_basis, total
from effcli.report.ranks import EXCHANGE
from effcli.units import Basis, Category, StateAmount

BEFORE_ACTIVATIONS = "total before activations"


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


def memory_rows(record: RunRecord) -> list[MemoryRow]:
    """Return the amounts held before activations, their sum, and the peak; of a run on CUDA also what follows."""
    model, optimizer, measured = record.model, record.optimizer, record.measured
    given = optimizer.plan.basis if optimizer.plan else {}
    basis = {category: given.get(category, Basis.EXACT) for category in (Category.WEIGHTS, Category.GRADIENTS)}
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
    exchange = _exchange(record)
    before = MemoryRow(
        label=BEFORE_ACTIVATIONS,
        estimated=optimizer.total_before_activations_bytes,
        measured=total(row.measured for row in (*parts, *exchange)),
        basis=loosest(row.basis for row in (*parts, *exchange)),
        is_sum=True,
    )
    if measured is None or not record.is_on_cuda:
        return [*parts, *_state_details(record), *exchange, before, *_peak_rows(record)]
    details = [*_state_details(record), *state_rows(record), *exchange]
    return [*parts, *details, before, *allocator_rows(record, measured_total=before.measured), *driver_rows(record)]


def _exchange(record: RunRecord) -> list[MemoryRow]:
    """Return what rank 0 holds to exchange with others, which is not measured; nothing where that is nothing."""
    ranks, plan = record.optimizer.per_rank, record.optimizer.plan
    if not ranks or not ranks[0].communication_bytes:
        return []
    basis = plan.basis.get(Category.COMMUNICATION, Basis.ASSUMED) if plan else Basis.ASSUMED
    return [MemoryRow(label=EXCHANGE, estimated=ranks[0].communication_bytes, measured=None, basis=basis)]


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
        details.append(
            MemoryRow(label="rule of thumb", estimated=rule, measured=None, basis="rule", is_part=True, has_twin=False)
        )
    return details


def _peak_rows(record: RunRecord) -> list[MemoryRow]:
    """Return the allocator's peak where there is one, and after a run that of the process, which means something else.

    Where an update was profiled, that of the plan is what it says of this update's batches.
    """
    plan, measured = record.optimizer.plan, record.measured
    estimated = record.comparable_planned_peak_bytes
    allocated = measured.peak_allocated_bytes if measured else None
    basis = peak_basis(plan) if plan else ""
    rows = []
    if estimated is not None or allocated is not None or measured is None:
        rows.append(MemoryRow(label="peak allocated", estimated=estimated, measured=allocated, basis=basis))
    if measured is not None:
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
        bytes_only("total", BEFORE_ACTIVATIONS, is_sum=True),
    ]


def _totals(elements: int | None, num_bytes: int | None) -> StateAmount | None:
    return None if elements is None or num_bytes is None else StateAmount(elements=elements, bytes=num_bytes)
