"""Why optimizers fail on flat partitions, in which DeepSpeed's ZeRO gives them the parameters, or are others there.

A partition is a vector of a rank's part of many parameters. A step that treats each element by itself does not notice,
nor does a state in 8 bits, whose blocks then are those of the partition. No torch.
"""

from __future__ import annotations

from effcli.optim.entry import Hyper, never_on_shards

_NORMS = "its step is scaled by norms of whole parameters, and DeepSpeed steps flat parts of many"

FACTORED = never_on_shards("its factors are of rows and columns, and DeepSpeed steps flat tensors, which have none")
FOR_MATRICES = never_on_shards("it is for matrices, and DeepSpeed steps flat tensors")
BY_NORMS = never_on_shards(_NORMS)
ONE_RATE_FOR_ALL = never_on_shards(
    "its learning rate comes from all parameters, and each process would find one of its own"
)
MADE_ANEW = never_on_shards("DeepSpeed makes it anew without its parameter groups (0.19)")
TWO_SETS_OF_WEIGHTS = never_on_shards(
    "its weights for evaluation would stay in flat copies, which the model never sees"
)
NOT_KNOWN = never_on_shards("nobody knows whether its step takes each element by itself")


def norm_fault(hyper: Hyper) -> str | None:
    """Return why a step that `max_unorm` scales is another on flat partitions; None where nothing does."""
    return f"max_unorm {hyper['max_unorm']}: {_NORMS}" if hyper.get("max_unorm") else None
