"""Optimizers of the package pytorch_optimizer. Build and state law side by side; no torch at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from effcli.optim import flat
from effcli.optim.building import Arguments, builder, with_betas
from effcli.optim.entry import Fault, Hyper, OptimizerEntry, never_on_shards, runs_on_shards
from effcli.optim.laws import ADAM_DEFAULTS, bytes_per_parameter, full, num_columns, num_rows, sized, width
from effcli.optim.ranges import ABOVE_0, AT_LEAST_0, DECAY, Range
from effcli.units import ParamInfo, StateTensor

Layout = Callable[[ParamInfo, Hyper], tuple[StateTensor, ...]]


def _came_arguments(hyper: Hyper) -> dict[str, Any]:
    return {"eps1": hyper["eps"], **with_betas("eps2", "clip_threshold", count=3)(hyper)}


def _full_states(*keys: str) -> Layout:
    """Return the law of an optimizer that keeps tensors of the weight's shape and dtype, and `step` in the group.

    Source: `init_group` of each class in pytorch_optimizer/optimizer/, 4.1: clones and `zeros_like` of the weight or
    its gradient.
    """
    return lambda param, hyper: tuple(full(key, param) for key in keys)


def _stable_adamw_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return two moments, and for half-precision weights what Kahan summation carries over to the next update.

    Source: `StableAdamW.init_group` in pytorch_optimizer/optimizer/adamw.py, 4.1: the second moment is float32 for
    fp16 weights, to keep squared gradients from vanishing.
    """
    half = param.dtype in ("bfloat16", "float16")
    second = full("exp_avg_sq", param, dtype_bytes=4 if param.dtype == "float16" else None)
    carried = (full("kahan_comp", param),) if half and hyper["kahan_sum"] else ()
    return (full("exp_avg", param), second, *carried)


def _came_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return a full first moment, row and column factors of squared gradients and of squared residuals, and the RMS.

    Source: `CAME.init_group` and `CAME.step` in pytorch_optimizer/optimizer/came.py, 4.1: all in the dtype of the
    weight; with fewer than two dimensions a full second moment and no residuals; `RMS` is a 0-dim tensor.
    """
    size = width(param)
    first, rms = full("exp_avg", param), sized("RMS", 1, size)
    if len(param.shape) < 2:
        return (first, full("exp_avg_sq", param), rms)
    factors = (
        sized(f"{key}_{side}", count(param), size)
        for key in ("exp_avg_sq", "exp_avg_res")
        for side, count in (("row", num_rows), ("col", num_columns))
    )
    return (first, *factors, rms)


def _entry(
    name: str,
    class_name: str,
    *,
    file: str,
    paper: str,
    summary: str,
    law: str,
    formula: str,
    defaults: Mapping[str, Any],
    arguments: Arguments,
    layout: Layout,
    aliases: tuple[str, ...] = (),
    hyper_help: Mapping[str, str] | None = None,
    ranges: Mapping[str, Range] | None = None,
    not_overridable: frozenset[str] = frozenset(),
    states: int | None = None,
    shard_fault: Fault = runs_on_shards,
    flat_fault: Fault = runs_on_shards,
) -> OptimizerEntry:
    """Return an entry; `states` of the weight's size give the rule of thumb for float32 weights."""
    return OptimizerEntry(
        name=name,
        aliases=aliases,
        summary=summary,
        law=law,
        formula=formula,
        source=f"{paper}; pytorch_optimizer/optimizer/{file}, pytorch_optimizer 4.1",
        package="pytorch_optimizer",
        pip="pytorch-optimizer",
        defaults=defaults,
        hyper_help=hyper_help or {},
        ranges=ranges or {},
        not_overridable=not_overridable,
        rule_of_thumb_bytes=None if states is None else bytes_per_parameter(4 * states),
        build=builder("pytorch_optimizer", class_name, arguments),
        state_layout=layout,
        shard_fault=shard_fault,
        flat_fault=flat_fault,
    )


