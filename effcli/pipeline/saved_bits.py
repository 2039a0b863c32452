"""Which parameters' saved states are quantised, and why the others are not. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from effcli.optim.entry import Hyper
from effcli.optim.hyper import DEFAULT_MIN_8BIT_SIZE
from effcli.pipeline.look_alike import Fit
from effcli.pipeline.saved_layout import SavedState
from effcli.units import ParamInfo, format_count

_QUANTISED_FROM = 4096
"""Elements below which torchao leaves a moment whole (torchao/optim/adam.py, 0.18)."""


def reasons(fit: Fit | None, states: Mapping[str, SavedState], names: Mapping[str, str]) -> dict[str, str]:
    """Return why a state is not quantised, by label, for those that are not where others are or were to be.

    `names` are names of parameters by label, where they are known. Where no optimizer fits, only sizes can be told.
    """
    quantises = fit is not None and (fit.entry.bits == 8 or "block_size" in fit.entry.defaults)
    if not quantises and not any(state.quantised for state in states.values()):
        return {}
    whole = [label for label, state in states.items() if not state.quantised]
    if fit is None:
        return dict.fromkeys(whole, "not known: no optimizer that is known here keeps such a state")
    return {label: _reason(fit, fit.parameters[label], label, names) for label in whole}


def _reason(fit: Fit, param: ParamInfo, label: str, names: Mapping[str, str]) -> str:
    if fit.entry.eight_bit:
        least = int(fit.hyper["min_8bit_size"])
        if label in fit.kept_whole:
            return _overridden(fit.hyper, names.get(label))
        usual = "" if least == DEFAULT_MIN_8BIT_SIZE else ", the smallest that is quantised here"
        return f"fewer than {format_count(least)} elements{usual}"
    if param.num_elements < _QUANTISED_FROM:
        return f"fewer than {format_count(_QUANTISED_FROM)} elements"
    block = fit.hyper.get("block_size")
    if block and param.num_elements % block:
        return f"not a multiple of the block size {format_count(block)} (torchao)"
    return f"{fit.entry.name} does not quantise it"


def _overridden(hyper: Hyper, name: str | None) -> str:
    """Return that a parameter is kept in 32 bit, and of an embedding that Trainer does so by itself."""
    if name is not None and "embed" in name.lower():
        return "kept in 32 bit: an override, or Trainer's rule for embeddings"
    if name is None:
        return "kept in 32 bit: an override (Trainer overrides embeddings)"
    return "kept in 32 bit: an override"
