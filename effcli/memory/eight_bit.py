"""How much of an 8-bit optimizer's state really is in 8 bit, in words. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from effcli.memory.state import StateSummary, predict_state
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.overrides import hyper_for
from effcli.units import ParamInfo, format_count


def eight_bit_note(entry: OptimizerEntry, params: Sequence[ParamInfo], hyper: Hyper, state: StateSummary) -> str | None:
    """Return how many tensors have 8-bit state, what that saves, and why the others don't.

    `state` is what was predicted for them. None where no 8-bit state is meant: for another optimizer, or with 32 bits
    for all parameters.
    """
    trainable = [param for param in params if param.trainable]
    meant = {param.name: hyper_for(param.name, hyper).get("optim_bits") for param in trainable}
    if not entry.eight_bit or 8 not in meant.values():
        return None
    full = predict_state(entry, params, {**hyper, "optim_bits": 32, "overrides": ()})
    why = []
    if list(meant.values()).count(8) > state.num_quantised:
        sizes = {hyper_for(name, hyper)["min_8bit_size"] for name, bits in meant.items() if bits == 8}
        least = format_count(sizes.pop()) if len(sizes) == 1 else "their own least number of"
        why.append(f"have fewer than {least} elements (--min-8bit-size)")
    if 32 in meant.values():
        why.append("are kept in 32 bit by name" if hyper["optim_bits"] == 8 else "are in 32 bit as the optimizer is")
    others = f"; the others {' or '.join(why)}" if why else ""
    return (
        f"{entry.name} has the state of {format_count(state.num_quantised)} of {format_count(state.num_parameters)} "
        f"tensors ({100 * state.quantised_elements / state.parameter_elements:.1f} % of the elements) in 8 bit, which "
        f"saves {100 * (1 - state.state_bytes / full.state_bytes):.1f} % of its memory in 32 bit{others}."
    )
