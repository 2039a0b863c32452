"""torch's own optimizers: AdamW, Adafactor, SGD. Build and state law side by side; no torch at import."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.optim.entry import Groups, Hyper, OptimizerEntry
from effcli.units import DTYPE_BYTES, ParamInfo, Placement, Role, StateTensor

if TYPE_CHECKING:
    import torch

_STEP = StateTensor(key="step", num_elements=1, num_bytes=4, role=Role.STEP, placement=Placement.HOST)
"""torch keeps `step` as a 0-dim float32 on the host unless fused or capturable (torch/optim/adam.py, 2.13)."""


def _build_adamw(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
    import torch

    from effcli.optim.groups import unique_groups

    return torch.optim.AdamW(
        unique_groups(groups),
        lr=hyper["lr"],
        betas=(hyper["beta1"], hyper["beta2"]),
        eps=hyper["eps"],
        amsgrad=hyper["amsgrad"],
    )


def _adamw_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and two moments (three with amsgrad) in the parameter's own dtype.

    Source: `Adam._init_group` in torch/optim/adam.py, 2.13: `zeros_like(p)`, so bf16 weights get bf16 moments.
    """
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")
    return (_STEP, *(StateTensor(key=key, num_elements=param.num_elements, num_bytes=param.num_bytes) for key in keys))


def _build_adafactor(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
    import torch

    from effcli.optim.groups import unique_groups

    return torch.optim.Adafactor(
        unique_groups(groups),
        lr=hyper["lr"],
        beta2_decay=hyper["beta2_decay"],
        eps=(hyper["eps"], hyper["eps2"]),
        d=hyper["d"],
    )


def _adafactor_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and the factors of the last two dimensions; a full variance with fewer than two dimensions.

    Source: `Adafactor._init_group` in torch/optim/_adafactor.py, 2.13: shapes `[..., n, 1]` and `[..., 1, m]`, in the
    dtype of the gradient, which is that of the parameter.
    """
    width = DTYPE_BYTES[param.dtype]
    if len(param.shape) < 2:
        return (_STEP, StateTensor(key="variance", num_elements=param.num_elements, num_bytes=param.num_bytes))
    rows, columns = math.prod(param.shape[:-1]), math.prod(param.shape[:-2]) * param.shape[-1]
    return (
        _STEP,
        StateTensor(key="row_var", num_elements=rows, num_bytes=rows * width),
        StateTensor(key="col_var", num_elements=columns, num_bytes=columns * width),
    )


def _build_sgd(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
    import torch

    from effcli.optim.groups import unique_groups

    return torch.optim.SGD(
        unique_groups(groups),
        lr=hyper["lr"],
        momentum=hyper["momentum"],
        dampening=hyper["dampening"],
        nesterov=hyper["nesterov"],
    )


def _sgd_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return one buffer in the dtype of the gradient, or nothing without momentum.

    Source: `_single_tensor_sgd` in torch/optim/sgd.py, 2.13: the buffer is a clone of the first gradient; no `step`.
    """
    if hyper["momentum"] == 0:
        return ()
    return (StateTensor(key="momentum_buffer", num_elements=param.num_elements, num_bytes=param.num_bytes),)


def _settle_sgd(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    if hyper["nesterov"] and (hyper["momentum"] == 0 or hyper["dampening"] != 0):
        raise UsageError(
            f"sgd with nesterov needs momentum above 0 and dampening 0, got momentum {hyper['momentum']} and "
            f"dampening {hyper['dampening']}; change them or drop nesterov"
        )
    return hyper


ENTRIES = (
    OptimizerEntry(
        name="adamw",
        aliases=("adamw_torch", "adamw_torch_fused"),
        summary="AdamW of torch: two moments per weight in the weight's dtype.",
        source="Loshchilov & Hutter, arXiv 1711.05101; torch/optim/adam.py, torch 2.13",
        defaults={"lr": 5e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False},
        hyper_help={"amsgrad": "keep the maximum of the second moment, a third state of the weight's size"},
        rule_of_thumb_bytes=lambda num_parameters: 8 * num_parameters,
        build=_build_adamw,
        state_layout=_adamw_layout,
    ),
    OptimizerEntry(
        name="adafactor-torch",
        aliases=("adafactor_torch",),
        summary="Adafactor of torch: row and column factors in the weight's dtype; steps relative to the weight.",
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
        build=_build_adafactor,
        state_layout=_adafactor_layout,
    ),
    OptimizerEntry(
        name="sgd",
        summary="SGD of torch with momentum: one buffer per weight in the weight's dtype, none with momentum=0.",
        source="Sutskever et al., ICML 2013; torch/optim/sgd.py, torch 2.13",
        defaults={"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "nesterov": False},
        settle=_settle_sgd,
        build=_build_sgd,
        state_layout=_sgd_layout,
    ),
)
