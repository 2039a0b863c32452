"""torch's optimizers that scale by past squared gradients. Build and state law side by side; no torch at import."""

from __future__ import annotations

from typing import Any

from effcli.optim import flat, implementation
from effcli.optim.building import builder, named
from effcli.optim.entry import Hyper, OptimizerEntry, never_on_shards
from effcli.optim.laws import TORCH_STEP, bytes_per_parameter, full, num_columns, num_rows, sized, torch_step, width
from effcli.optim.ranges import AT_LEAST_0, AT_LEAST_1, AT_MOST_0, DECAY, UP_TO_1
from effcli.units import ParamInfo, StateTensor


def _adafactor_arguments(hyper: Hyper) -> dict[str, Any]:
    return {"eps": (hyper["eps"], hyper["eps2"]), **named("lr", "beta2_decay", "d")(hyper)}


def _adafactor_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and the factors of the last two dimensions; a full variance with fewer than two dimensions.

    Source: `Adafactor._init_group` in torch/optim/_adafactor.py, 2.13: shapes `[..., n, 1]` and `[..., 1, m]`, in the
    dtype of the gradient, which is that of the parameter.
    """
    if len(param.shape) < 2:
        return (TORCH_STEP, full("variance", param))
    return (
        TORCH_STEP,
        sized("row_var", num_rows(param), width(param)),
        sized("col_var", num_columns(param), width(param)),
    )


def _adagrad_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and the sum of squared gradients in the parameter's own dtype.

    Source: `Adagrad.__init__` in torch/optim/adagrad.py, 2.13: allocated when the optimizer is built, for parameters
    that never get a gradient too.
    """
    return (torch_step(hyper), full("sum", param))


def _rmsprop_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and the mean square, a buffer with momentum, a mean gradient when centered.

    Source: `RMSprop._init_group` in torch/optim/rmsprop.py, 2.13: all in the parameter's own dtype.
    """
    keys = ["square_avg"]
    keys += ["momentum_buffer"] if hyper["momentum"] > 0 else []
    keys += ["grad_avg"] if hyper["centered"] else []
    return (TORCH_STEP, *(full(key, param) for key in keys))


def _adadelta_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step`, the mean square of the gradients and that of the updates, in the parameter's own dtype.

    Source: `Adadelta._init_group` in torch/optim/adadelta.py, 2.13.
    """
    return (TORCH_STEP, full("square_avg", param), full("acc_delta", param))


