"""bitsandbytes' block-wise 8-bit optimizers. Build and state law side by side; no torch at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effcli.optim.entry import Groups, Hyper, OptimizerEntry
from effcli.optim.patterns import check_patterns, matches
from effcli.units import ParamInfo, Placement, Role, StateTensor

if TYPE_CHECKING:
    import torch

_BLOCK_SIZE = 256
_MAP_BYTES = 256 * 4
_PAGED_FROM = 100_000
_PROBE_ELEMENTS = 4096


def _builder(class_name: str) -> Callable[[Groups, Hyper], torch.optim.Optimizer]:
    def build(groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
        import bitsandbytes

        from effcli.optim.groups import unique_groups

        own_groups = unique_groups(groups)
        named = [pair for group in own_groups for pair in zip(group["names"], group["params"], strict=True)]
        check_patterns(hyper["keep_32bit"], [name for name, _ in named], "--keep-32bit")
        optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, class_name)(
            own_groups,
            lr=hyper["lr"],
            betas=(hyper["beta1"], hyper["beta2"]),
            eps=hyper["eps"],
            min_8bit_size=hyper["min_8bit_size"],
        )
        _keep_32bit(optimizer, [param for name, param in named if matches(name, hyper["keep_32bit"])])
        # Upstream would warn at the first step on a CPU; the entry's `cpu_note` says it once, before the run.
        optimizer._cpu_paged_warned = True
        return optimizer

    return build


def _keep_32bit(optimizer: Any, params: list[torch.nn.Parameter]) -> None:
    """Give the optimizer a manager of its own that holds just its overrides.

    Upstream's manager is a process-wide singleton keyed by position and by `id()` (bitsandbytes/optim/optimizer.py,
    0.50.2): an override for one optimizer would also bind every later one, and one that another library left there
    would bind ours. An optimizer reads only its own `mng`, so a private instance isolates both ways.
    """
    manager_class: Any = type(optimizer.mng)
    manager = manager_class.__new__(manager_class)
    manager.initialize()
    if params:
        manager.override_config(params, "optim_bits", 32)
    optimizer.mng = manager


def _two_state_layout(param: ParamInfo, hyper: Hyper, *, paged: bool = False) -> tuple[StateTensor, ...]:
    """Return two states: float32, or 8 bit with one float32 `absmax` per block of 256 and two code tables.

    Source: `Optimizer2State.init_state` in bitsandbytes/optim/optimizer.py, 0.50.2. A parameter stays in float32, for
    bf16 weights too, with fewer than `min_8bit_size` elements or when it is kept in 32 bit. The code tables (256 x
    float32) are the same two tensors in every parameter's state. `step` is a Python int. A paged optimizer pages the
    states of parameters with at least 100,000 elements, on CUDA only.
    """
    num_elements = param.num_elements
    placement = Placement.PAGED if paged and num_elements >= _PAGED_FROM else Placement.DEVICE
    quantised = num_elements >= hyper["min_8bit_size"] and not matches(param.name, hyper["keep_32bit"])
    state_bytes = num_elements if quantised else 4 * num_elements
    absmax_bytes = 4 * -(-num_elements // _BLOCK_SIZE)
    layout = [StateTensor(key="step", num_elements=1, num_bytes=0, role=Role.STEP, placement=Placement.HOST)]
    for index in (1, 2):
        layout.append(
            StateTensor(key=f"state{index}", num_elements=num_elements, num_bytes=state_bytes, placement=placement)
        )
        if quantised:
            layout.append(_constant(f"qmap{index}", _MAP_BYTES, shared=True))
            layout.append(_constant(f"absmax{index}", absmax_bytes))
    return tuple(layout)


def _constant(key: str, num_bytes: int, *, shared: bool = False) -> StateTensor:
    return StateTensor(key=key, num_elements=0, num_bytes=num_bytes, role=Role.QUANTISATION, shared=shared)


def _paged_layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
    """Return the layout of the unpaged optimizer with its large states in paged memory."""
    return _two_state_layout(param, hyper, paged=True)


def _prober(class_name: str) -> Callable[[str], None]:
    def probe(device: str) -> None:
        import torch

        param = torch.nn.Parameter(torch.zeros(_PROBE_ELEMENTS, device=device))
        param.grad = torch.ones_like(param)
        hyper = {**_DEFAULTS, "min_8bit_size": _PROBE_ELEMENTS, "keep_32bit": ()}
        _builder(class_name)([{"params": [param], "names": ["probe"], "weight_decay": 0.0}], hyper).step()
        if not bool(param.isfinite().all()) or not bool(param.any()):
            raise RuntimeError("its step on 4,096 elements gave no usable result")

    return probe


_DEFAULTS = {"lr": 5e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_SOURCE = "Dettmers et al., arXiv 2110.02861; bitsandbytes/optim/optimizer.py, bitsandbytes 0.50.2"


def _entry(
    name: str, class_name: str, aliases: tuple[str, ...], summary: str, *, paged: bool = False
) -> OptimizerEntry:
    return OptimizerEntry(
        name=name,
        aliases=aliases,
        summary=summary,
        source=_SOURCE,
        package="bitsandbytes",
        pip="bitsandbytes",
        defaults=_DEFAULTS,
        eight_bit=True,
        rule_of_thumb_bytes=lambda num_parameters: 2 * num_parameters,
        build=_builder(class_name),
        state_layout=_paged_layout if paged else _two_state_layout,
        probe=_prober(class_name),
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
