"""What should be said about a model as it was built, before the settings change it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

from effcli.models.tasks import sees_following_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_notes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return what its loss, its fixed parameters and its way with padding ask to be said."""
    return (*_own_loss(model), *_fixed(model), *_padding(model))


def _own_loss(model: PreTrainedModel) -> Iterator[str]:
    """Yield a note where the model's own loss has more in it than the one that is minimised here."""
    more = []
    if getattr(model.config, "output_router_logits", False):
        more.append("a loss that balances its router")
    if getattr(model.config, "ngram", 1) > 1:
        more.append(f"those of the {model.config.ngram - 1} tokens that follow the next")
    if more:
        yield f"The model's own loss adds {' and '.join(more)}; it is left out here."


def _fixed(model: PreTrainedModel) -> Iterator[str]:
    """Yield a note where the model's code fixes parameters, such as tables of sines."""
    fixed = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if fixed:
        others = f" and {len(fixed) - 3} more" if len(fixed) > 3 else ""
        yield f"Fixed by the model's code, so not trained: {', '.join(fixed[:3])}{others}."


def _padding(model: PreTrainedModel) -> Iterator[str]:
    """Yield a note where positions read padding: a decoder's do not, since padding is behind them."""
    known = inspect.signature(model.forward).parameters
    if "input_ids" in known and "attention_mask" not in known and sees_following_tokens(model.config):
        yield (
            f"{type(model).__name__} takes no attention mask: it reads padding too, so results depend on which rows "
            "share a batch."
        )
