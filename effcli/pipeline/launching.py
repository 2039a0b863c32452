"""What a launch of several processes can train, refused before anything is read where it can't."""

from __future__ import annotations

from collections.abc import Iterator

from effcli.errors import UsageError
from effcli.memory.sharding.share import is_zero
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.packages import require_installed
from effcli.ranks.launch import Launch, read_launch, restarts
from effcli.spec import Engine, RunSpec, Shard

ZERO_ENGINE: Engine = "accelerate"
"""The engine that trains under a mode of DeepSpeed."""


def check_launch(spec: RunSpec, launch: Launch) -> None:
    """Refuse settings that mean something else, or nothing, with as many processes.

    Raises:
        UsageError: they do.
        MissingExtraError: DeepSpeed is not there.
    """
    loop = spec.loop
    if not launch.has_many:
        if loop.shard != "ddp":
            raise UsageError(
                f"--shard {loop.shard} needs several processes, and there is one; start with "
                "torchrun --nproc-per-node 2 -m effcli train, or give --shard ddp"
            )
        return
    if loop.auto_batch:
        raise UsageError(
            f"--auto-batch with {launch.world_size} processes: memory may run out in one alone; leave it out, and give "
            "a smaller --batch-size with a larger --accum"
        )
    if loop.shard == "ddp":
        return
    if fault := precision_fault(loop.shard, loop.precision):
        raise UsageError(f"{fault}; use bf16 or fp32")
    if loop.shard != "fsdp":
        _check_zero(spec)
    elif loop.compile:
        raise UsageError("--shard fsdp with --compile: layers are gathered outside of what is compiled; leave one out")


def check_restart(*, resume: bool) -> None:
    """Refuse processes that torchrun has started again, unless they go on.

    Raises:
        UsageError: they would begin anew, or are on several machines, which torchrun tells different counts of starts.
    """
    if not restarts():
        return
    again, launch = "torchrun has started the processes again (--max-restarts)", read_launch()
    if launch.local_world_size < launch.world_size:
        raise UsageError(f"{again}, which needs one machine; leave that out, and start all again with --resume")
    if not resume:
        raise UsageError(
            f"{again}, and they would train from the beginning; start the same command with --resume, with which they "
            "go on from the last checkpoint whenever they are started"
        )


def precision_fault(shard: Shard, precision: str) -> str | None:
    """Return why shards of a kind are not trained in a precision, as a sentence's beginning; None where they are."""
    if shard == "fsdp" and precision == "fp16":
        return "--shard fsdp with --precision fp16: the gradient scaler is for whole gradients"
    if is_zero(shard) and precision not in ("fp32", "bf16"):
        return (
            f"--shard {shard} with --precision {precision}: DeepSpeed keeps 32-bit weights and scales by rules of its "
            "own"
        )
    return None


def _check_zero(spec: RunSpec) -> None:
    """Refuse what DeepSpeed does not do here.

    Raises:
        UsageError, MissingExtraError: see `check_launch`.
    """
    loop, flag = spec.loop, f"--shard {spec.loop.shard}"
    if loop.engine != ZERO_ENGINE:
        raise UsageError(f"{flag} runs through accelerate alone; add --engine {ZERO_ENGINE}, or take --shard fsdp")
    require_installed("deepspeed", flag, pip="'effcli[deepspeed]'")
    if loop.compile:
        raise UsageError(f"{flag} with --compile: DeepSpeed works by hooks on every module; leave one out")
    if loop.percentile_clipping is not None:
        raise UsageError(f"{flag} with --percentile-clipping: DeepSpeed clips by itself; use --max-grad-norm alone")


def step_fault(entry: OptimizerEntry, shard: Shard, precision: str) -> str | None:
    """Return why an optimizer does not step shards in a precision, as a sentence's beginning; None where it does."""
    if shard == "fsdp" and precision == "bf16-pure" and entry.package == "torchao":
        return (
            f"optimizer '{entry.name}' with --shard fsdp and --precision bf16-pure: torchao 0.18 combines its moments "
            "with float32 gradients, which torch 2.13 refuses on shards of bf16 weights"
        )
    return None


def check_steps(entry: OptimizerEntry, shard: Shard, precision: str) -> None:
    """Refuse an optimizer whose first step would fail.

    Raises:
        UsageError: see `step_fault`.
    """
    if fault := step_fault(entry, shard, precision):
        raise UsageError(f"{fault}; use --precision bf16, --shard ddp, or adamw")


def saving_fault(entry: OptimizerEntry, hyper: Hyper, shard: Shard) -> str | None:
    """Return why no run could go on from a checkpoint, as a sentence's beginning; None where one can.

    Blocks of few bits lie across parameters in a flat partition.
    """
    if is_zero(shard) and (hyper.get("optim_bits") == 8 or entry.package == "torchao"):
        return (
            f"optimizer '{entry.name}' with --shard {shard}: its blocks of few bits lie across parameters, so that no "
            "checkpoint could be taken apart"
        )
    return None


def training_faults(entry: OptimizerEntry, hyper: Hyper, shard: Shard, precision: str) -> Iterator[str]:
    """Yield why an optimizer is not trained on shards of a kind, as a sentence's beginning; nothing where it is."""
    faults = (precision_fault(shard, precision), step_fault(entry, shard, precision), saving_fault(entry, hyper, shard))
    yield from filter(None, faults)


def check_savable(entry: OptimizerEntry, hyper: Hyper, shard: Shard) -> None:
    """Refuse state from which no checkpoint could be made that another number of processes can go on from.

    Raises:
        UsageError: see `saving_fault`.
    """
    if fault := saving_fault(entry, hyper, shard):
        raise UsageError(f"{fault}; effcli estimate says what it would hold. Use adamw or another optimizer in 32 bits")
