"""`SearchSpec`: what a search for settings that fit depends on; its sections are called as in `RunSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from effcli.estimate_spec import LARGEST_WORLD, EstimatedDataSpec, EstimatedModelSpec
from effcli.spec import LARGEST, OptimSpec, Precision, Section, Shard, Text, validated
from effcli.values import as_list, as_shard


class SearchedLoopSpec(Section):
    """What of a loop is given; batch size, accumulation and recomputation are what is searched for."""

    gpu: Text
    """Card, or bytes that it has for us."""
    gpus: int = Field(default=1, ge=1, le=LARGEST_WORLD)
    """Cards of this kind that train together, one process each."""
    shard: tuple[Shard, ...] = ()
    """Ways to spread a run over several cards that are tried; none means ddp and fsdp."""
    margin: float = Field(default=10, ge=0, lt=100)
    """Percent of the card that stays free."""
    effective_batch: int = Field(default=32, ge=1, le=65536)
    """Rows per update: micro-batch times accumulation."""
    precision: tuple[Precision, ...] = ()
    """Precisions that are tried; none means fp32, and bf16 or what the card has in its place."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Norm that gradients are clipped to; 0 means no clipping, and none of its temporaries."""

    _one_is_a_list = field_validator("precision", mode="before")(as_list)

    @field_validator("shard", mode="before")
    @classmethod
    def _none_is_ddp(cls, value: Any) -> Any:
        given = as_list(value)
        return tuple(map(as_shard, given)) if isinstance(given, list | tuple) else given


class SearchedOutputSpec(Section):
    """What is written."""

    out: Text | None = None
    """Recipe file for the chosen configuration."""
    choose: int = Field(default=1, ge=1, le=LARGEST)
    """Row of the table that is written."""


class SearchSpec(Section):
    """A search: one model, several optimizers, one card."""

    model: EstimatedModelSpec
    optim: tuple[OptimSpec, ...]
    data: EstimatedDataSpec = EstimatedDataSpec()
    loop: SearchedLoopSpec
    output: SearchedOutputSpec = SearchedOutputSpec()


def build_search_spec(values: Mapping[str, Any]) -> SearchSpec:
    """Return the specification that nested sections describe.

    Raises:
        UsageError: see `effcli.spec.build_spec`.
    """
    return validated(SearchSpec, values)
