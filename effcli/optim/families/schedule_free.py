"""Schedule-free optimizers of their authors' package. Build and state law side by side; no torch at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.optim.entry import Groups, Hyper, OptimizerEntry
from effcli.optim.families.torch_adam import named, with_betas
from effcli.optim.laws import full
from effcli.units import ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch

_AVERAGING = ("warmup_steps", "r", "weight_lr_power")


def _builder(class_name: str, arguments: Callable[[Hyper], dict[str, Any]]) -> Callable[[Groups, Hyper], Any]:
    def build(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
        """Return the optimizer in training mode; it refuses to step in the other."""
        import schedulefree

        from effcli.optim.groups import upstream_groups
        from effcli.optim.modes import set_to_train

        optimizer: torch.optim.Optimizer = getattr(schedulefree, class_name)(
            upstream_groups(groups, hyper, arguments), **arguments(hyper)
        )
        set_to_train(optimizer)
        return optimizer

    return build


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


def _settle(name: str, decay: str) -> Callable[[dict[str, Any], frozenset[str]], dict[str, Any]]:
    def settle(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
        if hyper[decay] == 0:
            raise UsageError(f"{name}: {decay} must be above 0, got 0; the average is found by dividing by it")
        if hyper["warmup_steps"] < 0:
            raise UsageError(f"{name}: warmup_steps must be at least 0, got {hyper['warmup_steps']}")
        return hyper

    return settle


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
        defaults={
            "lr": 5e-5,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "warmup_steps": 0,
            "r": 0.0,
            "weight_lr_power": 2.0,
        },
        hyper_help={"beta1": "how near to the average gradients are taken", **_HELP},
        settle=_settle("schedulefree-adamw", "beta1"),
        schedule=lambda hyper: "constant",
        rule_of_thumb_bytes=lambda num_parameters, hyper: 8 * num_parameters,
        build=_builder("AdamWScheduleFree", with_betas(*_AVERAGING)),
        state_layout=_adamw_layout,
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
        settle=_settle("schedulefree-sgd", "momentum"),
        schedule=lambda hyper: "constant",
        rule_of_thumb_bytes=lambda num_parameters, hyper: 4 * num_parameters,
        build=_builder("SGDScheduleFree", named("lr", "momentum", *_AVERAGING)),
        state_layout=_sgd_layout,
    ),
)
