"""Builds bitsandbytes' optimizers, each with overrides of its own. No torch at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effcli.optim.building import Arguments, builder, named
from effcli.optim.entry import Groups, Hyper
from effcli.optim.overrides import values_for

if TYPE_CHECKING:
    import torch

_MANAGED = ("optim_bits", "min_8bit_size", "is_sparse")
"""Overrides that go through the manager. Learning rate and betas are options of a parameter group instead: the
manager's would replace the scheduled rate by a fixed one."""

_TABLES = (("qmap1", "dynamic"), ("qmap2", "udynamic"))
"""Key of a code table in a parameter's state, and its name in the optimizer's own `name2qmap`."""


def block_wise_builder(class_name: str, arguments: Arguments) -> Callable[[Groups, Hyper], torch.optim.Optimizer]:
    """Return the `build` of a class of `bitsandbytes.optim`.

    The class is one whose `optim_bits` counts. Those named after their bits pin them, and say nothing about it:
    `Adam8bit(optim_bits=32)` keeps 8 bit. `AdEMAMix32bit` cannot step at all: it lacks the double first state that its
    kernel writes to, which only `AdEMAMix` and its subclasses make (bitsandbytes/optim/ademamix.py, 0.50.2).
    """
    bits = named("optim_bits", "min_8bit_size")
    return builder("bitsandbytes.optim", class_name, arguments, for_all=bits, finish=_finish)


def _finish(optimizer: Any, hyper: Hyper) -> None:
    _isolate_overrides(optimizer, hyper)
    if optimizer.is_paged:
        optimizer.register_step_pre_hook(_page_beside_a_gpu)
    optimizer.register_step_pre_hook(_share_code_tables)


def _isolate_overrides(optimizer: Any, hyper: Hyper) -> None:
    """Give the optimizer a manager of its own that holds just its overrides.

    Upstream's manager is a process-wide singleton keyed by position and by `id()` (bitsandbytes/optim/optimizer.py,
    0.50.2): an override for one optimizer would also bind every later one, and one that another library left there
    would bind ours. An optimizer reads only its own `mng`, so a private instance isolates both ways.

    The manager's override by position must be registered before the parameters move to a GPU. The one by parameter,
    used here, need not: `model.to()` keeps the parameter objects, and names are resolved to those at the build.
    """
    manager_class: Any = type(optimizer.mng)
    manager = manager_class.__new__(manager_class)
    manager.initialize()
    optimizer.mng = manager
    for group in optimizer.param_groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            values = values_for(name, hyper)
            config = {key: values[key] for key in _MANAGED if key in values}
            if config:
                manager.override_config(param, key_value_dict=config)


def _page_beside_a_gpu(optimizer: Any, *step_arguments: Any) -> None:
    """Leave paging to runs on a GPU; the entry's `cpu_note` has said so before the run.

    On a CPU upstream falls back with a warning at the first step, except for AdEMAMix's double state, which fails.
    """
    optimizer.is_paged = optimizer.param_groups[0]["params"][0].device.type != "cpu"


def _share_code_tables(optimizer: Any, *step_arguments: Any) -> None:
    """Let the states of all parameters point to one pair of code tables, as they do in a new optimizer.

    `load_state_dict` moves tables to a GPU parameter by parameter, which makes as many copies, and leaves the
    optimizer's own pair, which later states get, beside the loaded one (bitsandbytes/optim/optimizer.py, 0.50.2).
    """
    tables: dict[tuple[str, torch.device], torch.Tensor] = {}
    for state in optimizer.state.values():
        for key, name in _TABLES:
            if key in state:
                state[key] = tables.setdefault((key, state[key].device), state[key])
                optimizer.name2qmap[name] = state[key]
