"""The context of a card is learnt from what runs on such a card measured, and takes the place of the assumed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli import pipeline
from effcli.history.context import context_for
from effcli.history.remember import remember
from effcli.pipeline import facts
from effcli.pipeline.prepare import prepare
from effcli.pipeline.run_plan import RunPlanner
from effcli.report.progress import QuietProgress
from tests import cuda_records, histories
from tests.commands import TINY_DISTILBERT, Result, csv_file, effcli, model_folder
from tests.cuda_records import MIB, amount, nvml
from tests.histories import line
from tests.nvml.standin import Driver
from tests.watched import CARD, FakeCounters, believe_in_a_device

ASSUMED = 504_658_657
INSTALLED = version("torch")
SMALL = ("--batch-size", 4, "--max-length", 16, "--json")


@pytest.fixture
def learnt_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return what makes a history of these lines, the oldest first."""

    def write(*lines: dict[str, Any] | str) -> Path:
        path = histories.write(tmp_path / "h.jsonl", *lines)
        monkeypatch.setenv("EFFCLI_HISTORY", str(path))
        return path

    return write


@pytest.fixture(scope="module")
def distilbert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFCLI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield model_folder(tmp_path_factory.mktemp("model"), TINY_DISTILBERT)


def plan_of(result: Result) -> dict[str, Any]:
    plan: dict[str, Any] = result.record["optimizers"][0]["plan"]
    return plan


