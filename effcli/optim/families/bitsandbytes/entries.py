"""The optimizers of bitsandbytes: nine families in 8 and in 32 bit, four of them paged too. No torch at import."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from effcli.optim import flat
from effcli.optim.entry import OptimizerEntry, never_on_shards
from effcli.optim.families.bitsandbytes.build import block_wise_builder
from effcli.optim.families.bitsandbytes.families import FAMILIES, Family
from effcli.optim.families.bitsandbytes.state import PAGED_FROM, blockwise_formula, blockwise_layout
from effcli.optim.families.bitsandbytes.workspace import blockwise_workspace

_BITS: tuple[Literal[8, 32], ...] = (8, 32)
_VERSION = "bitsandbytes 0.50.2"


def _entry(family: Family, bits: Literal[8, 32], *, paged: bool) -> OptimizerEntry:
    name = f"{'paged-' if paged else ''}{family.name}{bits}bit"

    def settle(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
        family.check(hyper, name)
        return hyper

    return OptimizerEntry(
        name=name,
        aliases=_aliases(family, bits, paged=paged),
        summary=_summary(family, bits, paged=paged),
        law=_law(family),
        formula=blockwise_formula(family.states, has_norm="max_unorm" in family.defaults),
        source=f"{family.paper}; Dettmers et al., arXiv 2110.02861; bitsandbytes/optim/{family.name}.py, {_VERSION}",
        package="bitsandbytes",
        pip="bitsandbytes",
        devices=family.runs_8bit_on if bits == 8 else ("cpu", "cuda"),
        defaults=family.defaults,
        hyper_help=family.hyper_help,
        ranges=family.ranges,
        override_notes={
            "is_sparse": "is_sparse is passed on to bitsandbytes, where nothing reads it (0.50): it has no effect."
        },
        bits=bits,
        settle=settle,
        rule_of_thumb_bytes=lambda num_parameters, hyper: (
            sum(family.states) * hyper["optim_bits"] // 8 * num_parameters
        ),
        build=block_wise_builder(f"{'Paged' if paged else ''}{family.class_name}", family.arguments),
        state_layout=partial(blockwise_layout, states=family.states, paged=paged),
        step_workspace=partial(blockwise_workspace, family=family.name),
        paged_from=PAGED_FROM if paged else None,
        cpu_note=(
            f"{name}: bitsandbytes pages on CUDA only; on a CPU its state is ordinary memory of the same size."
            if paged
            else None
        ),
        shard_fault=never_on_shards("bitsandbytes' kernels take plain tensors, not shards"),
        flat_fault=flat.norm_fault,
    )


def _aliases(family: Family, bits: int, *, paged: bool) -> tuple[str, ...]:
    if paged:
        return (f"paged_{family.name}_{bits}bit",)
    return (
        f"{family.name}_bnb_{bits}bit",
        f"{family.name}_{bits}bit",
        *family.trainer_names.get(bits, ()),
    )


def _summary(family: Family, bits: int, *, paged: bool) -> str:
    kind = "block-wise 8-bit" if bits == 8 else "32-bit"
    parts = [f"{family.class_name} of bitsandbytes with {kind} state"]
    parts += [family.says] if family.says else []
    parts += ["large states in paged (managed) memory, outside torch's allocator"] if paged else []
    return f"{'; '.join(parts)}."


def _law(family: Family) -> str:
    tables = "One code table of 1,024 bytes is" if len(family.states) == 1 else "Two code tables of 1,024 bytes are"
    norm = " With max_unorm the norm of an update is kept, 4 bytes." if "max_unorm" in family.defaults else ""
    return (
        f"Keeps {family.keeps}: with optim_bits 8, from min_8bit_size elements on, in 8 bit with a float32 absmax per "
        f"block of 256 elements; else in float32, for bf16 weights too. {tables} shared by all parameters.{norm}"
    )


def _entries() -> Iterator[OptimizerEntry]:
    for paged in (False, True):
        for family in FAMILIES:
            if family.has_paged or not paged:
                yield from (_entry(family, bits, paged=paged) for bits in _BITS)


ENTRIES = tuple(_entries())
