"""Which optimizers mean the same on flat partitions, in which DeepSpeed's ZeRO gives them the parameters. No torch.

A partition is a vector of a rank's part of many parameters. A step that treats each element by itself does not notice,
nor does a state in 8 bits, whose blocks then are those of the partition.
"""

from __future__ import annotations

from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.units import Basis

_FACTORED = "its factors are of rows and columns, and DeepSpeed steps flat tensors, which have none"
_MATRICES = "it is for matrices, and DeepSpeed steps flat tensors"
_NORMS = "its step is scaled by norms of whole parameters, and DeepSpeed steps flat parts of many"
_GLOBAL = "its learning rate comes from all parameters, and each process would find one of its own"
_REBUILT = "DeepSpeed makes it anew without its parameter groups (0.19)"
_TWO_SETS = "its weights for evaluation would stay in flat copies, which the model never sees"

_FAULTS = {
    "adafactor": _FACTORED,
    "adafactor-torch": _FACTORED,
    "came": _FACTORED,
    "muon": _MATRICES,
    "galore-adamw": _MATRICES,
    "stable-adamw": _NORMS,
    "prodigy": _GLOBAL,
    "adagrad": _REBUILT,
    "schedulefree-adamw": _TWO_SETS,
    "schedulefree-sgd": _TWO_SETS,
}


def flat_fault(entry: OptimizerEntry, hyper: Hyper) -> str | None:
    """Return why an optimizer fails on flat partitions, or is another one there, as a clause; None where it is not."""
    if entry.basis is Basis.PROBED:
        return "nobody knows whether its step takes each element by itself"
    if hyper.get("max_unorm"):
        return f"max_unorm {hyper['max_unorm']}: {_NORMS}"
    return _FAULTS.get(entry.name)
