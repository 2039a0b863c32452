"""torch's optimizers that step along the gradient or its sign. Build and state law side by side; no torch at import."""

from __future__ import annotations

from typing import Any

from effcli.errors import UsageError
from effcli.optim import implementation
from effcli.optim.building import builder, named
from effcli.optim.entry import Hyper, OptimizerEntry, Schedule, never_on_shards
from effcli.optim.laws import TORCH_STEP, bytes_per_parameter, full
from effcli.optim.ranges import ABOVE_0, AT_LEAST_0, DECAY, POSITIVE_DECAY, UP_TO_1, Range
from effcli.units import ParamInfo, Role, StateTensor


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


def _asgd_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return three numbers and the averaged weight, all on the device.

    Source: `ASGD._init_group` in torch/optim/asgd.py, 2.13: `step`, `eta` and `mu` are 0-dim float32 on the
    parameter's device; `ax` has the parameter's dtype. Nothing copies `ax` into the weight.
    """
    return (
        StateTensor(key="step", num_elements=1, num_bytes=4, role=Role.STEP),
        StateTensor(key="eta", num_elements=1, num_bytes=4),
        StateTensor(key="mu", num_elements=1, num_bytes=4),
        full("ax", param),
    )


def _rprop_arguments(hyper: Hyper) -> dict[str, Any]:
    return {
        "lr": hyper["lr"],
        "etas": (hyper["etaminus"], hyper["etaplus"]),
        "step_sizes": (hyper["step_size_min"], hyper["step_size_max"]),
    }


def _rprop_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return `step`, the last gradient and a step size per weight, in the parameter's own dtype.

    Source: `Rprop._init_group` in torch/optim/rprop.py, 2.13.
    """
    return (TORCH_STEP, full("prev", param), full("step_size", param))


def _settle_rprop(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    smallest, largest = hyper["step_size_min"], hyper["step_size_max"]
    if smallest > largest:
        raise UsageError(f"rprop needs step_size_min at most step_size_max, got {smallest} and {largest}; change one")
    return hyper


def _first_step_only(hyper: Hyper) -> Schedule:
    """Return that a schedule is not borne: `lr` is read once, as the first step size of each weight."""
    return "own"


def _sgd_entry(name: str, summary: str, momentum: float) -> OptimizerEntry:
    return OptimizerEntry(
        name=name,
        summary=summary,
        law="With momentum one buffer of the weight's shape and dtype, without momentum nothing; no step.",
        formula="w*n if momentum else 0",
        source="Sutskever et al., ICML 2013; torch/optim/sgd.py, torch 2.13",
        # With a gradient clipped to norm 1 an update moves the whole model by lr; upstream's 1e-3 hardly moves it.
        defaults={"lr": 1e-2, "momentum": momentum, "dampening": 0.0, "nesterov": False, **implementation.DEFAULT},
        hyper_help=implementation.HELP,
        ranges={"momentum": DECAY, "dampening": UP_TO_1, **implementation.WITH_FUSED},
        settle=_settle_sgd,
        rule_of_thumb_bytes=lambda num_parameters, hyper: 4 * num_parameters if hyper["momentum"] else 0,
        build=builder(
            "torch.optim",
            "SGD",
            named("lr", "momentum", "dampening", "nesterov"),
            for_all=implementation.keywords,
        ),
        state_layout=_sgd_layout,
        shard_fault=implementation.fused_fault,
    )


ENTRIES = (
    _sgd_entry("sgd", "SGD of torch, without momentum and without any state.", 0.0),
    _sgd_entry("sgd-momentum", "SGD of torch with momentum: one buffer per weight in the weight's dtype.", 0.9),
    OptimizerEntry(
        name="asgd",
        summary="SGD of torch that averages the weights beside them; the average stays in its state.",
        law="An averaged weight of the weight's shape and dtype, and three 4-byte numbers: step, eta, mu.",
        formula="w*n + 12",
        source="Polyak & Juditsky, SIAM J. Control Optim. 30 (1992); torch/optim/asgd.py, torch 2.13",
        defaults={"lr": 1e-2, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, **implementation.DEFAULT},
        hyper_help={
            "lr": "rate of the first updates; a schedule acts one update late",
            "lambd": "shrinks the weights, and the rate over time",
            "alpha": "power with which the rate falls",
            "t0": "update from which the weights are averaged; until then the average is the weight itself",
            **implementation.HELP,
        },
        ranges={**dict.fromkeys(("lambd", "alpha", "t0"), AT_LEAST_0), **implementation.WITHOUT_FUSED},
        rule_of_thumb_bytes=bytes_per_parameter(4),
        build=builder("torch.optim", "ASGD", named("lr", "lambd", "alpha", "t0"), for_all=implementation.keywords),
        state_layout=_asgd_layout,
    ),
    OptimizerEntry(
        name="rprop",
        summary="Rprop of torch: a step size per weight that grows and shrinks with the gradient's sign; for full "
        "batches.",
        law="The last gradient and a step size in the weight's shape and dtype, and a 4-byte step.",
        formula="2*w*n + 4",
        source="Riedmiller & Braun, ICNN 1993; torch/optim/rprop.py, torch 2.13",
        # Every weight moves by lr in the first update, whatever its gradient: with upstream's 1e-2 a pretrained
        # transformer, whose weights have an RMS of about 0.04, would be gone. It grows from AdamW's rate instead.
        defaults={"lr": 5e-5, "etaminus": 0.5, "etaplus": 1.2, "step_size_min": 1e-6, "step_size_max": 50.0}
        | implementation.DEFAULT,
        hyper_help={
            "lr": "first step size of every weight; the optimizer changes it by itself from then on",
            "etaminus": "factor on the step size where the gradient's sign turned",
            "etaplus": "factor on the step size where it stayed",
            "step_size_min": "smallest step size",
            "step_size_max": "largest step size",
            **implementation.HELP,
        },
        ranges={
            "etaminus": POSITIVE_DECAY,
            "etaplus": Range(lambda x: x > 1, "above 1"),
            "step_size_min": AT_LEAST_0,
            "step_size_max": ABOVE_0,
            **implementation.WITHOUT_FUSED,
        },
        takes_weight_decay=False,
        settle=_settle_rprop,
        schedule=_first_step_only,
        rule_of_thumb_bytes=bytes_per_parameter(8),
        build=builder("torch.optim", "Rprop", _rprop_arguments, for_all=implementation.keywords),
        state_layout=_rprop_layout,
        shard_fault=never_on_shards("its step sets elements by a mask, which torch 2.13 cannot do on shards"),
    ),
)