ENTRIES = (
    _entry(
        "lion",
        "Lion",
        file="lion.py",
        paper="Chen et al., arXiv 2302.06675",
        summary="Lion: the sign of one interpolated momentum; half the state of AdamW.",
        law="One momentum of the weight's shape and dtype; no step.",
        formula="w*n",
        # Every element moves by lr: the authors advise a third to a tenth of AdamW's rate.
        defaults={"lr": 1e-5, "beta1": 0.9, "beta2": 0.99},
        arguments=with_betas(),
        layout=_full_states("exp_avg"),
        states=1,
    ),
    _entry(
        "stable-adamw",
        "StableAdamW",
        aliases=("stable_adamw",),
        file="adamw.py",
        paper="Wortsman et al., arXiv 2304.13013",
        summary="AdamW that lowers the rate of a tensor whose gradient outgrows its second moment.",
        law="Two moments of the weight's shape and dtype (the second in float32 for fp16 weights), and for bf16 and "
        "fp16 weights, unless kahan_sum=false, the rounding that the next update makes up for; no step.",
        formula="2*w*n if w == 4 or not kahan_sum else 3*w*n",
        defaults={**ADAM_DEFAULTS, "beta2": 0.99, "kahan_sum": True},
        hyper_help={"kahan_sum": "for bf16 weights, carry over what an update lost to rounding: a third state"},
        arguments=with_betas("eps", "kahan_sum"),
        layout=_stable_adamw_layout,
        states=2,
        shard_fault=never_on_shards(
            "its step takes a root of a tensor's mean in place, which torch 2.13 cannot do on shards"
        ),
        flat_fault=flat.BY_NORMS,
    ),
    _entry(
        "came",
        "CAME",
        file="came.py",
        paper="Luo et al., arXiv 2307.02047",
        summary="CAME: Adafactor's factors with a first moment, weighed by how steady an update is.",
        law="A first moment of the weight's shape, with two dimensions or more two factors per row and two per column, "
        "with fewer a full second moment, and the RMS; all in the weight's dtype; no step.",
        formula="w*(n + (2*(rows + columns) if dims >= 2 else n) + 1)",
        defaults={
            **ADAM_DEFAULTS,
            "beta3": 0.9999,
            "eps": 1e-30,
            "eps2": 1e-16,
            "clip_threshold": 1.0,
        },
        hyper_help={
            "beta3": "decay of the squared residuals",
            "eps": "added to the squared gradient",
            "eps2": "added to the squared residual",
            "clip_threshold": "largest RMS of an update before the learning rate",
        },
        ranges={"beta3": DECAY, "eps2": AT_LEAST_0, "clip_threshold": ABOVE_0},
        not_overridable=frozenset({"eps"}),  # upstream keeps the constructor's
        arguments=_came_arguments,
        layout=_came_layout,
        shard_fault=never_on_shards("its step computes norms in place, which torch 2.13 cannot do on shards"),
        flat_fault=flat.FACTORED,
    ),
    _entry(
        "adan",
        "Adan",
        file="adan.py",
        paper="Xie et al., arXiv 2208.06677",
        summary="Adan: Adam with a momentum of gradient differences; twice the state of AdamW.",
        law="Two first moments, a second moment and the last gradient, of the weight's shape and dtype; no step.",
        formula="4*w*n",
        # The authors advise 5 to 10 times the rate of AdamW.
        defaults={"lr": 2.5e-4, "beta1": 0.98, "beta2": 0.92, "beta3": 0.99, "eps": 1e-8},
        hyper_help={
            "beta1": "of the gradient",
            "beta2": "of gradient differences",
            "beta3": "of the squared, corrected gradient",
        },
        ranges={"beta3": DECAY},
        arguments=with_betas("eps", count=3),
        layout=_full_states("exp_avg", "exp_avg_sq", "exp_avg_diff", "previous_grad"),
        states=4,
        shard_fault=never_on_shards("its step copies many tensors at once, which torch 2.13 cannot do on shards"),
    ),
    _entry(
        "adabelief",
        "AdaBelief",
        file="adabelief.py",
        paper="Zhuang et al., arXiv 2010.07468",
        summary="AdaBelief: Adam that divides by how far a gradient is from its expectation; decoupled decay.",
        law="A first moment and a variance of the weight's shape and dtype; no step.",
        formula="2*w*n",
        defaults={**ADAM_DEFAULTS, "eps": 1e-16},
        arguments=with_betas("eps"),
        layout=_full_states("exp_avg", "exp_avg_var"),
        states=2,
    ),
    _entry(
        "prodigy",
        "Prodigy",
        file="prodigy.py",
        paper="Mishchenko & Defazio, arXiv 2306.06101",
        summary="Prodigy: Adam that finds its own learning rate; lr is a factor on it.",
        law="Two moments, the sum of gradients and a copy of the first weights, of the weight's shape and dtype; "
        "no step.",
        formula="4*w*n",
        defaults={
            **ADAM_DEFAULTS,
            "lr": 1.0,
            "d0": 1e-6,
            "d_coef": 1.0,
            "bias_correction": False,
            "safeguard_warmup": False,
        },
        hyper_help={
            "lr": "factor on the rate that it finds; a schedule scales it",
            "d0": "rate that it starts from",
            "d_coef": "factor on its estimate of the rate: below 1 for smaller steps",
            "safeguard_warmup": "keep a warm-up of lr out of the estimate",
        },
        ranges={"d0": ABOVE_0, "d_coef": ABOVE_0},
        not_overridable=frozenset({"lr", "beta1", "beta2"}),  # upstream reads those of the first group for all
        arguments=with_betas("eps", "d0", "d_coef", "bias_correction", "safeguard_warmup"),
        layout=_full_states("s", "p0", "exp_avg", "exp_avg_sq"),
        states=4,
        shard_fault=never_on_shards("its step flattens every weight, which torch 2.13 cannot do on uneven shards"),
        flat_fault=flat.ONE_RATE_FOR_ALL,
    ),
)
