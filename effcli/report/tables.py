"""A run on one screen of 80 columns: what it was, memory estimated and measured, and what came out of it.

Everything is built from `Text`, never from markup: brackets in paths, labels and tokens are printed as they are.
Cells wrap where a terminal is narrow; nothing is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from effcli.measure.record import RunRecord
from effcli.report.device_remarks import device_remarks
from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.memory_row import MemoryRow
from effcli.report.number_text import NOT_AVAILABLE, in_mib
from effcli.report.peak import change_table, measured_phase_table, peak_facts, phase_table
from effcli.report.ranks import agreement, how_spread, rank_table
from effcli.report.rows import exact_rows, memory_rows
from effcli.report.text import parameter_counts, plain, rate
from effcli.run_folder import RunFolder
from effcli.setting_texts import mapping, setting_text
from effcli.units import count, format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LOOK_OF_STATUS = {"completed": "bold green", "planned": "bold"}


def render_run(record: RunRecord, console: Console, *, notes: bool = True) -> None:
    """Print a run; `notes` says whether the sentences said during the run are repeated."""
    parts: list[RenderableType] = [Group(_headline(record), fact_grid(_identity(record)))]
    parts += [_memory_table(record), fact_grid(_remarks(record))]
    parts += [rank_table(record), fact_grid(agreement(record)), *_plan(record)]
    parts.append(_exact_table(record))
    if record.eval or (record.baselines and record.status != "planned"):
        parts.append(_evaluation_table(record))
    parts.append(fact_grid(_results(record)))
    if notes:
        parts.append(fact_grid(("note", note) for note in record.notes))
    print_parts(parts, console)


def _headline(record: RunRecord) -> Text:
    done = record.history[-1].update if record.history else 0
    title = Text(f"effcli {plain(record.command)}: ", style="bold")
    title.append(record.status, style=_LOOK_OF_STATUS.get(record.status, "bold red"))
    if record.status in ("planned", "completed"):
        title.append(f", {count(record.total_updates, 'update')}")
    else:
        title.append(f" after update {format_count(done)} of {format_count(record.total_updates)}")
    if record.failure:
        title.append(f": {plain(record.failure)}")
    return title


def _identity(record: RunRecord) -> Iterable[tuple[str, str]]:
    model, batch, data, environment = record.model, record.batch, record.data, record.environment
    loop = mapping(record.spec.get("loop"))
    device_name = environment.get("device_name")
    yield "model", model.name
    yield "type", f"{model.architecture}, {model.task}"
    yield "parameters", parameter_counts(model)
    engine, precision = (setting_text(loop.get(key), NOT_AVAILABLE) for key in ("engine", "precision"))
    device = f"{environment.get('device', NOT_AVAILABLE)}{f' ({device_name})' if device_name else ''}"
    yield "run", f"{record.optimizer.name}, engine {engine}, {precision}, on {device}"
    processes = f" x {batch.world_size}" if batch.world_size > 1 else ""
    if record.distribution is not None:
        yield "processes", how_spread(record.distribution)
    yield "batch", f"{batch.micro} x {batch.accum}{processes} = {batch.effective} rows per update"
    for group in record.groups:
        elements = f"{count(group.num_tensors, 'tensor')}, {count(group.num_elements, 'element')}"
        yield "decay", f"{group.weight_decay:g} on {elements}"
    rows = [count(data.train_rows, "training row"), count(data.eval_rows, "evaluation row")]
    left_out = (
        (data.truncated_rows, "cut"),
        (data.truncated_targets, "targets cut"),
        (data.skipped_rows, "left out"),
    )
    yield "data", ", ".join(rows + [f"{format_count(number)} {what}" for number, what in left_out if number])


def _memory_table(record: RunRecord) -> Table:
    measured = record.measured is not None
    whose = " on rank 0" if record.distribution else ""
    table = (
        ruled_table(f"Memory{whose}, estimated vs measured", "component", "estimated", "measured", "difference")
        if measured
        else ruled_table(f"Memory{whose}, estimated", "component", "estimated")
    )
    table.add_column("basis")
    rows = memory_rows(record)
    adds_up = measured and record.is_on_cuda
    show_bytes = in_mib if adds_up else format_bytes
    for row, following in zip_longest(rows, rows[1:]):
        look = "bold" if row.is_sum else "dim" if row.is_part else ""
        ends = row.is_sum or (not adds_up and following is not None and following.is_sum)
        table.add_row(*_memory_cells(row, show_bytes, measured=measured), style=look, end_section=ends)
    return table


def _plan(record: RunRecord) -> Iterable[RenderableType]:
    """Yield the planned phases where the peak was predicted and, before the run, whether it fits and what would.

    After a run on CUDA also what each phase took.
    """
    plan = record.optimizer.plan
    allocator = record.measured.allocator if record.measured else None
    if allocator is not None:
        yield measured_phase_table(plan, allocator)
    if plan is None or plan.peak_allocated_bytes is None:
        return
    yield phase_table(plan)
    if record.status == "planned":
        yield fact_grid(peak_facts(plan))
        yield change_table(plan.changes, plan)


def _memory_cells(row: MemoryRow, show_bytes: Callable[[int], str], *, measured: bool) -> list[str | Text]:
    show = format_count if row.in_elements else show_bytes
    cells: list[str | Text] = [f"  {row.label}" if row.is_part else row.label]
    cells.append(NOT_AVAILABLE if row.estimated is None else show(row.estimated))
    if measured:
        cells.append("" if not row.has_twin else NOT_AVAILABLE if row.measured is None else show(row.measured))
        off = row.difference or 0
        difference = "" if row.difference is None else f"{'+' if off > 0 else ''}{show(off)}"
        cells.append(Text(difference, style="yellow" if off else ""))
    return [*cells, row.basis]


def _remarks(record: RunRecord) -> Iterable[tuple[str, str]]:
    plan, measured = record.optimizer.plan, record.measured
    if plan is None or plan.peak_allocated_bytes is None:
        yield "total", "a lower bound: activations and temporaries come on top"
    if measured is None:
        if plan is None or plan.peak_allocated_bytes is None:
            yield "peak", f"{NOT_AVAILABLE}: activations are not predicted yet; a run measures it"
        return
    if record.is_on_cuda:
        yield from device_remarks(record)
        return
    if (profiled := measured.profiled) is not None:
        shape = f"{count(profiled.rows, 'row')} x {count(profiled.tokens, 'token')}"
        where = " on rank 0" if record.distribution else ""
        yield "peak", f"allocated: all tensors of update {format_count(profiled.update)}{where}, profiled; {shape}"
        if record.distribution and record.distribution.shard != "ddp":
            yield "peak", "also what gloo copies to exchange and gives back late, which is not planned"
    elif measured.peak_allocated_bytes is not None:
        yield "peak", "allocated: the most that tensors took at once, activations included"
    yield "peak", "resident set: the whole process, Python and libraries included"
    yield "NVML", f"{NOT_AVAILABLE}: not on an NVIDIA GPU"


def _exact_table(record: RunRecord) -> Table:
    """Return whole bytes and elements: weights, gradients, each state key, the state's sum, the sum of all."""
    if record.measured is not None:
        table = ruled_table("To the byte", "", "elements est.", "measured", "bytes est.", "measured")
    else:
        table = ruled_table("To the byte", "", "elements", "bytes")
    for row in exact_rows(record):
        sides = [row.estimated] if record.measured is None else [row.estimated, row.measured]
        elements = ["-" if side is None else format_count(side.elements) for side in sides]
        amounts = ["-" if side is None else format_count(side.bytes) for side in sides]
        table.add_row(
            plain(row.label),
            *(elements if row.has_elements else [""] * len(sides)),
            *amounts,
            style="bold" if row.is_sum else "",
            end_section=row.ends_section,
        )
    return table


