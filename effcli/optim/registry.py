"""Registry of optimizers: find one by name, check that it can run here. No torch at import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effcli.errors import DeviceError, EffcliError, UsageError, first_line, nearest
from effcli.optim.entry import Groups, Hyper, OptimizerEntry
from effcli.optim.families import (
    galore,
    pytorch_optimizer,
    schedule_free,
    torch_adam,
    torch_adaptive,
    torch_muon,
    torch_sgd,
    torchao,
    transformers,
)
from effcli.optim.families.bitsandbytes import entries as bitsandbytes
from effcli.optim.hyper import default_hyper, resolve_hyper
from effcli.packages import require_package
from effcli.units import Basis

if TYPE_CHECKING:
    from effcli.spec import Shard

__all__ = [
    "Groups",
    "Hyper",
    "OptimizerEntry",
    "check_shards",
    "check_works",
    "default_hyper",
    "entries",
    "find",
    "require",
    "resolve_hyper",
]

_FAMILIES = (
    torch_adam.ENTRIES,
    torch_sgd.ENTRIES,
    torch_adaptive.ENTRIES,
    torch_muon.ENTRIES,
    transformers.ENTRIES,
    bitsandbytes.ENTRIES,
    torchao.ENTRIES,
    galore.ENTRIES,
    schedule_free.ENTRIES,
    pytorch_optimizer.ENTRIES,
)


def entries() -> tuple[OptimizerEntry, ...]:
    """Return all entries, in the order in which they are listed to the user."""
    return tuple(entry for family in _FAMILIES for entry in family)


def find(name: str) -> OptimizerEntry:
    """Return the entry with this name or alias; case, `-` and `_` make no difference.

    `package.module:Class` gets an entry of its own; see `effcli.optim.by_path.entry` for what that raises.

    Raises:
        UsageError: no entry has this name; the message lists the choices.
    """
    if ":" in name:
        from effcli.optim.by_path.entry import entry_by_path

        return entry_by_path(name.strip())
    wanted = _normal(name)
    by_name = {_normal(word): entry for entry in entries() for word in (entry.name, *entry.aliases)}
    if wanted in by_name:
        return by_name[wanted]
    choices = ", ".join(entry.name for entry in entries())
    raise UsageError(
        f"unknown optimizer '{name}'.{nearest(wanted, by_name)} Type `effcli optimizers`, give package.module:Class, "
        f"or choose one of {choices}"
    )


def require(entry: OptimizerEntry) -> None:
    """Import the package that the entry needs.

    Raises:
        MissingExtraError: the package is not installed.
        DeviceError: it is installed but does not load, as with a native library built for another system.
    """
    if entry.package is not None:
        require_package(entry.package, f"optimizer '{entry.name}'", pip=entry.pip)


def check_works(entry: OptimizerEntry, device: str = "cpu", hyper: Hyper | None = None, dtype: str = "float32") -> None:
    """Do what can fail early: import the package and, where it is not torch's own, make one step on 4,096 elements.

    `hyper` are the resolved hyperparameters; without them the entry's defaults are tried. `dtype` is the weights'.

    Raises:
        MissingExtraError: the package is not installed.
        UsageError: upstream refuses a hyperparameter.
        DeviceError: it does not run on `device`.
    """
    kind = device.partition(":")[0]
    if kind not in entry.devices:
        raise DeviceError(
            f"optimizer '{entry.name}' does not run on {kind}, only on {', '.join(entry.devices)}; "
            "use another --device, or --optim adamw"
        )
    require(entry)
    if entry.package is None:
        return
    from effcli.optim.trial import trial_step

    try:
        trial_step(entry, hyper or default_hyper(entry), device, dtype)
    except EffcliError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer '{entry.name}' refuses its hyperparameters: {first_line(error)}") from error
    except Exception as error:  # upstream raises whatever its backend raises
        if entry.basis is Basis.PROBED:
            raise UsageError(
                f"optimizer '{entry.name}' cannot make a step from gradients alone on {device} with {dtype} weights: "
                f"{first_line(error)}"
            ) from error
        raise DeviceError(
            f"optimizer '{entry.name}' cannot make a step on {device} with {dtype} weights: {first_line(error)}; "
            "use another --device, or --optim adamw"
        ) from error


def check_shards(entry: OptimizerEntry, shard: Shard, hyper: Hyper | None = None) -> None:
    """Check that the optimizer can train what a process holds; without `hyper` its defaults are looked at.

    Raises:
        UsageError: parameters are to be cut up, and its step would fail or would not be the same.
    """
    hyper = hyper or default_hyper(entry)
    if shard == "fsdp":
        fault, others = entry.shard_fault(hyper), "adamw, sgd-momentum, lion or adamw8bit-ao"
    else:
        fault, others = entry.flat_fault(hyper) if shard != "ddp" else None, "adamw, sgd-momentum, lion or adamw8bit"
    if fault is not None:
        raise UsageError(
            f"optimizer '{entry.name}' does not run with --shard {shard}: {fault}; choose --shard ddp, or an optimizer "
            f"that does, such as {others}"
        )


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-")
