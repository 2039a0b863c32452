"""What saved parameter groups say of the optimizer, where several keep the same state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from effcli.optim.entry import OptimizerEntry
from effcli.optim.hyper import default_hyper
from effcli.optim.ranges import FLAGGED

Group = Mapping[str, Any]

_COMMON = frozenset({"lr", "weight_decay", "initial_lr"})
"""Settings that no state law reads and that tell no optimizer from another."""


def group_hyper(entry: OptimizerEntry, groups: Sequence[Group]) -> dict[str, Any]:
    """Return the entry's defaults overlaid with the hyperparameters of the groups, the first group's first."""
    hyper = default_hyper(entry)
    for group in reversed(groups):
        betas = group.get("betas")
        named = dict(group)
        if isinstance(betas, list | tuple):
            named |= {f"beta{number}": beta for number, beta in enumerate(betas, start=1)}
        for name, value in named.items():
            if name in entry.defaults and name not in _COMMON and _is_allowed(entry, name, value):
                hyper[name] = value
    return hyper


def _is_allowed(entry: OptimizerEntry, name: str, value: Any) -> bool:
    """Return whether the entry takes this value: files hold anything, and laws reckon with what was checked."""
    limits = entry.ranges.get(name, FLAGGED.get(name))
    default = entry.defaults[name]
    if value is None or not _is_kind_of(value, default):
        return value is None and default is None
    return limits is None or limits.accepts(value)


def _is_kind_of(value: Any, default: Any) -> bool:
    if default is None:
        return value is None or isinstance(value, int | float)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, int | float) if isinstance(default, int | float) else isinstance(value, type(default))


def contradicted(entry: OptimizerEntry, groups: Sequence[Group]) -> bool:
    """Return whether a group holds what the optimizer's own groups never do, or lacks what they always have.

    False for an optimizer of which nothing is known here, and where no group tells anything.
    """
    told = [group for group in groups if group.keys() - _COMMON]
    fits = _FITS.get(_family(entry))
    return bool(told) and fits is not None and not fits(told)


def _family(entry: OptimizerEntry) -> str:
    """Return the entry's name, without what distinguishes the forms of one of bitsandbytes' optimizers."""
    if not entry.eight_bit:
        return entry.name
    return "bitsandbytes " + entry.name.removeprefix("paged-").removesuffix("8bit").removesuffix("32bit")


def _every(holds: Callable[[Group], bool]) -> Callable[[Sequence[Group]], bool]:
    return lambda groups: all(map(holds, groups))


def _every_has(*keys: str, without: Sequence[str] = ()) -> Callable[[Sequence[Group]], bool]:
    """Return whether all groups have all of these keys, and none the others: those of kindred optimizers elsewhere."""
    return _every(lambda group: all(key in group for key in keys) and not any(key in group for key in without))


def _some_has(*keys: str) -> Callable[[Sequence[Group]], bool]:
    return lambda groups: any(key in group for group in groups for key in keys)


def _torch_adam(decoupled: bool) -> Callable[[Sequence[Group]], bool]:
    """Return whether groups are those of Adam or of AdamW, which before torch 2.8 looked the same."""
    return _every(
        lambda group: (
            "amsgrad" in group and "foreach" in group and group.get("decoupled_weight_decay", decoupled) is decoupled
        )
    )


def _betas(holds: Callable[..., bool]) -> Callable[[Sequence[Group]], bool]:
    """Return whether beta1, beta2 and eps of every group are those of one of bitsandbytes' optimizers.

    Those with one state fill `betas` and `eps` up with zeros (bitsandbytes/optim/, 0.50.2).
    """

    def fits(group: Group) -> bool:
        betas, eps = group.get("betas"), group.get("eps")
        if not isinstance(betas, list | tuple) or len(betas) != 2 or not isinstance(eps, int | float):
            return False
        return holds(*betas, eps)

    return _every(fits)


_NOT_SGD = ("trust_coefficient", "weight_decouple", "integral")  # LARS, SGDW and PID of pytorch_optimizer
_torchao = _every(lambda group: "amsgrad" in group and "foreach" not in group)
_FITS: dict[str, Callable[[Sequence[Group]], bool]] = {
    "adamw": _torch_adam(True),
    "adam": _torch_adam(False),
    "adam-amsgrad": _torch_adam(False),
    "radam": _every(lambda group: "amsgrad" not in group and "foreach" in group),
    "sgd": _every_has("dampening", without=_NOT_SGD),
    "sgd-momentum": _every_has("dampening", without=_NOT_SGD),
    "muon": _some_has("ns_steps"),
    "adamw8bit-ao": _torchao,
    "adamw4bit": _torchao,
    "adamwfp8": _torchao,
    "galore-adamw": _some_has("correct_bias"),
    "stable-adamw": _some_has("kahan_sum"),
    "lion": _every_has(without=("eps", "beta")),
    "schedulefree-adamw": _every_has(without=("silent_sgd_phase",)),
    "bitsandbytes lion": _betas(lambda beta1, beta2, eps: beta2 > 0),
    "bitsandbytes sgd": _betas(lambda beta1, beta2, eps: beta2 == 0 and eps == 0),
    "bitsandbytes lars": _betas(lambda beta1, beta2, eps: beta2 == 0 and eps == 0),
    "bitsandbytes rmsprop": _betas(lambda beta1, beta2, eps: beta1 > 0 and beta2 == 0 and eps > 0),
    "bitsandbytes adagrad": _betas(lambda beta1, beta2, eps: beta1 == 0 and beta2 == 0),
}
"""Of optimizers whose state another one's can equal: whether groups can be theirs."""
