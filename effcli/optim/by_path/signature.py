"""What an optimizer class takes, read from its signature, as hyperparameters that a command line can give. Torch only
inside.

Left out: arguments whose default is neither a text nor a number nor a tuple of numbers, and those without effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from effcli.optim.entry import Hyper

_SCALARS = (bool, int, float, str, type(None))
WEIGHT_DECAY = "weight_decay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One keyword of a constructor and the hyperparameters that it is made of: several for `betas` and `eps`.

    An inherited one is handed on by the class to a base class, unless it sets it itself.
    """

    keyword: str
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    required: bool = False
    inherited: bool = False

    def value(self, hyper: Hyper) -> Any:
        """Return what to pass on."""
        values = tuple(hyper[name] for name in self.names)
        return values if len(values) > 1 else values[0]

    def is_default(self, hyper: Hyper) -> bool:
        """Return whether nothing else than the default was given."""
        return all(hyper[name] == default for name, default in zip(self.names, self.defaults, strict=True))


def arguments_of(cls: type) -> tuple[Argument, ...]:
    """Return what the constructor takes beside the parameters and their weight decay."""
    return tuple(
        argument
        for parameter, inherited in _keywords(cls)
        if parameter.name != WEIGHT_DECAY
        for argument in _argument(parameter, inherited)
    )


def takes_weight_decay(cls: type) -> bool:
    """Return whether the constructor takes a weight decay, and so reads it from each group."""
    return any(parameter.name == WEIGHT_DECAY for parameter, _ in _keywords(cls))


def needed_for_a_step(cls: Any) -> str | None:
    """Return the name of an argument without which the class makes no step, such as a closure."""
    for parameter in list(inspect.signature(cls.step).parameters.values())[1:]:
        if _is_named(parameter) and parameter.default is parameter.empty:
            return parameter.name
    return None


def _keywords(cls: type) -> Iterator[tuple[inspect.Parameter, bool]]:
    """Yield what the constructor takes after the parameters; if that is `**kwargs`, also what its base classes take.

    The flag says that a base class takes it. What only a base class needs, the class gives.
    """
    import torch

    seen: set[str] = set()
    inherited = False
    for base in cls.__mro__:
        if base is torch.optim.Optimizer:
            return
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        kinds = {parameter.kind for parameter in own}
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            own = own[1:]
        for parameter in own:
            if parameter.name in seen or (inherited and _is_required(parameter)):
                continue
            if _is_named(parameter) and not _is_pinned(parameter, base):
                yield parameter, inherited
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return
        seen |= {parameter.name for parameter in own}
        inherited = True


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _is_pinned(parameter: inspect.Parameter, cls: type) -> bool:
    """Return whether the class takes the argument and uses a value of its own: bits that its name says already.

    Source: `Adam8bit` and the like in bitsandbytes/optim/, 0.50.2, which take `optim_bits` for compatibility alone.
    """
    named_by_bits = cls.__module__.startswith("bitsandbytes.") and cls.__name__.endswith(("8bit", "32bit"))
    return named_by_bits and parameter.name == "optim_bits"


def _is_required(parameter: inspect.Parameter) -> bool:
    """Return whether there is no default; older classes mark that by `torch.optim.optimizer.required`."""
    from torch.optim.optimizer import required

    return parameter.default is parameter.empty or parameter.default is required


def _argument(parameter: inspect.Parameter, inherited: bool) -> Iterator[Argument]:
    """Yield how a keyword is made of hyperparameters; nothing for one that no text can say."""
    name, default = parameter.name, parameter.default
    if _is_required(parameter):
        yield Argument(keyword=name, names=(name,), defaults=(None,), required=True)
    elif isinstance(default, tuple | list) and all(type(item) in (int, float, type(None)) for item in default):
        if name in ("betas", "eps") and len(default) > 1:
            names = tuple(_numbered(name, index) for index in range(1, len(default) + 1))
            yield Argument(keyword=name, names=names, defaults=tuple(default), inherited=inherited)
        elif default and None not in default:
            yield Argument(keyword=name, names=(name,), defaults=(tuple(default),), inherited=inherited)
    elif type(default) in _SCALARS:
        value = float(default) if name == "lr" and type(default) is int else default
        yield Argument(keyword=name, names=(name,), defaults=(value,), inherited=inherited)


def _numbered(name: str, index: int) -> str:
    return f"beta{index}" if name == "betas" else "eps" if index == 1 else f"eps{index}"
