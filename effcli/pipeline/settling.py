"""What is decided about a run before anything is read: device, optimizer, schedule. Cheap checks come first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effcli.devices import activate, check_precision, has_unseen_card, resolve_device, weights_dtype
from effcli.engines.compiling import check_compiles
from effcli.errors import UsageError
from effcli.measure.device_monitor import read_baseline
from effcli.measure.device_samples import Baseline
from effcli.models.attention import check_attention, check_attention_runs
from effcli.models.flags import check_model_flags
from effcli.optim import registry
from effcli.optim.overrides import override_notes
from effcli.pipeline.launching import check_launch, check_savable, check_steps
from effcli.pipeline.ranks import check_on_shares
from effcli.ranks.launch import Launch, read_launch
from effcli.tracking.services import check_services

if TYPE_CHECKING:
    import torch

    from effcli.optim.entry import Hyper, OptimizerEntry
    from effcli.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What is decided before anything is read; `spec` has the schedule that the optimizer bears."""

    spec: RunSpec
    device: torch.device
    entry: OptimizerEntry
    hyper: Hyper
    launch: Launch
    baseline: Baseline | None


def settle(spec: RunSpec) -> Settled:
    """Return device and optimizer; whatever can be refused without reading anything is refused here.

    Raises:
        EffcliError: see `effcli.pipeline.prepare.prepare`.
    """
    quiet_transformers()
    check_services(spec.output.track)
    check_model_flags(spec.model)
    launch = read_launch()
    device = resolve_device(spec.loop.device, launch)
    check_launch(spec, launch)
    baseline = read_baseline(device, interval_s=spec.loop.nvml_interval)
    activate(device)
    check_precision(spec.loop.precision, device)
    if spec.loop.compile:
        check_compiles(device)
    check_attention(spec.model.attn, spec.loop.precision)
    check_attention_runs(spec.model.attn, str(device))
    entry = registry.find(spec.optim.name)
    hyper = registry.resolve_hyper(entry, spec.optim)
    spec = _settle_schedule(spec, entry, hyper)
    registry.check_works(entry, str(device), hyper, weights_dtype(spec.loop.precision))
    if launch.has_many:
        check_on_shares(entry, hyper, spec.loop.shard)
        check_steps(entry, spec.loop.shard, spec.loop.precision)
        check_savable(entry, hyper, spec.loop.shard)
    return Settled(spec=spec, device=device, entry=entry, hyper=hyper, launch=launch, baseline=baseline)


def settings_notes(settled: Settled) -> Iterator[str]:
    """Yield what should be known about the settings themselves."""
    spec, entry = settled.spec, settled.entry
    if spec.loop.device == "auto" and settled.device.type == "cpu" and has_unseen_card():
        yield "torch does not see this machine's NVIDIA card: the run is on the CPU. `effcli doctor` says why."
    yield from override_notes(entry, settled.hyper)
    if spec.uses_builtin_demo:
        yield (
            "This is the built-in demonstration: a small model with random weights on generated sentence pairs. "
            "For your own work give --model and --data."
        )
    if entry.cpu_note and settled.device.type == "cpu":
        yield entry.cpu_note
    if spec.loop.compile:
        yield (
            "--compile: the first batches wait for the compiler. The plan is of the model uncompiled: compiled kernels "
            "may keep less for the backward pass."
        )
    if spec.loop.precision == "bf16-pure":
        yield (
            "bf16-pure keeps no 32-bit copy of the weights: an update below about 0.2 % of a weight is rounded away. "
            "With --precision bf16 small updates count."
        )
    if spec.model.trust_remote_code:
        yield f"Python code that comes with '{spec.model.name}' may run here (--trust-remote-code)."


def quiet_transformers() -> None:
    """Keep progress bars and advice of transformers off the terminal; `quiet_datasets` does so where data is read."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _settle_schedule(spec: RunSpec, entry: OptimizerEntry, hyper: Hyper) -> RunSpec:
    """Return the spec with a constant schedule where the optimizer bears no other.

    Raises:
        UsageError: a schedule or a warm-up was asked for as well.
    """
    bears = entry.schedule(hyper)
    if bears == "any":
        return spec
    loop = spec.loop
    scheduled = "scheduler" in loop.model_fields_set and loop.scheduler != "constant"
    if scheduled or (bears == "own" and loop.warmup_ratio):
        flag = f"--scheduler {loop.scheduler}" if scheduled else f"--warmup-ratio {loop.warmup_ratio}"
        why = "sets its own learning rate" if bears == "own" else "needs a constant learning rate"
        raise UsageError(f"{flag}: '{entry.name}' {why} with these hyperparameters; leave the flag out")
    return spec.model_copy(update={"loop": loop.model_copy(update={"scheduler": "constant"})})
