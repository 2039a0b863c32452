"""The families of bitsandbytes' optimizers: what the 8-bit, 32-bit and paged forms of each have in common. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from effcli.errors import UsageError
from effcli.optim.building import Arguments, named, with_betas
from effcli.optim.entry import Hyper
from effcli.optim.laws import ADAM_DEFAULTS
from effcli.optim.ranges import ABOVE_0, AT_LEAST_0, DECAY, POSITIVE_DECAY, Range

Check = Callable[[dict[str, Any], str], None]
"""Hyperparameters and the entry's name -> nothing. Raises UsageError for what upstream refuses or cannot compute."""


def _accept(hyper: Hyper, name: str) -> None:
    return


def _need_momentum(hyper: Hyper, name: str) -> None:
    if hyper["momentum"] == 0:
        raise UsageError(f"{name} needs momentum above 0, bitsandbytes has no form without it; use --optim sgd")


def _need_logarithms(hyper: Hyper, name: str) -> None:
    """Refuse a schedule of beta3 that divides by zero: it runs from beta1 to beta3 along their logarithms."""
    if hyper["t_beta3"] is not None and not 0 < hyper["beta1"] <= hyper["beta3"]:
        raise UsageError(
            f"{name} with t_beta3 needs 0 < beta1 <= beta3, got beta1 {hyper['beta1']} and beta3 {hyper['beta3']}; "
            "change them or drop t_beta3"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the forms of one optimizer have in common."""

    name: str
    class_name: str
    """Class of `bitsandbytes.optim` that obeys `optim_bits`; `Paged` before it names the paged one."""
    paper: str
    keeps: str
    states: tuple[int, ...]
    """Elements of `state1` and `state2` per element of the parameter."""
    says: str = ""
    defaults: Mapping[str, Any]
    hyper_help: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    arguments: Arguments
    check: Check = _accept
    has_paged: bool = False
    runs_8bit_on: tuple[str, ...] = ("cpu", "cuda")
    trainer_names: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Bits -> further names that transformers' Trainer has for the unpaged form."""


_TWO_MOMENTS = "two moments"
_NORM_HELP = (
    "largest norm of an update relative to the weight's, where the state is in 32 bit: a tensor of zeros then stays "
    "zero; 0: no limit"
)
_DECAYED_GRADIENT = "decay is added to the gradient"

# Which decay is decoupled was found by experiment, and is the same in the CUDA kernels. Despite its name Adam decouples
# it: Adam and AdamW call one kernel, "adam", which shrinks the weight by 1 - lr * weight_decay
# (bitsandbytes/backends/cpu/ops.py, 0.50.2). Arguments that no kernel reads are not offered: dampening and nesterov of
# SGD and LARS, momentum of RMSprop, bias_correction and adam_w_mode of LAMB.
#
# The 8-bit kernels of LAMB and LARS leave out the limit on an update's norm, and CUDA has none under their names
# (`str2optimizer8bit_blockwise` in bitsandbytes/backends/cuda/ops.py, 0.50.2): there the step raises.
# The 32-bit CUDA kernels of SGD, RMSprop, Adagrad and LARS, which small tensors take in 8-bit optimizers too, have no
# form for bf16 gradients (`str2optimizer32bit`, same file): the trial step finds that out where weights are bf16.
FAMILIES = (
    Family(
        name="adam",
        class_name="Adam",
        paper="Kingma & Ba, arXiv 1412.6980",
        keeps=_TWO_MOMENTS,
        states=(1, 1),
        says="decay acts on the weight, the same update as AdamW",
        defaults=ADAM_DEFAULTS,
        arguments=with_betas("eps"),
        has_paged=True,
    ),
    Family(
        name="adamw",
        class_name="AdamW",
        paper="Loshchilov & Hutter, arXiv 1711.05101",
        keeps=_TWO_MOMENTS,
        states=(1, 1),
        defaults=ADAM_DEFAULTS,
        arguments=with_betas("eps"),
        has_paged=True,
    ),
    Family(
        name="lion",
        class_name="Lion",
        paper="Chen et al., arXiv 2302.06675",
        keeps="one moment",
        states=(1,),
        says="every weight moves by the learning rate",
        # Lion's paper advises a rate 3 to 10 times smaller than AdamW's: a fifth of 5e-5.
        defaults={"lr": 1e-5, "beta1": 0.9, "beta2": 0.99},
        arguments=with_betas(),
        has_paged=True,
    ),
    Family(
        name="ademamix",
        class_name="AdEMAMix",
        paper="Pagliardini et al., arXiv 2409.03137",
        keeps="a fast and a slow first moment (one tensor) and a second moment",
        states=(2, 1),
        defaults={**ADAM_DEFAULTS, "beta3": 0.9999, "alpha": 5.0, "t_alpha": None, "t_beta3": None},
        hyper_help={
            "beta3": "decay of the slow first moment",
            "alpha": "weight of the slow first moment",
            "t_alpha": "updates over which alpha grows from 0; none: at once",
            "t_beta3": "updates over which beta3 grows from beta1; none: at once",
        },
        ranges={"beta3": DECAY, "alpha": AT_LEAST_0, "t_alpha": ABOVE_0, "t_beta3": ABOVE_0},
        arguments=with_betas("eps", "alpha", "t_alpha", "t_beta3", count=3),
        check=_need_logarithms,
        has_paged=True,
        trainer_names={32: ("ademamix",)},
    ),
    Family(
        name="sgd",
        class_name="SGD",
        paper="Sutskever et al., ICML 2013",
        keeps="one momentum buffer",
        states=(1,),
        says=_DECAYED_GRADIENT,
        # Upstream has no default rate, and refuses its own default momentum of 0; these are those of sgd-momentum.
        defaults={"lr": 1e-2, "momentum": 0.9},
        ranges={"momentum": DECAY},
        arguments=named("lr", "momentum"),
        check=_need_momentum,
    ),
    Family(
        name="rmsprop",
        class_name="RMSprop",
        paper="Tieleman & Hinton, 2012",
        keeps="one running mean of squared gradients",
        states=(1,),
        says=_DECAYED_GRADIENT,
        # Once its mean has settled an update is as large as Adam's, hence Adam's rate instead of upstream's 1e-2.
        defaults={"lr": 5e-5, "alpha": 0.99, "eps": 1e-8},
        hyper_help={"alpha": "decay of the mean of squared gradients"},
        ranges={"alpha": POSITIVE_DECAY},
        arguments=named("lr", "alpha", "eps"),
        trainer_names={32: ("rmsprop_bnb",)},
    ),
    Family(
        name="adagrad",
        class_name="Adagrad",
        paper="Duchi et al., JMLR 12, 2011",
        keeps="one sum of squared gradients",
        states=(1,),
        says=_DECAYED_GRADIENT,
        # The first update is about lr, the t-th lr / sqrt(t): over some hundred updates as much as Adam's 5e-5.
        defaults={"lr": 5e-4, "eps": 1e-10},
        hyper_help={"lr": "size of the first update; the t-th is about lr / sqrt(t)"},
        arguments=named("lr", "eps"),
    ),
    Family(
        name="lamb",
        class_name="LAMB",
        paper="You et al., arXiv 1904.00962",
        keeps=_TWO_MOMENTS,
        states=(1, 1),
        says="Adam with a limit on an update's norm, which 8-bit states do without",
        defaults={**ADAM_DEFAULTS, "max_unorm": 1.0},
        hyper_help={"max_unorm": _NORM_HELP},
        ranges={"max_unorm": AT_LEAST_0},
        arguments=with_betas("eps", "max_unorm"),
        runs_8bit_on=("cpu",),
    ),
    Family(
        name="lars",
        class_name="LARS",
        paper="You et al., arXiv 1708.03888",
        keeps="one momentum buffer",
        states=(1,),
        says="SGD with a limit on an update's norm, which 8-bit states do without",
        # Rate and momentum as for SGD, which it is up to the limit.
        defaults={"lr": 1e-2, "momentum": 0.9, "max_unorm": 0.02},
        hyper_help={"max_unorm": _NORM_HELP},
        ranges={"momentum": DECAY, "max_unorm": AT_LEAST_0},
        arguments=named("lr", "momentum", "max_unorm"),
        check=_need_momentum,
        runs_8bit_on=("cpu",),
    ),
)
