"""Which parameters' saved states are quantised, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping

from effcli.inspection.layout import SavedState
from effcli.inspection.look_alike import Fit
from effcli.optim.hyper import DEFAULT_MIN_8BIT_SIZE
from effcli.units import ParamInfo, format_count, listed

_QUANTISED_FROM = 4096
"""Elements below which torchao leaves a moment whole (torchao/optim/adam.py, 0.18)."""

_EMBEDDINGS = ("embed", "wte", "wpe", "shared", "relative_attention_bias")
"""What names of embeddings contain; all but the first are those of GPT-2, T5 and BART."""


def reasons(fit: Fit | None, states: Mapping[str, SavedState], names: Mapping[str, str]) -> dict[str, str]:
    """Return why a state is not quantised, by label, for those that are not where others are or were to be.

    `names` are names of parameters by label, where they are known.
    """
    quantises = fit is not None and (fit.entry.bits == 8 or "block_size" in fit.entry.defaults)
    if not quantises and not any(state.quantised for state in states.values()):
        return {}
    whole = [label for label, state in states.items() if not state.quantised]
    if fit is None:
        return dict.fromkeys(whole, "not known: no optimizer that is known here keeps such a state")
    sizes = [fit.parameters[label].num_elements for label, state in states.items() if state.quantised]
    least = min(sizes, default=0)
    return {label: _reason(fit, fit.parameters[label], label, names.get(label), least) for label in whole}


def _reason(fit: Fit, param: ParamInfo, label: str, name: str | None, least: int) -> str:
    """Return why one state is whole; `least` are the elements of the smallest that is quantised."""
    if fit.entry.eight_bit:
        if label in fit.kept_whole:
            return _overridden(name, smaller=param.num_elements < least)
        threshold = int(fit.hyper["min_8bit_size"])
        usual = "" if threshold == DEFAULT_MIN_8BIT_SIZE else ", the smallest that is quantised here"
        return f"fewer than {format_count(threshold)} elements{usual}"
    if param.num_elements < _QUANTISED_FROM:
        return f"fewer than {format_count(_QUANTISED_FROM)} elements"
    block = fit.hyper.get("block_size")
    if block and param.num_elements % block:
        return f"not a multiple of the block size {format_count(block)} (torchao)"
    return f"{fit.entry.name} does not quantise it"


def _overridden(name: str | None, *, smaller: bool) -> str:
    """Return what can keep a parameter in 32 bit; Trainer does so with embeddings.

    One that is smaller than all that are quantised may have been below a threshold.
    """
    causes = ["an override"]
    if name is None or any(word in name.lower() for word in _EMBEDDINGS):
        causes.append("Trainer's rule for embeddings")
    if smaller:
        causes.append("a larger min_8bit_size")
    return f"kept in 32 bit by {listed(causes, last='or')}"
