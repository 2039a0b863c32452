"""Schedule-free optimizers of their authors' package. Build and state law side by side; no torch at import."""

from __future__ import annotations

from typing import Any

from effcli.optim import flat
from effcli.optim.building import builder, named, with_betas
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.laws import ADAM_DEFAULTS, bytes_per_parameter, full
from effcli.optim.modes import set_to_train
from effcli.optim.ranges import AT_LEAST_0, Range
from effcli.units import ParamInfo, StateTensor

_AVERAGING = ("warmup_steps", "r", "weight_lr_power")


def _to_train(optimizer: Any, hyper: Hyper) -> None:
    """Put the optimizer in training mode; it refuses to step in the other."""
    set_to_train(optimizer)


def _adamw_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return the second iterate and the second moment in the weight's dtype.

    Source: `AdamWScheduleFree.step` in schedulefree/adamw_schedulefree.py, 1.4: a clone and `zeros_like`. The step
    count and the weight of the average are plain numbers of the parameter group, and the average takes the place of a
    first moment without being stored.
    """
    return (full("z", param), full("exp_avg_sq", param))


def _sgd_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return the second iterate in the weight's dtype.

    Source: `SGDScheduleFree.step` in schedulefree/sgd_schedulefree.py, 1.4.
    """
    return (full("z", param),)


_WEIGHING = Range(lambda x: 0 < x < 1, "above 0 and below 1, since the average is found by dividing by it")
_HELP = {
    "warmup_steps": "updates over which the rate rises linearly from 0",
    "r": "power of the update's number by which it weighs in the average",
    "weight_lr_power": "power of the learning rate by which an update weighs in the average",
}
_PAPER = "Defazio et al., arXiv 2405.15682"

# schedulefree-radam is left out: by default it does not move the weights in its first updates, and those of adamw with
# warmup_steps serve the same end.
ENTRIES = (
    OptimizerEntry(
        name="schedulefree-adamw",
        aliases=("schedule_free_adamw",),
        summary="Schedule-free AdamW: averages the weights instead of lowering the rate; evaluates and saves the mean.",
        law="A second iterate z and a second moment of the weight's shape and dtype; no first moment, no step.",
        formula="2*w*n",
        source=f"{_PAPER}; schedulefree/adamw_schedulefree.py, schedulefree 1.4",
        package="schedulefree",
        pip="schedulefree",
        # The authors advise 1 to 10 times the rate that a schedule would start from: adamw's, to begin with.
        defaults={**ADAM_DEFAULTS, "warmup_steps": 0, "r": 0.0, "weight_lr_power": 2.0},
        hyper_help={"beta1": "how near to the average gradients are taken", **_HELP},
        ranges={"beta1": _WEIGHING, "warmup_steps": AT_LEAST_0},
        schedule=lambda hyper: "constant",
        rule_of_thumb_bytes=bytes_per_parameter(8),
        build=builder("schedulefree", "AdamWScheduleFree", with_betas("eps", *_AVERAGING), finish=_to_train),
        state_layout=_adamw_layout,
        flat_fault=flat.TWO_SETS_OF_WEIGHTS,
    ),
    OptimizerEntry(
        name="schedulefree-sgd",
        aliases=("schedule_free_sgd",),
        summary="Schedule-free SGD: averages the weights instead of lowering the rate; evaluates and saves the mean.",
        law="A second iterate z of the weight's shape and dtype; no momentum buffer, no step.",
        formula="w*n",
        source=f"{_PAPER}; schedulefree/sgd_schedulefree.py, schedulefree 1.4",
        package="schedulefree",
        pip="schedulefree",
        # The authors advise 10 to 50 times the rate of SGD; upstream's 1.0 is for training from scratch.
        defaults={"lr": 1e-1, "momentum": 0.9, "warmup_steps": 0, "r": 0.0, "weight_lr_power": 2.0},
        hyper_help={"momentum": "how near to the average gradients are taken", **_HELP},
        ranges={"momentum": _WEIGHING, "warmup_steps": AT_LEAST_0},
        schedule=lambda hyper: "constant",
        rule_of_thumb_bytes=bytes_per_parameter(4),
        build=builder("schedulefree", "SGDScheduleFree", named("lr", "momentum", *_AVERAGING), finish=_to_train),
        state_layout=_sgd_layout,
        flat_fault=flat.TWO_SETS_OF_WEIGHTS,
    ),
)
