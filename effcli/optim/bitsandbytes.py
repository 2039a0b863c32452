"""bitsandbytes' block-wise 8-bit optimizers. Build and state law side by side; no torch at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effcli.optim.entry import Groups, Hyper, OptimizerEntry
from effcli.optim.laws import PYTHON_STEP, constant
from effcli.optim.overrides import values_for
from effcli.units import ParamInfo, Placement, StateTensor

if TYPE_CHECKING:
    import torch

_BLOCK_SIZE = 256
_MAP_BYTES = 256 * 4
_PAGED_FROM = 100_000
_MANAGED = ("optim_bits", "min_8bit_size", "is_sparse")
"""Overrides that go through the manager. Learning rate and betas are options of a parameter group instead: the
manager's would replace the scheduled rate by a fixed one."""


def _arguments(hyper: Hyper) -> dict[str, Any]:
    return {"lr": hyper["lr"], "betas": (hyper["beta1"], hyper["beta2"]), "eps": hyper["eps"]}


def _builder(class_name: str) -> Callable[[Groups, Hyper], torch.optim.Optimizer]:
    def build(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
        import bitsandbytes

        from effcli.optim.groups import upstream_groups

        optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, class_name.removesuffix("8bit"))(
            upstream_groups(groups, hyper, _arguments),
            **_arguments(hyper),
            optim_bits=hyper["optim_bits"],
            min_8bit_size=hyper["min_8bit_size"],
        )
        _isolate_overrides(optimizer, hyper)
        # Upstream would warn at the first step on a CPU; the entry's `cpu_note` says it once, before the run.
        optimizer._cpu_paged_warned = True
        return optimizer

    return build


def _isolate_overrides(optimizer: Any, hyper: Hyper) -> None:
    """Give the optimizer a manager of its own that holds just its overrides.

    Upstream's manager is a process-wide singleton keyed by position and by `id()` (bitsandbytes/optim/optimizer.py,
    0.50.2): an override for one optimizer would also bind every later one, and one that another library left there
    would bind ours. An optimizer reads only its own `mng`, so a private instance isolates both ways.
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


def _two_state_layout(param: ParamInfo, hyper: Hyper, *, paged: bool = False) -> tuple[StateTensor, ...]:
    """Return two states: float32, or 8 bit with one float32 `absmax` per block of 256 and two code tables.

    Source: `Optimizer2State.init_state` in bitsandbytes/optim/optimizer.py, 0.50.2. A parameter stays in float32, for
    bf16 weights too, with fewer than `min_8bit_size` elements or with `optim_bits` 32. The code tables (256 x
    float32) are the same two tensors in every parameter's state. `step` is a Python int. A paged optimizer pages the
    states of parameters with at least 100,000 elements, on CUDA only.
    """
    num_elements = param.num_elements
    placement = Placement.PAGED if paged and num_elements >= _PAGED_FROM else Placement.DEVICE
    quantised = hyper["optim_bits"] == 8 and num_elements >= hyper["min_8bit_size"]
    state_bytes = num_elements if quantised else 4 * num_elements
    absmax_bytes = 4 * -(-num_elements // _BLOCK_SIZE)
    layout = [PYTHON_STEP]
    for index in (1, 2):
        layout.append(
            StateTensor(key=f"state{index}", num_elements=num_elements, num_bytes=state_bytes, placement=placement)
        )
        if quantised:
            layout.append(constant(f"qmap{index}", _MAP_BYTES, shared=True))
            layout.append(constant(f"absmax{index}", absmax_bytes))
    return tuple(layout)


def _paged_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return the layout of the unpaged optimizer with its large states in paged memory."""
    return _two_state_layout(param, hyper, paged=True)


_DEFAULTS = {"lr": 5e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_SOURCE = "Dettmers et al., arXiv 2110.02861; bitsandbytes/optim/optimizer.py, bitsandbytes 0.50.2"


def _entry(
    name: str, class_name: str, aliases: tuple[str, ...], summary: str, *, paged: bool = False
) -> OptimizerEntry:
    return OptimizerEntry(
        name=name,
        aliases=aliases,
        summary=summary,
        law="Two moments in 8 bit, each with one float32 absmax per block of 256 elements; below min_8bit_size "
        "elements, or with optim_bits 32, two float32 moments. Two 1,024-byte code tables are shared by all.",
        formula="2*n + 8*ceil(n/256) if optim_bits == 8 and n >= min_8bit_size else 8*n",
        source=_SOURCE,
        package="bitsandbytes",
        pip="bitsandbytes",
        defaults=_DEFAULTS,
        eight_bit=True,
        rule_of_thumb_bytes=lambda num_parameters: 2 * num_parameters,
        build=_builder(class_name),
        state_layout=_paged_layout if paged else _two_state_layout,
        cpu_note=(
            f"{name}: bitsandbytes pages on CUDA only; on a CPU its state is ordinary memory of the same size"
            if paged
            else None
        ),
    )


# Despite its name Adam8bit decouples the decay: it and AdamW8bit call one kernel, "adam", which shrinks the weight by
# 1 - lr * weight_decay (bitsandbytes/backends/cpu/ops.py and the CUDA and Triton kernels, 0.50.2).
ENTRIES = (
    _entry(
        "adam8bit",
        "Adam8bit",
        ("adam_bnb_8bit", "adam_8bit"),
        "8-bit Adam of bitsandbytes, block-wise; decay acts on the weight, the same update as adamw8bit.",
    ),
    _entry(
        "adamw8bit",
        "AdamW8bit",
        ("adamw_bnb_8bit", "adamw_8bit"),
        "8-bit AdamW of bitsandbytes, block-wise.",
    ),
    _entry(
        "paged-adamw8bit",
        "PagedAdamW8bit",
        ("paged_adamw_8bit", "paged_adamw8bit"),
        "8-bit AdamW of bitsandbytes with its large states in paged (managed) memory, outside torch's allocator.",
        paged=True,
    ),
)
