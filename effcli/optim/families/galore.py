"""GaLore: AdamW on a low-rank projection of the gradient. Build and state law side by side; no torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effcli.optim import flat
from effcli.optim.building import named, with_betas
from effcli.optim.entry import Groups, Hyper, OptimizerEntry, never_on_shards
from effcli.optim.groups import partition, upstream_groups
from effcli.optim.laws import ADAM_DEFAULTS, PYTHON_STEP, full, sized, width
from effcli.optim.ranges import ABOVE_0, AT_LEAST_1, one_of
from effcli.units import ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch

_PROJECTION = ("rank", "update_proj_gap", "scale", "proj_type")
"""Options whose presence in a group makes upstream project it."""


def _build(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
    """Return one optimizer over groups that are each projected or plain AdamW."""
    from galore_torch import GaLoreAdamW

    arguments = with_betas("eps", "correct_bias")
    parts: list[dict[str, Any]] = []
    for group in upstream_groups(groups, hyper, arguments):
        projected, rest = partition(group, lambda shape, hidden: _is_projected(shape, hidden, hyper["rank"]))
        parts += [rest, {**projected, **named(*_PROJECTION)(hyper)}]
    optimizer: torch.optim.Optimizer = GaLoreAdamW(
        [part for part in parts if part["params"]], **arguments(hyper), no_deprecation_warning=True
    )
    optimizer.register_state_dict_post_hook(_pack_projectors)
    optimizer.register_load_state_dict_post_hook(_unpack_projectors)
    return optimizer


def _pack_projectors(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with each projector's matrices in place of the object, the rest of which groups hold.

    A checkpoint then loads with `weights_only` and without upstream's package, and torch moves the matrices to the
    device of their parameter, which it does not do for what is inside an object.
    """
    packed = {
        index: {**state, "projector": state["projector"].ortho_matrix} if "projector" in state else state
        for index, state in state_dict["state"].items()
    }
    return {**state_dict, "state": packed}


def _unpack_projectors(optimizer: torch.optim.Optimizer) -> None:
    """Put a projector around the loaded matrices."""
    from galore_torch.galore_projector import GaLoreProjector

    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if "projector" in state:
                projector = GaLoreProjector(**named(*_PROJECTION)(group))
                projector.ortho_matrix = state["projector"]
                state["projector"] = projector


def _is_projected(shape: Sequence[int], hidden: bool, rank: int) -> bool:
    """Return whether projecting makes the state of a parameter smaller: a hidden matrix with both sides above rank."""
    return hidden and len(shape) == 2 and min(shape) > rank


def _sides(rows: int, columns: int, proj_type: str) -> tuple[str, ...]:
    """Return which singular vectors of a matrix the projector holds: of its rows (left), its columns (right), both.

    Source: `GaLoreProjector.project` in galore_torch/galore_projector.py, 1.0.
    """
    if proj_type == "full":
        return ("left", "right")
    if proj_type in ("std", "reverse_std"):
        tall = rows >= columns
        return ("right",) if tall is (proj_type == "std") else ("left",)
    return (proj_type,)


def _layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step`, the projector's vectors and two moments of the projected gradient, in the weight's dtype.

    Source: `AdamW.step` in galore_torch/adamw.py and `GaLoreProjector.get_orthogonal_matrix`, 1.0. The vectors are a
    slice of a whole singular value decomposition, made in float32: with float32 weights the slice keeps the whole
    factor alive, min(rows, columns) vectors; a narrower weight gets a converted copy of `rank` vectors. `step` is a
    Python int. Anything not projected is AdamW's.
    """
    rank = hyper["rank"]
    if not _is_projected(param.shape, param.hidden, rank):
        return (PYTHON_STEP, full("exp_avg", param), full("exp_avg_sq", param))
    rows, columns = param.shape
    size = width(param)
    sides = _sides(rows, columns, hyper["proj_type"])
    lengths = [{"left": rows, "right": columns}[side] for side in sides]
    num_kept = min(rows, columns) if size == 4 else rank
    projected = (rank if "left" in sides else rows) * (rank if "right" in sides else columns)
    return (
        PYTHON_STEP,
        *(
            StateTensor(key="projector", num_elements=rank * length, num_bytes=num_kept * length * size)
            for length in lengths
        ),
        sized("exp_avg", projected, size),
        sized("exp_avg_sq", projected, size),
    )


_LEFT = "(proj_type == 'left' or proj_type == ('std' if rows < columns else 'reverse_std'))"
_FORMULA = (
    "2*w*n if not hidden or dims != 2 or min(rows, columns) <= rank else "
    f"w*(2*rank*(rank if proj_type == 'full' else columns if {_LEFT} else rows) + "
    "(min(rows, columns) if w == 4 else rank)*"
    f"(rows + columns if proj_type == 'full' else rows if {_LEFT} else columns))"
)

# GaLoreAdamW8bit of the same package is left out: it calls torch.cuda.synchronize() in every step, and passes its
# arguments by position to a bitsandbytes older than 0.50, where they now mean a limit on the update's norm.
ENTRIES = (
    OptimizerEntry(
        name="galore-adamw",
        aliases=("galore_adamw",),
        summary="GaLore: AdamW with moments in a low-rank projection of hidden matrices; the rest is plain AdamW.",
        law="A hidden matrix with both sides above rank has two moments of the projected gradient, rank times its "
        "longer side, and a projector: rank singular vectors as long as its shorter side for bf16 weights, all of them "
        "for fp32 weights, which upstream's slice keeps alive (proj_type std). Everything else has two moments of its "
        "shape. All in the weight's dtype; step is a Python number.",
        formula=_FORMULA,
        source="Zhao et al., arXiv 2403.03507; galore_torch/adamw.py and galore_projector.py, galore-torch 1.0",
        package="galore_torch",
        pip="galore-torch",
        defaults={
            **ADAM_DEFAULTS,
            "eps": 1e-6,
            "correct_bias": True,
            "rank": 128,
            "update_proj_gap": 200,
            "scale": 0.25,
            "proj_type": "std",
        },
        hyper_help={
            "rank": "of the projected gradient; matrices with a side no longer than this are not projected",
            "update_proj_gap": "updates between two projections, each a singular value decomposition",
            "scale": "of a projected update, beside the learning rate",
            "proj_type": "side that is projected: std the shorter one, reverse_std the longer one, left, right, full",
        },
        ranges={
            "rank": AT_LEAST_1,
            "update_proj_gap": AT_LEAST_1,
            "scale": ABOVE_0,
            "proj_type": one_of("std", "reverse_std", "left", "right", "full"),
        },
        build=_build,
        state_layout=_layout,
        shard_fault=never_on_shards(
            "its projectors, and the moments of wide matrices, would lie whole in every process"
        ),
        flat_fault=flat.FOR_MATRICES,
    ),
)
