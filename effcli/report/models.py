"""The list of models that are known offline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.text import plain
from effcli.units import format_count

if TYPE_CHECKING:
    from rich.console import Console

    from effcli.catalogue.lookup import CatalogueModel


def render_models(models: Sequence[CatalogueModel], version: str, console: Console) -> None:
    """Print the models with their counts; `version` is that of the transformers code that was counted."""
    table = ruled_table("Models known offline", "model")
    table.add_column("fine-tuned for", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("published", no_wrap=True)
    for model in models:
        table.add_row(
            plain(model.name), plain(model.default_task), format_count(model.num_parameters), _published(model)
        )
    print_parts((table, fact_grid(_explanations(models, version))), console)


def _published(model: CatalogueModel) -> str:
    if model.published_parameters is None:
        return "not found"
    if model.published_parameters == model.num_parameters:
        return "the same"
    return format_count(model.published_parameters)


def _explanations(models: Sequence[CatalogueModel], version: str) -> Iterable[tuple[str, str]]:
    yield "parameters", f"of the checkpoint's own class, as transformers {version} builds it; tied tensors once"
    yield "published", "what the model's makers or its hub page state; not found: the configuration is unconfirmed"
    reasons: dict[str, list[str]] = {}
    for model in models:
        if model.count_note is not None:
            reasons.setdefault(model.count_note, []).append(model.name)
    for reason, names in reasons.items():
        yield "differs", f"{', '.join(names)}: {reason}"