def _evaluation_table(record: RunRecord) -> Table:
    """Return the metrics of each evaluation, and below them those of models that learnt nothing from the model."""
    has_accuracy = record.baselines is not None or any(line.eval_accuracy is not None for line in record.eval)
    has_perplexity = any(line.eval_perplexity is not None for line in record.eval)
    columns = ["loss"] + (["accuracy", "F1"] if has_accuracy else []) + (["perplexity"] if has_perplexity else [])
    table = ruled_table("Evaluation", "after", *columns)
    for line in record.eval:
        cells = [_decimals(line.eval_loss)]
        if has_accuracy:
            cells += [_decimals(line.eval_accuracy), _decimals(line.eval_f1)]
        if has_perplexity:
            cells.append("" if line.eval_perplexity is None else f"{line.eval_perplexity:,.2f}")
        last = line is record.eval[-1]
        table.add_row(
            f"epoch {line.epoch:.2f}, update {format_count(line.update)}",
            *cells,
            style="bold" if last else "",
            end_section=last,
        )
    if (base := record.baselines) is not None:
        blank = [""] if has_perplexity else []
        for label, accuracy, f1 in (
            ("baseline: majority class", base.majority_accuracy, base.majority_f1),
            ("baseline: bag of words", base.bag_of_words_accuracy, base.bag_of_words_f1),
        ):
            table.add_row(label, "", _decimals(accuracy), _decimals(f1), *blank)
    return table


def _results(record: RunRecord) -> Iterable[tuple[str, str]]:
    if record.history:
        first, last = record.history[0], record.history[-1]
        ends = (
            f"{NOT_AVAILABLE if line.loss is None else f'{line.loss:.4f}'} at update {format_count(line.update)}"
            for line in (first, last)
        )
        yield "training", f"loss {', '.join(ends)}, lr {rate(last.lr)}"
    if (speed := record.throughput) is not None:
        updates, samples = f"{speed.updates_per_second:,.2f} updates/s", f"{speed.samples_per_second:,.1f} samples/s"
        yield "speed", f"{updates}, {samples}, {speed.tokens_per_second:,.0f} tokens/s"
    out = record.environment.get("out")
    if out is not None and record.status != "planned":
        folder = RunFolder(path=Path(str(out)))
        yield "record", str(folder.record)
        if record.status == "completed":
            yield "model", str(folder.model)


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
