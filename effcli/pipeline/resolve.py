"""Layers of settings -> one `RunSpec`: defaults < demonstration < recipe < --set < flags."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from effcli.data.builtin import DEMO_LOOP
from effcli.files import at_home
from effcli.optim.registry import find
from effcli.recipes import overlay, parse_set, read_recipe
from effcli.run_folder import saved_recipe
from effcli.setting_texts import dotted
from effcli.spec import OptimSpec, RunSpec, build_spec

CONTINUED = {
    "loop.epochs",
    "loop.max_steps",
    "loop.batch_size",
    "loop.accum",
    "loop.auto_batch",
    "loop.eval_batch_size",
    "loop.num_workers",
    "loop.nvml_interval",
    "loop.device",
    "loop.engine",
    "loop.shard",
    "loop.compile",
    "loop.profile_memory",
    "loop.gradient_checkpointing",
    "data.eval",
    "output.out",
    "output.save_every",
    "output.keep",
    "output.logging_steps",
    "output.track",
    "output.tolerance",
}
"""Fields that may change when a run is resumed. Every other one changes what is learnt; so does the window, which is
recomputed: see `effcli.engines.window_schedule`. Activations that are recomputed draw the same dropout."""

PLACES = {"model.name", "data.train"}
"""Of the others, those that may name a path."""


def resolve_spec(
    flags: Mapping[str, Any], *, recipe: str | None = None, sets: Sequence[str] = (), resume_from: str | None = None
) -> RunSpec:
    """Return the specification that flags (nested sections), a recipe and `a.b=c` texts add up to.

    `resume_from` is a run folder whose saved specification lies below all of these.

    Raises:
        UsageError: an unknown key, a value that is not allowed, or an unknown recipe.
    """
    layers: list[Mapping[str, Any]] = []
    if resume_from is not None:
        layers += [read_recipe(str(saved_recipe(resume_from))), {"output": {"out": resume_from}}]
    if recipe is not None:
        layers.append(read_recipe(recipe))
    layers += [parse_set(text) for text in sets]
    layers.append(flags)
    given = overlay(*layers)
    build_spec(given)  # so that what follows reads values of the right kind
    return build_spec(overlay(_demonstration(given), given))


def _demonstration(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the built-in model, and with the built-in data those of the whole demonstration.

    The learning rate belongs to a model trained from random weights, on the scale of AdamW; an optimizer whose rate
    has another meaning keeps its own default.
    """
    if (given.get("model") or {}).get("name") is not None:
        return {}
    optim = given.get("optim") or {}
    entry = find(optim.get("name") or OptimSpec().name)
    like_adamw = entry.defaults.get("lr") == find("adamw").defaults["lr"]
    relative = str((optim.get("args") or {}).get("relative_step", False)).lower() != "false"
    own_rate = relative or entry.schedule(entry.defaults) == "own"
    layer: dict[str, Any] = {"optim": {"lr": DEMO_LOOP["lr"]}} if like_adamw and not own_rate else {}
    if (given.get("data") or {}).get("train") is not None:
        return layer
    loop = {key: DEMO_LOOP[key] for key in ("batch_size", "epochs", "profile_memory")}
    if not own_rate:
        loop["warmup_ratio"] = DEMO_LOOP["warmup_ratio"]
    return {**layer, "loop": loop, "data": {"max_length": DEMO_LOOP["max_length"]}}


def changed_fields(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, may_change: Collection[str] = CONTINUED
) -> list[str]:
    """Return the dotted fields that differ between two dumped specifications and may not, as when a run is resumed."""
    values, before = dotted(now, depth=2), dotted(saved, depth=2)
    return [
        name for name, value in values.items() if name not in may_change and not _same(name, before.get(name), value)
    ]


def _same(name: str, saved: Any, now: Any) -> bool:
    """Return whether two values of a field are one; another spelling of a path on this machine is."""
    if saved == now or name not in PLACES or saved is None or now is None:
        return bool(saved == now)
    one, other = (at_home(str(place)) for place in (saved, now))
    return one.exists() and other.exists() and one.samefile(other)
