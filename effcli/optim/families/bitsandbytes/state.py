"""What bitsandbytes' block-wise optimizers keep for one parameter. No torch."""

from __future__ import annotations

from effcli.optim.entry import Hyper
from effcli.optim.laws import PYTHON_STEP, constant, sized
from effcli.units import ParamInfo, Placement, StateTensor

BLOCK_SIZE = 256
"""Elements under one absmax: `blocksize` in upstream's `init_state`, which no argument changes."""
_MAP_BYTES = 256 * 4
"""A code table: the float32 value of each of the 256 codes of 8 bit."""
PAGED_FROM = 100_000
"""Elements below which upstream's `get_state_buffer` leaves a state of a paged optimizer unpaged."""


def blockwise_layout(
    param: ParamInfo, hyper: Hyper, *, states: tuple[int, ...], paged: bool = False
) -> tuple[StateTensor, ...]:
    """Return `state1` and perhaps `state2`: float32, or 8 bit with float32 `absmax` and code tables.

    `states` are the elements of each state per element of the parameter. Source: `init_state` of `Optimizer1State` and
    `Optimizer2State` in bitsandbytes/optim/optimizer.py and of `AdEMAMix` in bitsandbytes/optim/ademamix.py, 0.50.2.
    A parameter stays in float32, for bf16 weights too, with fewer than `min_8bit_size` elements or with `optim_bits`
    32. An 8-bit state has one absmax per block of 256 elements, the last one partial; AdEMAMix's double `state1` has
    two rows of them. The code tables (256 x float32) are the same tensors in every parameter's state. `step` is a
    Python int. `max_unorm` (LAMB, LARS) keeps the norm of an update. A paged optimizer pages the states of parameters
    with at least 100,000 elements, on CUDA only.
    """
    num_elements = param.num_elements
    quantised = is_quantised(param, hyper)
    kept = [
        StateTensor(
            key=f"state{number}",
            num_elements=multiple * num_elements,
            num_bytes=multiple * num_elements * (1 if quantised else 4),
            placement=Placement.PAGED if paged and num_elements >= PAGED_FROM else Placement.DEVICE,
        )
        for number, multiple in enumerate(states, start=1)
    ]
    norm = (sized("unorm_vec", 1, 4),) if hyper.get("max_unorm", 0.0) > 0 else ()
    if not quantised:
        return (PYTHON_STEP, *kept, *norm)
    blocks = -(-num_elements // BLOCK_SIZE)
    tables = [constant(f"qmap{number}", _MAP_BYTES, shared=True) for number, _ in enumerate(states, start=1)]
    scales = [constant(f"absmax{number}", 4 * multiple * blocks) for number, multiple in enumerate(states, start=1)]
    if max(states) > 1:  # AdEMAMix makes its buffers last
        return (PYTHON_STEP, *tables, *scales, *kept)
    pairs = [tensor for pair in zip(kept, tables, strict=True) for tensor in pair]
    return (PYTHON_STEP, *pairs, *scales, *norm)


def is_quantised(param: ParamInfo, hyper: Hyper) -> bool:
    """Return whether the parameter's state is in 8 bit."""
    return bool(hyper["optim_bits"] == 8 and param.num_elements >= hyper["min_8bit_size"])


def blockwise_formula(states: tuple[int, ...], *, has_norm: bool) -> str:
    """Return the bytes of one parameter's own state as an expression; see `OptimizerEntry.formula`."""
    total = sum(states)
    eight = f"{'n' if total == 1 else f'{total}*n'} + {4 * total}*ceil(n/256)"
    formula = f"{eight} if optim_bits == 8 and n >= min_8bit_size else {4 * total}*n"
    return f"({formula}) + (4 if max_unorm > 0 else 0)" if has_norm else formula