ENTRIES = (
    OptimizerEntry(
        name="adafactor-torch",
        aliases=("adafactor_torch",),
        summary="Adafactor of torch: row and column factors in the weight's dtype; steps relative to the weight.",
        law="One factor per row and per column of the last two dimensions in the weight's dtype (a full second moment "
        "with fewer than two), and a 4-byte step.",
        formula="w*(rows + columns if dims >= 2 else n) + 4",
        source="Shazeer & Stern, arXiv 1804.04235; torch/optim/_adafactor.py, torch 2.13",
        # An update moves a weight by lr * max(eps2, RMS(weight)): with the RMS of about 0.04 of a pretrained
        # transformer, upstream's 1e-2 would be 4e-4, far above what fine-tuning bears, and 1e-3 is AdamW's 5e-5.
        defaults={"lr": 1e-3, "beta2_decay": -0.8, "eps": None, "eps2": 1e-3, "d": 1.0, **implementation.DEFAULT},
        hyper_help={
            "lr": "largest step relative to the weight's RMS, capped by 1/sqrt(step)",
            "eps": "term in the denominator; none means the machine epsilon of the weight's dtype",
            "eps2": "smallest RMS by which the step is scaled",
            "d": "update clipping threshold",
            "implementation": "how torch steps: auto is for-loop, on CUDA too",
        },
        ranges={"beta2_decay": AT_MOST_0, "eps2": AT_LEAST_0, "d": AT_LEAST_1, **implementation.WITHOUT_FUSED},
        build=builder("torch.optim", "Adafactor", _adafactor_arguments, for_all=implementation.keywords),
        state_layout=_adafactor_layout,
        shard_fault=never_on_shards("its step computes norms in place, which torch 2.13 cannot do on shards"),
        flat_fault=flat.FACTORED,
    ),
    OptimizerEntry(
        name="adagrad",
        summary="Adagrad of torch: one sum of squared gradients per weight, so that steps only ever shrink.",
        law="The sum of squared gradients in the weight's shape and dtype, and a 4-byte step, both allocated when the "
        "optimizer is built.",
        formula="w*n + 4",
        source="Duchi et al., JMLR 12 (2011); torch/optim/adagrad.py, torch 2.13",
        # The t-th update moves a weight by about lr / sqrt(t): upstream's 1e-2 would undo a pretrained model in its
        # first updates, and after 400 updates 5e-4 has come as far as AdamW with 5e-5.
        defaults={
            "lr": 5e-4,
            "lr_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
            **implementation.DEFAULT,
        },
        hyper_help={
            "lr": "size of the first update; the t-th is about lr / sqrt(t)",
            "lr_decay": "divide the rate by 1 + (step - 1) * lr_decay as well",
            "initial_accumulator_value": "where the sums of squares start",
            **implementation.HELP,
        },
        ranges={"lr_decay": AT_LEAST_0, "initial_accumulator_value": AT_LEAST_0, **implementation.WITH_FUSED},
        rule_of_thumb_bytes=bytes_per_parameter(4),
        build=builder(
            "torch.optim",
            "Adagrad",
            named("lr", "lr_decay", "initial_accumulator_value", "eps"),
            for_all=implementation.keywords,
        ),
        state_layout=_adagrad_layout,
        shard_fault=implementation.fused_fault,
        flat_fault=flat.MADE_ANEW,
    ),
    OptimizerEntry(
        name="rmsprop",
        summary="RMSprop of torch: one mean of squared gradients per weight, more with momentum or when centered.",
        law="The mean square in the weight's shape and dtype, a second state with momentum, one more when centered, "
        "and a 4-byte step.",
        formula="(1 + (1 if momentum > 0 else 0) + (1 if centered else 0))*w*n + 4",
        source="Tieleman & Hinton, Coursera lecture 6.5 (2012); torch/optim/rmsprop.py, torch 2.13",
        # A step has the size of Adam's, hence the same rate as adamw, where upstream has 1e-2. The mean is not
        # corrected for its start at zero: with alpha 0.99 the first update is ten times lr.
        defaults={"lr": 5e-5, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False} | implementation.DEFAULT,
        hyper_help={
            "lr": "size of an update; the first ones are larger, the very first by 1 / sqrt(1 - alpha)",
            "alpha": "decay of the mean square",
            "centered": "divide by the standard deviation instead of the root mean square; one more state",
            **implementation.HELP,
        },
        ranges={"alpha": DECAY, "momentum": DECAY, **implementation.WITHOUT_FUSED},
        rule_of_thumb_bytes=bytes_per_parameter(4),
        build=builder(
            "torch.optim",
            "RMSprop",
            named("lr", "alpha", "eps", "momentum", "centered"),
            for_all=implementation.keywords,
        ),
        state_layout=_rmsprop_layout,
    ),
    OptimizerEntry(
        name="adadelta",
        summary="Adadelta of torch: sizes its steps by past updates; two states per weight.",
        law="The mean squares of the gradients and of the updates in the weight's shape and dtype, and a 4-byte step.",
        formula="2*w*n + 4",
        source="Zeiler, arXiv 1212.5701; torch/optim/adadelta.py, torch 2.13",
        # The rate is a factor on a step that the optimizer sizes by itself, so upstream's 1 stays.
        defaults={"lr": 1.0, "rho": 0.9, "eps": 1e-6, **implementation.DEFAULT},
        hyper_help={
            "lr": "factor on a step that the optimizer sizes by itself",
            "rho": "decay of the two mean squares",
            "eps": "added to both mean squares; its root sizes the first updates",
            **implementation.HELP,
        },
        ranges={"rho": UP_TO_1, **implementation.WITHOUT_FUSED},
        rule_of_thumb_bytes=bytes_per_parameter(8),
        build=builder("torch.optim", "Adadelta", named("lr", "rho", "eps"), for_all=implementation.keywords),
        state_layout=_adadelta_layout,
    ),
)
