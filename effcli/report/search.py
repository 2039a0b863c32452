"""What a search for settings that fit found, as a table for a terminal; reads only the record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, get_args

from rich.text import Text

from effcli.ranks.launch import launch_command
from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.text import parameter_counts, plain, tokens_of_rows
from effcli.spec import Task
from effcli.units import count, format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from effcli.measure.search_record import SearchRecord


def render_search(record: SearchRecord, console: Console, *, notes: bool) -> None:
    """Print what was searched, what fits, and how to train it."""
    console.print(Text(plain(f"effcli plan: {record.model.name}"), style="bold"))
    parts: list[RenderableType] = [
        fact_grid(_facts(record)),
        _configurations(record),
        fact_grid(_explanations(record)),
    ]
    if notes and record.notes:
        parts.append(fact_grid(("note", note) for note in record.notes))
    print_parts(parts, console)


def _facts(record: SearchRecord) -> Iterable[tuple[str, str]]:
    model, gpu = record.model, record.gpu
    yield "type", f"{model.architecture}, {model.task}"
    yield "parameters", parameter_counts(model)
    rows = count(record.effective_batch, "row")
    yield "update", ", ".join([rows, *tokens_of_rows(record.max_length, record.max_target_length)])
    cards = f"{record.gpus} x " if record.gpus > 1 else ""
    yield "gpu", f"{cards}{format_bytes(gpu.usable_bytes)}{f', {gpu.name}' if gpu.name else ''}"
    yield "allowed", f"{format_bytes(record.allowed_bytes)}: {record.margin_percent:g} % stays free"
    tried = "; ".join(", ".join(names) for names in record.tried.values())
    yield "tried", f"{tried}; with and without recomputation; {count(record.num_predictions, 'prediction')}"


def _configurations(record: SearchRecord) -> Table:
    """Return a row per configuration, the largest micro-batch of each kind that fits."""
    table = ruled_table("What fits, the fastest first (assumed)", "#")
    for heading in ("optimizer", "precision"):
        table.add_column(heading, overflow="fold")
    has_many = record.gpus > 1
    if has_many:
        table.add_column("shard", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("recomp." if has_many else "recompute")  # so that the table keeps to 80 columns
    for heading in ("peak", "device", "spare"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, found in enumerate(record.configurations, start=1):
        table.add_row(
            str(number),
            plain(found.optimizer),
            found.precision,
            *([found.shard] if has_many else []),
            f"{format_count(found.batch.micro)} x {format_count(found.batch.accum)}",
            "yes" if found.gradient_checkpointing else "no",
            format_bytes(found.peak_allocated_bytes),
            format_bytes(found.device_total_bytes),
            format_bytes(found.spare_bytes),
            style="bold" if number == record.chosen else "",
        )
    return table


def _explanations(record: SearchRecord) -> Iterable[tuple[str, str]]:
    if record.configurations:
        each = f", on each of {record.gpus} cards" if record.gpus > 1 else ""
        yield "batch", f"rows per micro-batch x micro-batches per update{each}; smaller micro-batches fit as well"
        if record.gpus > 1:
            yield (
                "shard",
                "ddp: each card holds the whole model; fsdp, zero: a share of it; amounts of rank 0's card",
            )
        context = record.context_source or record.context_basis
        yield "device", f"what must be free: tensors at the peak, the allocator's reserve (traced), CUDA ({context})"
        yield "assumed", f"about speed: {'; '.join(record.assumed)}"
        yield "to type", plain(record.configurations[(record.chosen or 1) - 1].command)
        if record.model.task not in get_args(Task):
            yield "train", f"effcli train does not learn {record.model.task}; the settings are for a loop of your own"
    if record.recipe is not None:
        train = f"{launch_command(record.gpus)} train"
        yield "recipe", f"row {record.chosen}: {train} --recipe {record.recipe} --data YOUR_DATA"
    elif record.configurations:
        yield "or", "--out recipe.yaml writes row 1 as a recipe, --choose 2 the second"
