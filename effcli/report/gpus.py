"""The list of GPU cards that are known by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from effcli.report.layout import fact_grid, print_parts, ruled_table
from effcli.report.text import plain
from effcli.units import GIB, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from effcli.memory.cards import Card


def render_gpus(cards: Sequence[Card], console: Console) -> None:
    """Print the cards with what is sold and what a process can have."""
    table = ruled_table("GPU cards, in GiB", "--gpu")
    table.add_column("name", overflow="fold")
    for heading in ("sold", "usable", "usable bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for card in cards:
        usable = (
            ("", "") if card.source is None else (f"{card.usable_bytes / GIB:.2f}", format_count(card.usable_bytes))
        )
        table.add_row(plain(card.key), plain(card.name), f"{card.nominal_bytes / GIB:g}", *usable)
    explanations = (
        ("usable", "as CUDA reports it; differs by some tens of MiB between drivers; --json has the sources"),
        ("no number", "no public reading was found: what is sold is taken, which is a few percent too much"),
        ("any other", "give an amount: --gpu 24GiB (1024^3 bytes each) or --gpu 24GB (1000^3)"),
    )
    print_parts((table, fact_grid(explanations)), console)
