"""Training under DeepSpeed's ZeRO in two processes, beside the same under DDP; what is refused before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from effcli.errors import MissingExtraError, UsageError
from effcli.optim.registry import default_hyper, find
from effcli.pipeline.launching import check_launch, check_savable
from effcli.pipeline.settling import settle
from effcli.ranks.launch import Launch
from effcli.spec import RunSpec, build_spec
from tests.test_sharding_zero import needs_deepspeed

TWO = Launch(world_size=2, rank=0, local_rank=0, local_world_size=2)


def spec(**loop: Any) -> RunSpec:
    return build_spec({"loop": {"shard": "zero2", "engine": "accelerate", **loop}})


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        ({"engine": "pytorch"}, "--shard zero2 runs through accelerate alone; add --engine accelerate"),
        ({"engine": "trainer"}, "--shard zero2 runs through accelerate alone; add --engine accelerate"),
        ({"precision": "fp16"}, "--shard zero2 with --precision fp16"),
        ({"precision": "bf16-pure"}, "--shard zero2 with --precision bf16-pure"),
        ({"compile": True}, "--shard zero2 with --compile"),
        ({"percentile_clipping": 5.0}, "--shard zero2 with --percentile-clipping"),
    ],
)
def test_what_deepspeed_would_do_otherwise_is_refused(
    loop: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("effcli.packages.is_installed", lambda package: True)
    with pytest.raises(UsageError, match=reason):
        check_launch(spec(**loop), TWO)


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effcli.packages.is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"--shard zero2 needs .*'effcli\[deepspeed\]'"):
        check_launch(spec(), TWO)


def test_state_in_few_bits_is_not_trained_in_flat_partitions() -> None:
    entry = find("adamw8bit")
    with pytest.raises(UsageError, match=r"adamw8bit.*blocks of few bits"):
        check_savable(entry, default_hyper(entry), "zero1")
    check_savable(entry, default_hyper(entry), "ddp")
    check_savable(find("adamw"), default_hyper(find("adamw")), "zero1")


def test_names_mean_nothing_to_flat_partitions_and_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("effcli.packages.is_installed", lambda package: True)
    monkeypatch.setattr("effcli.pipeline.settling.read_launch", lambda: TWO)
    optim = {"name": "adamw", "overrides": {"embed": {"lr": 0.1}}}
    loop = {"shard": "zero1", "engine": "accelerate", "device": "cpu"}
    with pytest.raises(UsageError, match="--override 'embed': with --shard zero1"):
        settle(build_spec({"loop": loop, "optim": optim}))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deepspeed_trains_what_ddp_trains_and_goes_on_from_its_state(tmp_path: Path) -> None:
    """Losses and norms to 1e-6, weights to 1e-6 with SGD and to a hundredth of rate times updates with AdamW."""
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.deepspeed_jobs"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(file)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(file.read_text(encoding="utf-8"))
    assert len(found) == 12
    for run in found:
        optimizer = run["case"][1]
        for key in ("losses", "norms"):
            expected, got = run[key]
            assert got == pytest.approx(expected, rel=1e-6), run["case"]
        assert run["rates"][0] == run["rates"][1]
        assert run["weights"] < (1e-6 if optimizer == "sgd" else 0.01 * 1e-3 * 6), run["case"]
        assert run["entries"][0] == run["entries"][1]
        assert run["groups"][0] == run["groups"][1]
