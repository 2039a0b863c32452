"""torch's Adam and its kin. Build and state law side by side; no torch at import."""

from __future__ import annotations

from effcli.optim import implementation
from effcli.optim.building import builder, with_betas
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.laws import ADAM_DEFAULTS, TORCH_STEP, bytes_per_parameter, full, torch_step
from effcli.optim.ranges import AT_LEAST_0
from effcli.units import ParamInfo, Placement, StateTensor


def _adam_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and two moments (three with amsgrad) in the parameter's own dtype.

    Source: `Adam._init_group` in torch/optim/adam.py, 2.13: `zeros_like(p)`, so bf16 weights get bf16 moments.
    """
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")
    return (torch_step(hyper), *(full(key, param) for key in keys))


def _nadam_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step`, the product of the momentum schedule and two moments.

    Source: `NAdam._init_group` in torch/optim/nadam.py, 2.13: `mu_product` is a 0-dim float32 beside `step` on the
    host.
    """
    product = StateTensor(key="mu_product", num_elements=1, num_bytes=4, placement=Placement.HOST)
    return (TORCH_STEP, product, full("exp_avg", param), full("exp_avg_sq", param))


def _radam_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and two moments in the parameter's own dtype.

    Source: `RAdam._init_group` in torch/optim/radam.py, 2.13.
    """
    return (TORCH_STEP, full("exp_avg", param), full("exp_avg_sq", param))


def _adamax_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step`, a first moment and a running maximum in the parameter's own dtype.

    Source: `Adamax._init_group` in torch/optim/adamax.py, 2.13.
    """
    return (TORCH_STEP, full("exp_avg", param), full("exp_inf", param))


_AMSGRAD_HELP = {"amsgrad": "keep the maximum of the second moment, a third state of the weight's size"}
_DECOUPLED_HELP = {"decoupled_weight_decay": "shrink the weight itself, as AdamW does, not through the gradient"}


def _adam_entry(
    name: str,
    summary: str,
    paper: str,
    *,
    class_name: str = "Adam",
    amsgrad: bool = False,
    aliases: tuple[str, ...] = (),
) -> OptimizerEntry:
    return OptimizerEntry(
        name=name,
        aliases=aliases,
        summary=summary,
        law="Two moments of the weight's shape and dtype (three with amsgrad), and a 4-byte step.",
        formula="(3 if amsgrad else 2)*w*n + 4",
        source=f"{paper}; torch/optim/adam.py, torch 2.13",
        defaults={**ADAM_DEFAULTS, "amsgrad": amsgrad, **implementation.DEFAULT},
        hyper_help={**_AMSGRAD_HELP, **implementation.HELP},
        ranges=implementation.WITH_FUSED,
        rule_of_thumb_bytes=lambda num_parameters, hyper: (12 if hyper["amsgrad"] else 8) * num_parameters,
        build=builder("torch.optim", class_name, with_betas("eps", "amsgrad"), for_all=implementation.keywords),
        state_layout=_adam_layout,
    )


ENTRIES = (
    _adam_entry(
        "adamw",
        "AdamW of torch: two moments per weight in the weight's dtype.",
        "Loshchilov & Hutter, arXiv 1711.05101",
        class_name="AdamW",
        aliases=("adamw_torch", "adamw_torch_fused"),
    ),
    _adam_entry(
        "adam",
        "Adam of torch; weight decay is added to the gradient, unlike AdamW's.",
        "Kingma & Ba, arXiv 1412.6980",
    ),
    _adam_entry(
        "adam-amsgrad",
        "Adam of torch that never lets its second moment shrink: three moments.",
        "Reddi et al., ICLR 2018",
        amsgrad=True,
        aliases=("amsgrad",),
    ),
    OptimizerEntry(
        name="nadam",
        summary="Adam of torch with Nesterov's momentum: two moments per weight.",
        law="Two moments of the weight's shape and dtype, a 4-byte step and a 4-byte product of past momenta.",
        formula="2*w*n + 8",
        source="Dozat, ICLR workshop 2016; torch/optim/nadam.py, torch 2.13",
        defaults={**ADAM_DEFAULTS, "momentum_decay": 4e-3, "decoupled_weight_decay": False, **implementation.DEFAULT},
        hyper_help={
            "momentum_decay": "how fast the momentum reaches beta1",
            **_DECOUPLED_HELP,
            **implementation.HELP,
        },
        ranges={"momentum_decay": AT_LEAST_0, **implementation.WITHOUT_FUSED},
        rule_of_thumb_bytes=bytes_per_parameter(8),
        build=builder(
            "torch.optim",
            "NAdam",
            with_betas("eps", "momentum_decay", "decoupled_weight_decay"),
            for_all=implementation.keywords,
        ),
        state_layout=_nadam_layout,
    ),
    OptimizerEntry(
        name="radam",
        summary="Adam of torch that warms up by itself: two moments per weight.",
        law="Two moments of the weight's shape and dtype, and a 4-byte step.",
        formula="2*w*n + 4",
        source="Liu et al., arXiv 1908.03265; torch/optim/radam.py, torch 2.13",
        defaults={**ADAM_DEFAULTS, "decoupled_weight_decay": False, **implementation.DEFAULT},
        hyper_help={**_DECOUPLED_HELP, **implementation.HELP},
        ranges=implementation.WITHOUT_FUSED,
        rule_of_thumb_bytes=bytes_per_parameter(8),
        build=builder(
            "torch.optim", "RAdam", with_betas("eps", "decoupled_weight_decay"), for_all=implementation.keywords
        ),
        state_layout=_radam_layout,
    ),
    OptimizerEntry(
        name="adamax",
        summary="Adam of torch scaled by the largest gradient instead of the mean square: two states per weight.",
        law="A first moment and a running maximum of the weight's shape and dtype, and a 4-byte step.",
        formula="2*w*n + 4",
        source="Kingma & Ba, arXiv 1412.6980, section 7.1; torch/optim/adamax.py, torch 2.13",
        defaults={**ADAM_DEFAULTS, **implementation.DEFAULT},
        hyper_help=implementation.HELP,
        ranges=implementation.WITHOUT_FUSED,
        rule_of_thumb_bytes=bytes_per_parameter(8),
        build=builder("torch.optim", "Adamax", with_betas("eps"), for_all=implementation.keywords),
        state_layout=_adamax_layout,
    ),
)
