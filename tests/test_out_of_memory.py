"""Memory that runs out is explained: where, what was planned there, what was measured, and what would fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli.errors import OutOfMemoryError
from effcli.measure.device_record import OthersFacts
from effcli.measure.out_of_memory_record import BatchSizes, OutOfMemoryFacts
from effcli.memory.plan import Change
from effcli.pipeline.running.guards import explained_out_of_memory
from effcli.pipeline.running.out_of_memory import RunOutOfMemoryError
from tests.commands import effcli
from tests.full_memory import CPU_ALLOCATOR, CUDA_ALLOCATOR, no_memory_above, no_memory_in
from tests.nvml.standin import Driver
from tests.watched import CARD, FakeCounters, believe_in_a_device

PARTS = ("weights_bytes", "gradients_bytes", "optimizer_state_bytes", "activations_bytes", "temporaries_bytes")

FACTS = OutOfMemoryFacts(
    device="cuda:0", doing="backward", update=1, sizes=BatchSizes(micro=1, accum=1, eval_batch=1), rows=1, tokens=8,
    peak_allocated_bytes=900, peak_reserved_bytes=900, peak_rss_bytes=1, available_bytes=0, error="",
)  # fmt: skip


@pytest.fixture
def run(distilbert: Path, tmp_path: Path) -> tuple[object, ...]:
    """Return a run of 128 rows of 50 tokens, evaluated: with 64 at once activations are most of what it takes."""
    data = tmp_path / "long.csv"
    data.write_text("text,label\n" + "".join(f"{'word ' * 48},{index % 2}\n" for index in range(128)))
    return ("train", distilbert, "--data", data, "--eval-data", data, "--epochs", 1, "--out", tmp_path / "run")


def record_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


@pytest.mark.parametrize(
    ("engine", "kind", "said"),
    [
        ("pytorch", torch.OutOfMemoryError, CUDA_ALLOCATOR),
        pytest.param("accelerate", RuntimeError, CPU_ALLOCATOR, marks=pytest.mark.slow),
        pytest.param("trainer", MemoryError, "no more", marks=pytest.mark.slow),
    ],
)
def test_the_plan_at_the_failing_shape_and_a_change_that_fits_are_said(
    engine: str,
    kind: type[Exception],
    said: str,
    run: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_memory_above(monkeypatch, 2, lambda: kind(said))
    failed = effcli(*run, "--batch-size", 64, "--engine", engine)
    assert failed.code == 5
    assert failed.error.startswith("out of memory on cpu in the forward pass of update 1 with 64 rows of 50 tokens")
    assert failed.error.endswith(f"The allocator said: {said}")
    record = record_in(tmp_path / "run")
    assert (record["status"], record["failure"]) == ("failed", failed.error)
    (facts,) = record["out_of_memory"]
    assert (facts["rows"], facts["tokens"], facts["doing"], facts["update"]) == (64, 50, "forward", 1)
    assert sum(facts["planned"][part] for part in PARTS) == facts["planned"]["total_bytes"]
    assert facts["planned"]["weights_bytes"] == record["model"]["weights_bytes"]
    assert facts["peak_rss_bytes"] > 2**26
    assert facts["available_bytes"] > 0
    assert not (tmp_path / "run" / "model").exists()
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_ALLOCATOR),
        RuntimeError(CPU_ALLOCATOR),
        RuntimeError("CUDA error: out of memory\nCompile with"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"),
        MemoryError("no more"),
    ],
    ids=str,
)
def test_every_allocators_words_are_understood_and_other_errors_are_not(error: Exception) -> None:
    heard: list[str] = []

    def explain(words: str) -> OutOfMemoryFacts:
        heard.append(words)
        return FACTS

    with pytest.raises(OutOfMemoryError), explained_out_of_memory(explain):
        raise error
    assert heard == [str(error).splitlines()[0]]
    with pytest.raises(RuntimeError, match="a bug"), explained_out_of_memory(explain):
        raise RuntimeError("a bug")


def test_the_change_that_is_said_needs_less_than_the_shape_that_failed(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory_above(monkeypatch, 2)
    failed = effcli(*run, "--batch-size", 64)
    (facts,) = record_in(tmp_path / "run")["out_of_memory"]
    flags = failed.error.partition("cheapest change that should fit is ")[2].split()
    micro, accum = int(flags[1]), int(flags[3])
    assert micro * accum == 64
    planned = effcli(*run[:-2], "--batch-size", micro, "--accum", accum, "--out", tmp_path / "b", "--dry-run", "--json")
    need = planned.record["optimizer"]["plan"]["device_total_bytes"]
    assert need <= facts["budget_bytes"] < facts["planned"]["total_bytes"]


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("backward", "in the backward pass of update 1 with 64 rows of 50 tokens"),
        ("step", "in the optimizer's step of update 1 with 64 rows of 50 tokens"),
        ("evaluation", "in the evaluation after update 2 with 64 rows of 50 tokens"),
    ],
)
def test_the_part_of_the_update_is_named(
    moment: str, said: str, run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory_in(monkeypatch, moment)
    failed = effcli(*run, "--batch-size", 64)
    assert failed.code == 5
    assert f"out of memory on cpu {said}" in failed.error
    if moment == "evaluation":
        assert "Use --eval-batch-size 32." in failed.error
        assert record_in(tmp_path / "run")["out_of_memory"][0]["planned"] is None
    else:
        assert "Planned there: " in failed.error


def test_an_evaluation_larger_than_the_training_is_told_to_take_as_many_rows(
    run: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory_in(monkeypatch, "evaluation")
    failed = effcli(*run, "--batch-size", 2, "--eval-batch-size", 12)
    assert failed.code == 5
    assert "with 12 rows of 50 tokens" in failed.error
    assert "Use --eval-batch-size 2, as many rows as the training takes at once" in failed.error


def test_memory_that_runs_out_while_the_model_is_loaded_touches_no_folder(
    run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory_in(monkeypatch, "loading")
    failed = effcli(*run)
    assert failed.code == 5
    assert "out of memory on cpu while the model was loaded" in failed.error
    assert "The weights alone take 544.76 KiB" in failed.error
    assert not (tmp_path / "run").exists()


GIB = 2**30
CROWDED = f"card {CARD} NVIDIA H100\nmemory {80 * GIB} {79 * GIB} {GIB}\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"{CROWDED}process self {70 * GIB}\nprocess 645400 {9 * GIB}", "other processes hold 9.00 GiB of the card"),
        (f"{CROWDED}process 645400 {9 * GIB}", "79.00 GiB of the card are in use in all"),
        (f"{CROWDED}fail * 15 after 3", None),
        (f"{CROWDED}fail nvmlInit 9", None),
    ],
    ids=["others", "a container", "lost", "no driver"],
)
def test_what_other_processes_hold_of_the_card_is_said_where_the_driver_tells(
    script: str,
    said: str | None,
    driver: Driver,
    run: tuple[object, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver.play(script)
    believe_in_a_device(monkeypatch, FakeCounters(700, 900))
    no_memory_in(monkeypatch, "loading")
    failed = effcli(*run)
    assert failed.code == 5
    measured = failed.error.partition("Measured: ")[2].partition(". The weights")[0]
    assert ("of the card" in measured) is (said is not None)
    assert measured.endswith(f" free now, {said}" if said else " free now")
    assert driver.num_open() == 0


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (OthersFacts(num_bytes=0, device_bytes=9), "0 B free now, other processes hold nothing of the card."),
        (
            OthersFacts(num_bytes=GIB, device_bytes=GIB, with_driver=True),
            "0 B free now, other processes and the driver hold 1.00 GiB of the card.",
        ),
        (OthersFacts(reason="no driver"), "0 B free now."),
        (None, "0 B free now."),
    ],
)
def test_nothing_is_said_of_others_that_is_not_known(others: OthersFacts | None, said: str) -> None:
    assert said in str(RunOutOfMemoryError(FACTS.model_copy(update={"others": others, "advice": "buy a card"})))


def test_the_record_of_a_run_that_ran_out_of_memory_keeps_what_others_held(
    driver: Driver, run: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.play(f"{CROWDED}process self {70 * GIB}")
    believe_in_a_device(monkeypatch, FakeCounters(700, 900))
    no_memory_above(monkeypatch, 2)
    failed = effcli(*run, "--batch-size", 64)
    assert failed.code == 5
    (facts,) = record_in(tmp_path / "run")["out_of_memory"]
    assert facts["others"] == {"num_bytes": 9 * GIB, "device_bytes": 79 * GIB, "with_driver": False, "reason": None}
    assert "other processes hold 9.00 GiB of the card" in failed.error


def test_a_device_that_no_longer_answers_is_no_second_fault(
    run: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    no_memory_in(monkeypatch, "loading")
    monkeypatch.setattr("effcli.pipeline.running.out_of_memory.available_bytes", fail)
    failed = effcli(*run)
    assert failed.code == 5
    assert "while the model was loaded" in failed.error
    assert "free now" not in failed.error


def test_changes_are_put_together_where_none_is_enough_and_nothing_is_promised_where_all_are_not() -> None:
    from effcli.memory.plan import MemoryPlan
    from effcli.pipeline.run_plan import FailurePlan
    from effcli.pipeline.running.out_of_memory import training_advice

    def change(flags: str, peak: int) -> Change:
        return Change(name="", flags=flags, peak_allocated_bytes=peak, saved_bytes=1000 - peak, peak_phase="step")

    alone, together = change("--gradient-checkpointing", 800), change("--gradient-checkpointing --optim x8bit", 500)

    def advice(budget: int) -> str:
        plan = MemoryPlan(
            phases={}, basis={}, peak_allocated_bytes=1000, device_total_bytes=1000, budget_bytes=budget,
            largest_batch_size=0, changes=(alone,),
        )  # fmt: skip
        return training_advice(FACTS, FailurePlan(there=plan, whole=plan, combined=(together,)))

    assert advice(900) == "the cheapest change that should fit is --gradient-checkpointing"
    assert advice(800) == advice(900)  # it saves just what is lacking
    assert advice(600) == (
        "no single change would be enough; together these should fit: --gradient-checkpointing --optim x8bit"
    )
    assert advice(400).startswith(
        "none of the changes of batch and optimizer that were tried fits, even --gradient-checkpointing --optim x8bit "
        "takes 500 B; use a shorter"
    )
    together = change("--batch-size 1 --accum 1", 1000)
    assert advice(400).startswith("none of the changes of batch and optimizer that were tried fits; use a shorter")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_an_address_space_that_is_really_full_is_explained(distilbert: Path, tmp_path: Path) -> None:
    data = tmp_path / "long.csv"
    data.write_text("text,label\n" + "".join(f"{'word ' * 60},{index % 2}\n" for index in range(4096)))
    code = (
        "import resource, sys, transformers, torch, accelerate, datasets; from effcli.__main__ import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 1_500_000_000,) * 2)\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", distilbert, "--data", data, "--batch-size", "4096", "--max-steps", "1",
         "--out", tmp_path / "run"],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert "This will not fit" in done.stderr
    assert "can't allocate memory" in done.stderr.splitlines()[-1]
    assert "cheapest change that should fit is --batch-size " in done.stderr.splitlines()[-1]
