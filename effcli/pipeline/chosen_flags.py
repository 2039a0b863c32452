"""What to type for a configuration that a search found. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from effcli.estimate_spec import EstimateSpec
from effcli.flags import ESTIMATE_FLAG_OF, FLAG_OF
from effcli.memory.sharding.share import is_zero
from effcli.pipeline.launching import ZERO_ENGINE
from effcli.pipeline.searching import Candidate
from effcli.spec import Section

_SEARCHED = ("model.name", "optim.name")


def chosen_flags(candidate: Candidate, spec: EstimateSpec, name: str, *, learnt: bool) -> list[str]:
    """Return the flags of a configuration with the optimizer `name`, of `effcli train`, or of an estimate.

    Settings that the search was given come last: without them the run would be another.
    """
    length, target_length = spec.data.max_length, spec.data.max_target_length
    flags = ["--optim", name, "--precision", candidate.precision]
    flags += ["--batch-size", str(candidate.batch_size), "--accum", str(candidate.accum)]
    flags += ["--max-length", str(length)] if length else []
    flags += ["--max-target-length", str(target_length)] if target_length else []
    flags += ["--gradient-checkpointing"] if candidate.recompute else []
    flags += ["--shard", candidate.shard] if candidate.shard != "ddp" else []
    flags += ["--engine", ZERO_ENGINE] if learnt and is_zero(candidate.shard) else []
    given = {**_given("model", spec.model), **_given("optim", spec.optim[candidate.optimizer])}
    if spec.loop.max_grad_norm != type(spec.loop)().max_grad_norm:
        given["loop.max_grad_norm"] = spec.loop.max_grad_norm
    known = FLAG_OF if learnt else {**FLAG_OF, **ESTIMATE_FLAG_OF}
    for dotted, value in given.items():
        if dotted in known and dotted not in _SEARCHED:
            flags += _typed(known[dotted], value)
    return [shlex.quote(word) for word in flags]


def _given(section: str, settings: Section) -> dict[str, Any]:
    """Return the settings of a section that are not its defaults, by dotted name."""
    fields = type(settings).model_fields
    values = {name: (getattr(settings, name), fields[name].get_default(call_default_factory=True)) for name in fields}
    return {f"{section}.{name}": value for name, (value, usual) in values.items() if value != usual}


def _typed(flag: str, value: Any) -> Iterator[str]:
    """Yield the words that set a flag, which is repeated for each of several values."""
    if value is True:
        yield flag
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, Mapping):  # a pattern with settings of its own
                settings = ",".join(f"{name}={setting}" for name, setting in inner.items())
                yield from (flag, f"{key}:{settings}")
            else:
                yield from (flag, f"{key}={inner}")
    elif isinstance(value, tuple):
        for inner in value:
            yield from (flag, str(inner))
    else:
        yield from (flag, str(value))
