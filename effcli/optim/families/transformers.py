"""Optimizers of transformers: Adafactor. Build and state law side by side; no torch at import."""

from __future__ import annotations

from typing import Any

from effcli.errors import UsageError
from effcli.optim import flat
from effcli.optim.building import builder, named
from effcli.optim.entry import Hyper, OptimizerEntry, Schedule, never_on_shards
from effcli.optim.laws import PYTHON_STEP, full, num_columns, num_rows, sized, width
from effcli.optim.ranges import ABOVE_0, AT_LEAST_0, AT_MOST_0
from effcli.units import ParamInfo, StateTensor


def _arguments(hyper: Hyper) -> dict[str, Any]:
    names = ("lr", "clip_threshold", "decay_rate", "beta1", "scale_parameter", "relative_step", "warmup_init")
    return {"eps": (hyper["eps"], hyper["eps2"]), **named(*names)(hyper)}


def _adafactor_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return factors of the last two dimensions (a full second moment below two), the RMS, a first moment with beta1.

    Source: `Adafactor.step` in transformers/optimization.py, 5.24: half-precision gradients are widened first, so the
    state is float32 for bf16 and fp16 weights; `step` is a Python int, `RMS` a 0-dim tensor.
    """
    size = max(4, width(param))
    first = (full("exp_avg", param, dtype_bytes=size),) if hyper["beta1"] is not None else ()
    second = (
        (
            sized("exp_avg_sq_row", num_rows(param), size),
            sized("exp_avg_sq_col", num_columns(param), size),
        )
        if len(param.shape) >= 2
        else (full("exp_avg_sq", param, dtype_bytes=size),)
    )
    return (PYTHON_STEP, *first, *second, sized("RMS", 1, size))


def _settle_adafactor(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """Return the options with a fixed learning rate, or, for relative steps, without one and scaled by the weight."""
    if not hyper["relative_step"]:
        if hyper["warmup_init"]:
            raise UsageError("adafactor: warmup_init=true is for relative steps; add --optim-arg relative_step=true")
        return hyper
    if "lr" in given:
        raise UsageError(
            f"adafactor: --lr {hyper['lr']} and relative_step=true exclude each other, relative steps set their own "
            "learning rate; drop one of the two"
        )
    scale = hyper["scale_parameter"] if "scale_parameter" in given else True
    return hyper | {"lr": None, "scale_parameter": scale}


def _schedule(hyper: Hyper) -> Schedule:
    return "own" if hyper["relative_step"] else "any"


ENTRIES = (
    OptimizerEntry(
        name="adafactor",
        aliases=("adafactor_transformers", "adafactor_hf"),
        summary="Adafactor of transformers: row and column factors in float32; fixed rate unless relative_step=true.",
        law="In float32 whatever the weight: one factor per row and per column of the last two dimensions (a full "
        "second moment with fewer than two), a full first moment with beta1, and the RMS.",
        formula="max(4, w)*((rows + columns if dims >= 2 else n) + (0 if beta1 is None else n) + 1)",
        source="Shazeer & Stern, arXiv 1804.04235; transformers/optimization.py, transformers 5.24",
        package="transformers",
        pip="transformers",
        # With a fixed rate and no parameter scaling, clip_threshold 1.0 bounds an update's RMS by lr: the same size of
        # step as Adam's, hence the same rate as adamw, where upstream's relative steps would start at 1e-2.
        defaults={
            "lr": 5e-5,
            "eps": 1e-30,
            "eps2": 1e-3,
            "clip_threshold": 1.0,
            "decay_rate": -0.8,
            "beta1": None,
            "scale_parameter": False,
            "relative_step": False,
            "warmup_init": False,
        },
        hyper_help={
            "eps": "added to the squared gradient",
            "eps2": "smallest RMS by which the step is scaled",
            "clip_threshold": "largest RMS of an update before the learning rate",
            "beta1": "decay of a first moment; none saves that state",
            "scale_parameter": "scale the step by the weight's RMS",
            "relative_step": "let the optimizer set its own learning rate; excludes --lr and a schedule",
            "warmup_init": "start relative steps at 1e-6 per step",
        },
        ranges={"eps2": AT_LEAST_0, "clip_threshold": ABOVE_0, "decay_rate": AT_MOST_0},
        settle=_settle_adafactor,
        schedule=_schedule,
        build=builder("transformers.optimization", "Adafactor", _arguments),
        state_layout=_adafactor_layout,
        shard_fault=never_on_shards("its factors are plain tensors, which its step cannot combine with shards"),
        flat_fault=flat.FACTORED,
    ),
)
