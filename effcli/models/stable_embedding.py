"""bitsandbytes' StableEmbedding in place of a model's embeddings, and the marker by which such a model is built again.

The class normalises what it looks up, so a model with it computes another function and has two parameters more per
embedding. No library but this one knows how to build it: the configuration that is saved with the weights says where
the replaced embeddings are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effcli.errors import UsageError
from effcli.optim.overrides import Override
from effcli.packages import require_package
from effcli.units import count, format_count

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

MARKER = "effcli_stable_embeddings"
"""Key of `config.json` under which the names of the replaced modules are kept."""


def marked_embeddings(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the names of the modules that were replaced in the model that `config` describes.

    Raises:
        ValueError: the marker is there but holds no names.
    """
    names = getattr(config, MARKER, ())
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{MARKER} holds no list of module names")
    return tuple(names)


def embeddings_of(model: torch.nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the embeddings that can be replaced, and of those that compute something of their own."""
    import torch

    found = [
        (name, type(module))
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.Embedding)
    ]
    plain = tuple(name for name, kind in found if kind is torch.nn.Embedding)
    return plain, tuple(name for name, kind in found if kind is not torch.nn.Embedding)


def use_stable_embeddings(model: PreTrainedModel, name: str) -> tuple[str, ...]:
    """Replace every plain embedding of the model called `name`; return what should be said about it.

    Raises:
        UsageError: there is none.
    """
    plain, special = embeddings_of(model)
    left = f"{', '.join(special)} compute{'s' if len(special) == 1 else ''} something else than a look-up"
    if not plain:
        raise UsageError(
            f"--stable-embedding: '{name}' has no embedding that can be replaced"
            f"{f': {left}' if special else ''}; leave the flag out"
        )
    before = sum(param.numel() for param in model.parameters())
    replace_embeddings(model, plain)
    added = sum(param.numel() for param in model.parameters()) - before
    note = (
        f"StableEmbedding replaces {_embeddings(plain)}: that adds {format_count(added)} parameters of LayerNorms "
        "and changes what the model computes. A plain from_pretrained cannot rebuild it; effcli does, by the marker "
        f"{MARKER} in its config.json."
    )
    return (note, f"No StableEmbedding there: {left}.") if special else (note,)


def rebuild_embeddings(model: PreTrainedModel, name: str) -> None:
    """Give a model that was made of a marked configuration its StableEmbeddings; leave any other alone.

    Raises:
        ValueError: the marker names what the model does not have.
        MissingExtraError: bitsandbytes is not installed.
    """
    names = marked_embeddings(model.config)
    if names:
        require_package("bitsandbytes", f"--model '{name}'")
        replace_embeddings(model, names)


def rebuilt_note(names: Sequence[str]) -> str:
    """Return what should be said about a model that comes with StableEmbeddings."""
    return (
        f"StableEmbedding replaces {_embeddings(names)}, as the model's config.json says; a plain from_pretrained "
        "would leave out their LayerNorms."
    )


def _embeddings(names: Sequence[str]) -> str:
    return f"{count(len(names), 'embedding')} ({', '.join(names)})"


def replace_embeddings(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Put a StableEmbedding in the place of each embedding named, over the same weights, and mark the configuration.

    Raises:
        ValueError: a name is that of no plain embedding.
    """
    plain, _ = embeddings_of(model)
    if missing := [name for name in names if name not in plain]:
        raise ValueError(f"{MARKER} of config.json names '{missing[0]}', which is no embedding of this model")
    made: dict[int, torch.nn.Module] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        old = model.get_submodule(name)
        if id(old) not in made:  # a module that stands in two places stays one
            made[id(old)] = _stable(old)
        setattr(model.get_submodule(parent), last, made[id(old)])
    setattr(model.config, MARKER, list(names))


def _stable(old: Any) -> torch.nn.Module:
    """Return a StableEmbedding over the weights of `old`, its LayerNorm fresh and in float32.

    `StableEmbedding.forward` casts to torch's default dtype before the norm, which therefore stays in float32 over
    bf16 weights too. Its constructor draws random weights unless it is given some, wraps those into another Parameter,
    which would break ties, and leaves an override in the process-wide manager, which would bind later optimizers
    (bitsandbytes/nn/modules.py, 0.50.2).
    """
    import torch
    from bitsandbytes.nn import StableEmbedding
    from bitsandbytes.optim import GlobalOptimManager

    new = StableEmbedding(
        old.num_embeddings,
        old.embedding_dim,
        padding_idx=old.padding_idx,
        max_norm=old.max_norm,
        norm_type=old.norm_type,
        scale_grad_by_freq=old.scale_grad_by_freq,
        sparse=old.sparse,
        _weight=old.weight,
    )
    left = GlobalOptimManager.get_instance().module_weight_config_triple
    left[:] = [entry for entry in left if entry[0] is not new]
    new.weight = old.weight
    new.norm = torch.nn.LayerNorm(old.embedding_dim, device=old.weight.device, dtype=torch.float32)
    return new.train(old.training)


def rebuilding(model_class: Any, names: Sequence[str]) -> Any:
    """Return a class like `model_class` whose models are made with StableEmbeddings, for its `from_pretrained`.

    So transformers itself loads the norms with everything else: shards, dtypes and tied weights included.
    """

    def make(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        replace_embeddings(self, names)

    body = {
        "__init__": make,
        "__module__": model_class.__module__,  # transformers looks into the file where a class is defined
        "_keep_in_fp32_modules_strict": {
            *(model_class._keep_in_fp32_modules_strict or ()),
            *(f"{name}.norm" for name in names),
        },
    }
    return type(model_class.__name__, (model_class,), body)


def overrides_for(model: PreTrainedModel) -> tuple[Override, ...]:
    """Return what keeps the state of the replaced embeddings in 32 bit; a frozen one has no state.

    Each weight is named as `named_parameters` does, a shared one once.
    """
    weights = {id(model.get_submodule(name).weight) for name in marked_embeddings(model.config)}
    return tuple(
        Override(pattern=f"={name}", values={"optim_bits": 32}, flag="--stable-embedding")
        for name, param in model.named_parameters()
        if id(param) in weights and param.requires_grad
    )
