"""torch's Adam and its kin. Build and state law side by side; no torch at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from effcli.optim.entry import Groups, Hyper, OptimizerEntry
from effcli.optim.laws import TORCH_STEP, full
from effcli.units import ParamInfo, Placement, StateTensor

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


def named(*names: str) -> Callable[[Hyper], dict[str, Any]]:
    """Return the function that takes the hyperparameters `names` as they are for upstream's keyword arguments."""
    return lambda hyper: {name: hyper[name] for name in names}


def with_betas(*names: str) -> Callable[[Hyper], dict[str, Any]]:
    """Return the function that takes `lr`, the pair of betas, `eps` and the further hyperparameters `names`."""
    return lambda hyper: {
        "lr": hyper["lr"],
        "betas": (hyper["beta1"], hyper["beta2"]),
        "eps": hyper["eps"],
        **named(*names)(hyper),
    }


def _adam_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step` and two moments (three with amsgrad) in the parameter's own dtype.

    Source: `Adam._init_group` in torch/optim/adam.py, 2.13: `zeros_like(p)`, so bf16 weights get bf16 moments.
    """
    keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")
    return (TORCH_STEP, *(full(key, param) for key in keys))


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


_BETAS = {"lr": 5e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
"""Upstream's, but the rate at which transformers' Trainer fine-tunes, where theirs are for training from scratch."""
_AMSGRAD_HELP = {"amsgrad": "keep the maximum of the second moment, a third state of the weight's size"}
_DECOUPLED_HELP = {"decoupled_weight_decay": "shrink the weight itself, as AdamW does, not through the gradient"}


def _adam_entry(name: str, summary: str, *, amsgrad: bool) -> OptimizerEntry:
    return OptimizerEntry(
        name=name,
        aliases=("amsgrad",) if amsgrad else (),
        summary=summary,
        law="Two moments of the weight's shape and dtype (three with amsgrad), and a 4-byte step.",
        formula="(3 if amsgrad else 2)*w*n + 4",
        source=f"{'Reddi et al., ICLR 2018' if amsgrad else 'Kingma & Ba, arXiv 1412.6980'}; "
        "torch/optim/adam.py, torch 2.13",
        defaults={**_BETAS, "amsgrad": amsgrad},
        hyper_help=_AMSGRAD_HELP,
        rule_of_thumb_bytes=lambda num_parameters, hyper: (12 if amsgrad else 8) * num_parameters,
        build=torch_builder("Adam", with_betas("amsgrad")),
        state_layout=_adam_layout,
    )


ENTRIES = (
    OptimizerEntry(
        name="adamw",
        aliases=("adamw_torch", "adamw_torch_fused"),
        summary="AdamW of torch: two moments per weight in the weight's dtype.",
        law="Two moments of the weight's shape and dtype (three with amsgrad), and a 4-byte step.",
        formula="(3 if amsgrad else 2)*w*n + 4",
        source="Loshchilov & Hutter, arXiv 1711.05101; torch/optim/adam.py, torch 2.13",
        defaults={**_BETAS, "amsgrad": False},
        hyper_help=_AMSGRAD_HELP,
        rule_of_thumb_bytes=lambda num_parameters, hyper: 8 * num_parameters,
        build=torch_builder("AdamW", with_betas("amsgrad")),
        state_layout=_adam_layout,
    ),
    _adam_entry("adam", "Adam of torch; weight decay is added to the gradient, unlike AdamW's.", amsgrad=False),
    _adam_entry("adam-amsgrad", "Adam of torch that never lets its second moment shrink: three moments.", amsgrad=True),
    OptimizerEntry(
        name="nadam",
        summary="Adam of torch with Nesterov's momentum: two moments per weight.",
        law="Two moments of the weight's shape and dtype, a 4-byte step and a 4-byte product of past momenta.",
        formula="2*w*n + 8",
        source="Dozat, ICLR workshop 2016; torch/optim/nadam.py, torch 2.13",
        defaults={**_BETAS, "momentum_decay": 4e-3, "decoupled_weight_decay": False},
        hyper_help={"momentum_decay": "how fast the momentum reaches beta1", **_DECOUPLED_HELP},
        rule_of_thumb_bytes=lambda num_parameters, hyper: 8 * num_parameters,
        build=torch_builder("NAdam", with_betas("momentum_decay", "decoupled_weight_decay")),
        state_layout=_nadam_layout,
    ),
    OptimizerEntry(
        name="radam",
        summary="Adam of torch that warms up by itself: two moments per weight.",
        law="Two moments of the weight's shape and dtype, and a 4-byte step.",
        formula="2*w*n + 4",
        source="Liu et al., arXiv 1908.03265; torch/optim/radam.py, torch 2.13",
        defaults={**_BETAS, "decoupled_weight_decay": False},
        hyper_help=_DECOUPLED_HELP,
        rule_of_thumb_bytes=lambda num_parameters, hyper: 8 * num_parameters,
        build=torch_builder("RAdam", with_betas("decoupled_weight_decay")),
        state_layout=_radam_layout,
    ),
    OptimizerEntry(
        name="adamax",
        summary="Adam of torch scaled by the largest gradient instead of the mean square: two states per weight.",
        law="A first moment and a running maximum of the weight's shape and dtype, and a 4-byte step.",
        formula="2*w*n + 4",
        source="Kingma & Ba, arXiv 1412.6980, section 7.1; torch/optim/adamax.py, torch 2.13",
        defaults=_BETAS,
        rule_of_thumb_bytes=lambda num_parameters, hyper: 8 * num_parameters,
        build=torch_builder("Adamax", with_betas()),
        state_layout=_adamax_layout,
    ),
)
