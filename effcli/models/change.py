"""What the settings change in a model before it trains: StableEmbeddings, frozen parameters, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.models.build import freeze
from effcli.models.lora import add_adapters, describe_adapters
from effcli.models.stable_embedding import marked_embeddings, overrides_for, rebuilt_note, use_stable_embeddings

if TYPE_CHECKING:
    from effcli.optim.entry import Hyper, OptimizerEntry
    from effcli.optim.overrides import Override
    from effcli.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A model as it trains, what its 8-bit optimizers keep in 32 bit, and what should be said."""

    model: Any
    overrides: tuple[Override, ...]
    notes: tuple[str, ...]

    def hyper_for(self, entry: OptimizerEntry, hyper: Hyper) -> Hyper:
        """Return the hyperparameters of a run with what the model adds to them."""
        return {**hyper, "overrides": (*hyper["overrides"], *self.overrides)} if entry.eight_bit else hyper


def change_model(model: Any, settings: ModelSpec, task: str, *, name: str, origin: str | None) -> Changed:
    """Return the model as `settings` want it; `origin` is where peft can load it from again, none if nowhere.

    The caller has checked the settings (`check_model_flags`). On the meta device under `torch.device("meta")`.

    Raises:
        UsageError: no embedding to replace, a pattern of `--freeze` that fits nothing, or adapters that cannot be made.
    """
    notes: tuple[str, ...] = ()
    if names := marked_embeddings(model.config):
        notes = (rebuilt_note(names),)
    elif settings.stable_embedding:
        notes = use_stable_embeddings(model, name)
    freeze(model, settings.freeze)
    overrides = overrides_for(model)
    if settings.lora_r is None:
        return Changed(model=model, overrides=overrides, notes=notes)
    if names:
        raise UsageError(
            f"--lora-r {settings.lora_r}: '{name}' has StableEmbeddings, which peft cannot build below its adapters; "
            "leave --lora-r out, or give another --model"
        )
    adapted = add_adapters(model, settings, task, origin=origin, name=name)
    return Changed(model=adapted, overrides=(), notes=(describe_adapters(adapted, settings, task),))
