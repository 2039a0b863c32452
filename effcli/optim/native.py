"""torch's own optimizers. Build and state law side by side; no torch at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.optim.entry import Groups, Hyper, OptimizerEntry
from effcli.optim.laws import TORCH_STEP, full, num_columns, num_rows, sized, width
from effcli.units import ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch


def torch_builder(
    class_name: str, arguments: Callable[[Hyper], Mapping[str, Any]]
) -> Callable[[Groups, Hyper], torch.optim.Optimizer]:
    """Return the `build` of a class of `torch.optim`; `arguments` are its keyword arguments."""

    def build(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
        import torch

        from effcli.optim.groups import upstream_groups

        optimizer: torch.optim.Optimizer = getattr(torch.optim, class_name)(
            upstream_groups(groups, hyper, arguments), **arguments(hyper)
        )
        return optimizer

    return build


def _adamw_arguments(hyper: Hyper) -> dict[str, Any]:
    return {
        "lr": hyper["lr"],
        "betas": (hyper["beta1"], hyper["beta2"]),
        "eps": hyper["eps"],
        "amsgrad": hyper["amsgrad"],
    }


def _adamw_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and two moments (three with amsgrad) in the parameter's own dtype.

    Source: `Adam._init_group` in torch/optim/adam.py, 2.13: `zeros_like(p)`, so bf16 weights get bf16 moments.
    """
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")
    return (TORCH_STEP, *(full(key, param) for key in keys))


def _adafactor_arguments(hyper: Hyper) -> dict[str, Any]:
    return {
        "lr": hyper["lr"],
        "beta2_decay": hyper["beta2_decay"],
        "eps": (hyper["eps"], hyper["eps2"]),
        "d": hyper["d"],
    }


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


def _sgd_arguments(hyper: Hyper) -> dict[str, Any]:
    return {key: hyper[key] for key in ("lr", "momentum", "dampening", "nesterov")}


def _sgd_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return one buffer in the dtype of the gradient, or nothing without momentum.

    Source: `_single_tensor_sgd` in torch/optim/sgd.py, 2.13: the buffer is a clone of the first gradient; no `step`.
    """
    return () if hyper["momentum"] == 0 else (full("momentum_buffer", param),)


def _settle_sgd(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    if hyper["nesterov"] and (hyper["momentum"] == 0 or hyper["dampening"] != 0):
        raise UsageError(
            f"sgd with nesterov needs momentum above 0 and dampening 0, got momentum {hyper['momentum']} and "
            f"dampening {hyper['dampening']}; change them or drop nesterov"
        )
    return hyper


def _sgd_entry(name: str, summary: str, momentum: float) -> OptimizerEntry:
    return OptimizerEntry(
        name=name,
        summary=summary,
        law="With momentum one buffer of the weight's shape and dtype, without momentum nothing; no step.",
        formula="w*n if momentum else 0",
        source="Sutskever et al., ICML 2013; torch/optim/sgd.py, torch 2.13",
        defaults={"lr": 1e-2, "momentum": momentum, "dampening": 0.0, "nesterov": False},
        settle=_settle_sgd,
        rule_of_thumb_bytes=lambda num_parameters: 4 * num_parameters if momentum else 0,
        build=torch_builder("SGD", _sgd_arguments),
        state_layout=_sgd_layout,
    )


ENTRIES = (
    OptimizerEntry(
        name="adamw",
        aliases=("adamw_torch", "adamw_torch_fused"),
        summary="AdamW of torch: two moments per weight in the weight's dtype.",
        law="Two moments of the weight's shape and dtype (three with amsgrad), and a 4-byte step.",
        formula="(3 if amsgrad else 2)*w*n + 4",
        source="Loshchilov & Hutter, arXiv 1711.05101; torch/optim/adam.py, torch 2.13",
        defaults={"lr": 5e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False},
        hyper_help={"amsgrad": "keep the maximum of the second moment, a third state of the weight's size"},
        rule_of_thumb_bytes=lambda num_parameters: 8 * num_parameters,
        build=torch_builder("AdamW", _adamw_arguments),
        state_layout=_adamw_layout,
    ),
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
        defaults={"lr": 1e-3, "beta2_decay": -0.8, "eps": None, "eps2": 1e-3, "d": 1.0},
        hyper_help={
            "lr": "largest step relative to the weight's RMS, capped by 1/sqrt(step)",
            "eps": "term in the denominator; none means the machine epsilon of the weight's dtype",
            "eps2": "smallest RMS by which the step is scaled",
            "d": "update clipping threshold",
        },
        build=torch_builder("Adafactor", _adafactor_arguments),
        state_layout=_adafactor_layout,
    ),
    _sgd_entry("sgd", "SGD of torch, without momentum and without any state.", 0.0),
    _sgd_entry("sgd-momentum", "SGD of torch with momentum: one buffer per weight in the weight's dtype.", 0.9),
)
