"""Whether the weights of a model are numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from effcli.errors import UsageError

if TYPE_CHECKING:
    import torch


def first_not_finite(model: torch.nn.Module) -> str | None:
    """Return the name of the first parameter that holds an infinite value or no number; None where all are finite.

    Of a sharded one this process's share counts. Least and largest value tell it without a tensor beside the parameter:
    both are NaN where one element is.
    """
    from effcli.storage import local

    name: str
    for name, parameter in model.named_parameters():
        value = local(parameter.detach())
        if value.numel() and not all(math.isfinite(float(end)) for end in value.aminmax()):
            return name
    return None


def refuse_files_not_finite(model: torch.nn.Module, name: str) -> None:
    """Refuse to train a model whose files hold what no training can mend.

    Raises:
        UsageError: a weight is infinite or not a number.
    """
    broken = first_not_finite(model)
    if broken is not None:
        raise UsageError(
            f"--model '{name}': its files hold values that are not finite in {broken}, before any training; "
            "load the model anew, or give another one"
        )