def test_an_estimate_takes_what_runs_on_the_card_measured_and_says_so(
    distilbert: Path, learnt_from: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(history: object, *flags: str) -> dict[str, Any]:
        monkeypatch.setenv("EFFCLI_HISTORY", str(history))
        return plan_of(effcli("estimate", distilbert, "--optim", "sgd", *SMALL, *flags))

    on_card = ("--gpu", "rtx-4090")
    before = asked(learnt_from(), *on_card)
    assert (before["context_bytes"], before["basis"]["context"], before["context_source"]) == (ASSUMED, "assumed", None)
    path = learnt_from(line(context_mib=600), line(context_mib=640), line(context_mib=620, date="2030-02-01T00:00:00Z"))
    after = asked(path, *on_card)
    assert after["context_bytes"] == 640 * MIB
    assert after["basis"]["context"] == "learnt"
    assert after["context_source"] == ("learnt from 3 runs on this card with torch 2.9.0+cu130, the last on 2030-02-01")
    more = 640 * MIB - ASSUMED
    assert after["device_total_bytes"] == before["device_total_bytes"] + more
    assert after["device_total_bytes"] == after["peak_reserved_bytes"] + after["context_bytes"]
    same = ("peak_allocated_bytes", "peak_reserved_bytes", "budget_bytes", "phases")
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert after["largest_batch_size"] < before["largest_batch_size"]
    assert asked(path, "--budget", "rtx-4090")["context_bytes"] == 640 * MIB
    assert asked(path, *on_card, "--budget", "8GiB")["context_bytes"] == 640 * MIB
    for flags in (("--gpu", "24GiB"), ("--gpu", "rtx-3090"), ("--device", "cuda")):
        plan = asked(path, *flags)
        assert (plan["context_bytes"], plan["context_source"]) == (ASSUMED, None)
    assert asked(path, "--device", "cpu")["context_bytes"] == 0
    assert asked("off", *on_card) == before


def test_the_table_of_an_estimate_shows_what_the_context_was_learnt_from(
    distilbert: Path, learnt_from: Callable[..., Path]
) -> None:
    learnt_from(line(context_mib=600))
    said = effcli("estimate", distilbert, "--optim", "sgd", *SMALL[:-1], "--gpu", "rtx-4090").stdout
    assert (
        "context     600.00 MiB (learnt from 1 run on this card with torch 2.9.0+cu130,\n"
        "            the last on 2030-01-31): CUDA itself and the kernels it loads\n"
    ) in said


def test_a_search_for_what_fits_takes_it_too(distilbert: Path, learnt_from: Callable[..., Path]) -> None:
    flags = ("plan", distilbert, "--gpu", "rtx-4090", "--optim", "sgd", "--precision", "fp32", "--effective-batch", 4)
    learnt_from()
    before = effcli(*flags, "--json").record
    assert (before["context_bytes"], before["context_basis"], before["context_source"]) == (ASSUMED, "assumed", None)
    assert "the allocator's reserve (traced), CUDA (assumed)" in " ".join(effcli(*flags).stdout.split())
    learnt_from(line(context_mib=1000))
    after = effcli(*flags, "--json").record
    assert (after["context_bytes"], after["context_basis"]) == (1000 * MIB, "learnt")
    needs = [[found["device_total_bytes"] for found in record["configurations"]] for record in (before, after)]
    assert needs[1] == [need + 1000 * MIB - ASSUMED for need in needs[0]]
    assert "CUDA (learnt from 1 run on this card" in " ".join(effcli(*flags).stdout.split())


@pytest.mark.parametrize(
    ("free_mib", "whole_mib", "budget_mib", "fits"),
    [
        (900, 24_000, None, None),  # it fits in what is free and what the context takes by now
        (500, 760, 760, "tight"),  # the context that is there is no more than what is in use
        (100, 24_000, 800, "tight"),
    ],
)
def test_the_plan_of_a_run_takes_the_context_of_its_device(
    free_mib: int, whole_mib: int, budget_mib: int | None, fits: str | None,
    distilbert: Path, learnt_from: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    learnt_from(line(context_mib=700, torch=INSTALLED), line(context_mib=900, card="NVIDIA H200", torch=INSTALLED))
    monkeypatch.setattr("effcli.pipeline.settling.resolve_device", lambda name, launch: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_mib * MIB, whole_mib * MIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    spec = pipeline.resolve_spec(
        {
            "model": {"name": str(distilbert)},
            "data": {"train": str(csv_file(tmp_path / "d.csv"))},
            "optim": {"name": "sgd"},
        }
    )
    prepared = prepare(spec, QuietProgress())
    plan = RunPlanner(prepared).plan(prepared, QuietProgress())
    assert plan is not None
    assert plan.context_bytes == 700 * MIB
    assert plan.basis["context"] == "learnt"
    assert plan.context_source == f"learnt from 1 run on this card with torch {INSTALLED}, the last on 2030-01-31"
    assert plan.device_total_bytes == plan.peak_reserved_bytes + 700 * MIB
    assert (plan.budget_bytes, plan.fits) == (budget_mib and budget_mib * MIB, fits)


@pytest.mark.usefixtures("without_plan")
def test_what_a_run_measured_is_what_the_next_estimate_for_its_card_takes(
    distilbert: Path, learnt_from: Callable[..., Path], driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment(prepared: Any, out: str | None) -> dict[str, Any]:
        return {**known(prepared, out), "device": "cuda:0", "device_name": "NVIDIA GeForce RTX 4090"}

    learnt_from()
    known = facts.environment
    monkeypatch.setattr(facts, "environment", environment)
    believe_in_a_device(monkeypatch, FakeCounters(1000 * MIB, 1200 * MIB))
    driver.play(
        f"""
        card {CARD} NVIDIA GeForce RTX 4090
        memory {24_000 * MIB} {3000 * MIB} {300 * MIB}
        process self {1866 * MIB}
        """
    )
    run = ("train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--max-steps", 1, "--out", tmp_path / "out")
    assert effcli(*run).code == 0
    plan = plan_of(effcli("estimate", distilbert, "--optim", "sgd", *SMALL, "--gpu", "rtx-4090"))
    assert plan["context_bytes"] == (1866 - 1200) * MIB
    assert plan["context_source"].startswith(f"learnt from 1 run on this card with torch {INSTALLED}, the last on ")


HERE = {"torch": INSTALLED}
RULES = {
    "the largest of several": ([600, 640, 620], 640),
    "of the last ten alone": ([900, *[600] * 9, 610], 610),
    "the tenth but last is among them": ([900, *[600] * 9], 900),
    "nothing before the first run": ([], None),
}


@pytest.mark.parametrize("rule", RULES)
def test_it_is_the_largest_of_the_last_ten_runs(rule: str, learnt_from: Callable[..., Path]) -> None:
    contexts, expected = RULES[rule]
    learnt_from(*(line(context_mib=mib, **HERE) for mib in contexts))
    found = context_for("rtx-4090")
    assert (found.num_bytes, found.basis) == ((expected * MIB, "learnt") if expected else (ASSUMED, "assumed"))


def test_runs_with_the_torch_that_is_installed_count_alone_where_there_are_any(
    learnt_from: Callable[..., Path],
) -> None:
    others = [line(context_mib=900, torch="2.8.0+cu128"), line(context_mib=950, torch="2.7.1+cu126")]
    learnt_from(*others)
    found = context_for("rtx-4090")
    assert found.num_bytes == 950 * MIB
    assert found.source == "learnt from 2 runs on this card with other versions of torch, the last on 2030-01-31"
    learnt_from(line(context_mib=600, date="2029-12-24T12:00:00+00:00", **HERE), *others * 10)
    found = context_for("rtx-4090")
    assert found.num_bytes == 600 * MIB
    assert found.source == f"learnt from 1 run on this card with torch {INSTALLED}, the last on 2029-12-24"


UNFIT = {
    "no context": line(context_mib=None),
    "read of the whole device": line(context_how="the whole device less what was in use before this run"),
    "nothing": line(context_mib=0),
    "too little": line(context_mib=20),
    "too much": line(context_mib=5000),
    "another card": line(card="NVIDIA GeForce RTX 3090"),
    "a part of a card": line(card="NVIDIA GeForce RTX 4090 MIG 1g.5gb"),
    "a laptop's card": line(card="NVIDIA GeForce RTX 4090 Laptop GPU"),
    "an unknown card": line(card="Graphics Device"),
    "a CPU": line(card=None, device="cpu"),
    "rubbish": '{"card": "NVIDIA GeForce RTX 4090", "context"',
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_nothing_is_learnt_of_what_is_no_context_of_this_card(unfit: str, learnt_from: Callable[..., Path]) -> None:
    learnt_from(UNFIT[unfit])
    assert context_for("rtx-4090").basis == "assumed"
    learnt_from(line(context_mib=600), *[UNFIT[unfit]] * 20)
    assert context_for("rtx-4090").num_bytes == 600 * MIB


@pytest.mark.parametrize(
    ("card", "torchs_name", "same"),
    [
        ("rtx-4090", "NVIDIA GeForce RTX 4090", True),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", True),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", True),
        ("a100-80gb", "NVIDIA A100 80GB PCIe", True),
        ("a100-40gb", "NVIDIA A100-SXM4-80GB", False),
        ("rtx-3080-12gb", "NVIDIA GeForce RTX 3080", True),  # which of the two it is torch's name leaves open
        ("rtx-3080-10gb", "NVIDIA GeForce RTX 3080", True),
        ("rtx-3080-10gb", "NVIDIA GeForce RTX 3080 Ti", False),
        ("h100-sxm", "NVIDIA H100 80GB HBM3", True),
        ("h100-pcie", "NVIDIA H100 80GB HBM3", False),
        ("NVIDIA Graphics Device", "NVIDIA Graphics Device", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", True),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM4-40GB", False),
    ],
)
def test_a_card_is_known_again_under_the_names_that_people_and_torch_give_it(
    card: str, torchs_name: str, same: bool, learnt_from: Callable[..., Path]
) -> None:
    learnt_from(line(context_mib=600, card=torchs_name))
    assert (context_for(card).basis == "learnt") == same


LEARNT = {"whole", "peak in the backward phase", "highest in the evaluation", "other moments"}


@pytest.mark.parametrize("kind", cuda_records.ALL)
def test_only_runs_whose_context_the_driver_told_for_the_process_itself_teach_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFCLI_HISTORY", str(tmp_path / "h.jsonl"))
    run = cuda_records.ALL[kind]()
    assert remember(run) is None
    found = context_for(str(run.environment["device_name"]))
    context = run.measured.nvml.context if run.measured else None
    told = context is not None and context.last_bytes is not None and context.how is None
    sound = told and run.measured.nvml.reason is None and "paged" not in run.optimizer.placements
    assert (found.basis == "learnt") == sound
    assert found.num_bytes == (context.last_bytes if sound and context else ASSUMED)
    if kind in LEARNT:
        assert sound


def test_a_moment_in_which_more_seemed_to_be_held_is_not_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFCLI_HISTORY", str(tmp_path / "h.jsonl"))
    peak = amount(574).model_copy(update={"peak_bytes": 2100 * MIB})
    assert remember(cuda_records.completed(nvml=nvml(context=peak))) is None
    assert context_for("rtx-4090").num_bytes == 574 * MIB


@pytest.mark.parametrize("kind", ["folder", "huge", "rubbish"])
def test_no_history_keeps_an_estimate_from_its_answer(
    kind: str, distilbert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**36)  # sparse
    else:
        path.write_bytes(b'\x00\xff"context"\n' * 20_000)
    monkeypatch.setenv("EFFCLI_HISTORY", str(path))
    plan = plan_of(effcli("estimate", distilbert, "--optim", "sgd", *SMALL, "--gpu", "rtx-4090"))
    assert (plan["context_bytes"], plan["basis"]["context"]) == (ASSUMED, "assumed")


@pytest.mark.parametrize(
    ("torch_version", "said"),
    [
        (None, "learnt from 1 run on this card, the last on 2030-01-31"),
        ("2.9\x1b[31m\n", "learnt from 1 run on this card with torch 2.9?[31m?, the last on 2030-01-31"),
        ("9" * 5000, f"learnt from 1 run on this card with torch {'9' * 93}..., the last on 2030-01-31"),
    ],
)
def test_where_the_context_is_from_is_said_in_a_short_line_whatever_the_history_says_of_torch(
    torch_version: str | None, said: str, learnt_from: Callable[..., Path]
) -> None:
    learnt_from(line(torch=torch_version))
    assert context_for("rtx-4090").source == said


def test_a_history_that_can_be_no_file_is_told_and_nothing_is_learnt(
    distilbert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("/", ".", "//"):
        monkeypatch.setenv("EFFCLI_HISTORY", place)
        assert context_for("rtx-4090").num_bytes == ASSUMED
        shown = effcli("doctor", "--history")
        assert shown.code == 0
        assert f"EFFCLI_HISTORY names a folder, '{place}'" in shown.stdout
    assert plan_of(effcli("estimate", distilbert, "--gpu", "rtx-4090", *SMALL))["basis"]["context"] == "assumed"
