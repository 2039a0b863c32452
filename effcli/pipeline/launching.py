"""What a launch of several processes can train, refused before anything is read where it can't."""

from __future__ import annotations

from effcli.errors import UsageError
from effcli.ranks.launch import Launch
from effcli.spec import RunSpec


def check_launch(spec: RunSpec, launch: Launch) -> None:
    """Refuse settings that mean something else, or nothing, with as many processes.

    Raises:
        UsageError: they do.
    """
    loop = spec.loop
    if not launch.has_many:
        if loop.shard != "ddp":
            raise UsageError(
                f"--shard {loop.shard} needs several processes, and there is one; start with "
                "torchrun --nproc-per-node 2 -m effcli train, or leave --shard out"
            )
        return
    if loop.auto_batch:
        raise UsageError(
            f"--auto-batch with {launch.world_size} processes: memory may run out in one alone; leave it out, and give "
            "a smaller --batch-size with a larger --accum"
        )
    if loop.shard == "fsdp":
        _check_fsdp(spec)
    elif loop.shard != "ddp":
        raise UsageError(
            f"--shard {loop.shard}: training with DeepSpeed is not possible yet, effcli estimate says what it would "
            "hold; use --shard fsdp, which shards the same"
        )


def _check_fsdp(spec: RunSpec) -> None:
    """Refuse what FSDP2 does not do here.

    Raises:
        UsageError: see `check_launch`.
    """
    loop = spec.loop
    if loop.precision == "fp16":
        raise UsageError(
            "--shard fsdp with --precision fp16: the gradient scaler is for whole gradients; use bf16 or fp32"
        )
    if loop.compile:
        raise UsageError("--shard fsdp with --compile: layers are gathered outside of what is compiled; leave one out")
