"""`effcli doctor`: one line for each thing that may be wrong, from which nothing can keep it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effcli.measure.doctor_record import CardFacts, Check, DoctorRecord
from effcli.nvml import hardware
from effcli.pipeline.doctoring import examine
from tests.commands import effcli
from tests.doctored import WELL, Told, cuda_build, device
from tests.nvml.standin import Driver

GIB = 2**30
Play = Callable[..., None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return what sets the answers of the fresh processes, without such; those that are not named are well.

    There is no driver, but beside the fixture `cards` the driver is really asked.
    """

    def played(**answers: dict[str, Any]) -> None:
        given = {name.replace("_", "-"): answer for name, answer in answers.items()}
        monkeypatch.setattr(Told, "answers", {**WELL, **given})

    monkeypatch.setattr(examine, "ProbeProcess", Told)
    monkeypatch.setattr(hardware, "PCI_DEVICES", Path("/nowhere"))
    monkeypatch.setattr(hardware, "CONTROL_DEVICE", Path("/nowhere"))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    played()
    return played


@pytest.fixture
def cards(driver: Driver, play: Play, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return the stand-in of the driver, which the doctor asks."""
    monkeypatch.delitem(WELL, "driver")
    play()
    return driver


def examined(*flags: object) -> DoctorRecord:
    """Return the record of a doctor that found whatever it did."""
    return DoctorRecord.model_validate(effcli("doctor", "--json", *flags).record)


def lines(record: DoctorRecord, name: str) -> list[Check]:
    return [check for check in record.checks if check.name == name]


def line(record: DoctorRecord, name: str) -> Check:
    (check,) = lines(record, name)
    return check


def named(record: DoctorRecord, uuid: str) -> CardFacts:
    (card,) = (card for card in record.cards if card.uuid == uuid)
    return card


THREE_CARDS = """
    card GPU-aaaaaaaa-0000-0000-0000-000000000001 NVIDIA T4
    memory 16106127360 1073741824 268435456
    card GPU-bbbbbbbb-0000-0000-0000-000000000002 NVIDIA H100 80GB HBM3
    memory 85899345920 2147483648 536870912
    card GPU-cccccccc-0000-0000-0000-000000000003 NVIDIA L4
    memory 24159191040 0 0
"""
T4, H100, L4 = (f"{letter * 8}-0000-0000-0000-00000000000{place}" for letter, place in (("a", 1), ("b", 2), ("c", 3)))


def test_cards_are_told_apart_by_identifier_where_cuda_numbers_them_otherwise(
    cards: Driver, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.play(THREE_CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{H100[:8]},GPU-{T4}")
    play(
        torch={"answer": cuda_build(device(0, H100, "NVIDIA H100 80GB HBM3", "9.0"), device(1, T4))},
        step={"answer": {"device": "cuda:0", "name": "NVIDIA H100 80GB HBM3"}},
    )
    record = examined()
    assert [(card.uuid, card.device) for card in record.cards] == [
        (f"GPU-{T4}", "cuda:1"), (f"GPU-{H100}", "cuda:0"), (f"GPU-{L4}", None),
    ]  # fmt: skip
    h100 = named(record, f"GPU-{H100}")
    assert h100.total.num_bytes == 80 * GIB
    assert h100.by_others.num_bytes == 2 * GIB
    assert h100.free.num_bytes == 80 * GIB - 2 * GIB - GIB // 2
    assert (h100.capability, h100.bf16) == ("9.0", True)
    t4, h100_line, l4 = lines(record, "card")
    assert t4.status == h100_line.status == "ok"
    assert "(cuda:0, GPU-bbbbbbbb): 80.00 GiB, 77.50 GiB free, 2.00 GiB used by others" in h100_line.text
    assert "no bf16" in t4.text
    assert l4.status == "note"
    assert "hidden by CUDA_VISIBLE_DEVICES" in l4.text
    visible = line(record, "visible").text
    assert "cuda:0 is NVIDIA H100 80GB HBM3 (GPU-bbbbbbbb), cuda:1 is NVIDIA T4 (GPU-aaaaaaaa)" in visible
    assert record.versions["driver"] == "570.86.15"
    assert record.versions["driver_cuda"] == "12.8"
    assert line(record, "device").text.startswith("a training step on cuda:0 (NVIDIA H100 80GB HBM3) works")
    assert record.device == "cuda:0"
    assert not record.problems


MIG = """
    card GPU-aaaaaaaa-0000-0000-0000-000000000001 NVIDIA A100-SXM4-40GB
    mig on
    fail nvmlDeviceGetMemoryInfo 4 on GPU-aaaaaaaa-0000-0000-0000-000000000001
    instance MIG-11111111-0000-0000-0000-000000000001 7 0 0
    memory 5100273664 1048576 0
    instance MIG-22222222-0000-0000-0000-000000000002 8 0 1
    memory 5100273664 3145728 0
"""
FIRST, SECOND = "11111111-0000-0000-0000-000000000001", "22222222-0000-0000-0000-000000000002"


@pytest.mark.parametrize(
    ("visible", "torchs", "seen"),
    [(None, T4, FIRST), (f"MIG-{SECOND}", T4, SECOND), (f"MIG-{SECOND}", SECOND, SECOND)],
    ids=["the first one is taken", "named, torch says the card", "torch says the instance"],
)
def test_a_mig_instance_is_read_where_its_card_may_not_be(
    visible: str | None, torchs: str, seen: str, cards: Driver, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.play(MIG)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    play(torch={"answer": cuda_build(device(0, torchs, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "8.0"))})
    record = examined()
    assert {card.uuid: card.device for card in record.cards} == {
        f"GPU-{T4}": None, f"MIG-{FIRST}": "cuda:0" if seen == FIRST else None,
        f"MIG-{SECOND}": "cuda:0" if seen == SECOND else None,
    }  # fmt: skip
    assert named(record, f"MIG-{FIRST}").total.num_bytes == 4864 * 2**20
    assert named(record, f"MIG-{FIRST}").parent_uuid == f"GPU-{T4}"
    parent = named(record, f"GPU-{T4}")
    assert parent.total.num_bytes is None
    assert parent.total.reason
    assert "1 card with 2 MIG instances" in line(record, "driver").text
    assert "divided into MIG instances" in lines(record, "card")[0].text
    assert not record.problems


@pytest.mark.parametrize(
    "memory", ["memory n/a n/a n/a", "fail nvmlDeviceGetMemoryInfo 3", "fail nvmlDeviceGetMemoryInfo 4"]
)
def test_memory_that_the_driver_does_not_tell_is_never_a_number(memory: str, cards: Driver, play: Play) -> None:
    cards.play(f"card GPU-{T4} NVIDIA GB10\n{memory}")
    play(torch={"answer": cuda_build({**device(0, T4, "NVIDIA GB10", "12.1"), "unified": True})})
    record = examined()
    (card,) = record.cards
    for amount in (card.total, card.free, card.by_others):
        assert amount.num_bytes is None
        assert amount.reason
    assert line(record, "card").status == "note"
    assert "memory unified with the machine's n/a: " in line(record, "card").text
    assert "18446744073709551615" not in record.model_dump_json()


def test_a_device_that_only_torch_knows_is_listed_too(play: Play) -> None:
    play(torch={"answer": cuda_build(device(0, T4, "Orin", "8.7"))})
    record = examined()
    (card,) = record.cards
    assert (card.device, card.name, card.total.num_bytes, card.free.num_bytes) == ("cuda:0", "Orin", 15 * GIB, None)
    assert "15.00 GiB, what is free n/a: " in line(record, "card").text


@pytest.mark.parametrize(
    ("code", "status"), [(9, "note"), (28, "note"), (18, "problem"), (17, "problem"), (999, "problem")]
)
def test_a_driver_that_does_not_start_is_a_problem_unless_there_is_nothing_to_drive(
    code: int, status: str, cards: Driver
) -> None:
    cards.play(f"fail nvmlInit {code}")
    check = line(examined(), "driver")
    assert check.status == status
    assert check.text.startswith("n/a: ")
    assert bool(check.remedy) == (status == "problem")
    assert cards.calls() == [("init", code)]


def test_a_card_without_a_driver_is_a_problem(cards: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, (vendor, kind) in enumerate([("0x8086", "0x030000"), ("0x10de", "0x040300"), ("0x10de", "0x030200")]):
        folder = tmp_path / "pci" / f"0000:0{place}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(hardware, "PCI_DEVICES", tmp_path / "pci")
    cards.play("fail nvmlInit 9")
    assert line(examined(), "driver").status == "problem"
    cards.play("nvml 12.570.86.15")
    assert line(examined(), "driver").status == "problem"
    assert "0 cards" in line(examined(), "driver").text
    (tmp_path / "pci" / "0000:02:00.0" / "vendor").write_text("0x1002\n")
    assert line(examined(), "driver").status == "note"


@pytest.mark.parametrize(
    ("cuda", "mends"),
    [
        (13000, "whl/cu130"),
        (13020, "whl/cu130"),
        (12080, "whl/cu128"),
        (12040, "whl/cu126"),
        (11080, "update the NVIDIA"),
    ],
)
def test_a_cpu_build_beside_a_card_is_a_problem_with_the_command_that_mends_it(
    cuda: int, mends: str, cards: Driver, play: Play
) -> None:
    cards.play(f"cuda {cuda}\n{THREE_CARDS}")
    record = examined()
    torch = line(record, "torch")
    assert torch.status == "problem"
    assert mends in torch.remedy
    assert torch.remedy.startswith("pip install --force-reinstall 'torch<") or cuda < 12000
    assert all(card.device is None for card in record.cards)


def test_a_build_that_is_newer_than_the_driver_serves_is_a_problem(cards: Driver, play: Play) -> None:
    cards.play(f"cuda 12040\n{THREE_CARDS}")
    why = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040)."
    play(torch={"answer": cuda_build(cuda="13.0", why_none=why)})
    torch = line(examined(), "torch")
    assert torch.status == "problem"
    assert "CUDA 13.0, but the driver serves CUDA up to 12.4" in torch.text
    assert "whl/cu126" in torch.remedy


def test_a_build_of_the_same_major_version_is_well(cards: Driver, play: Play) -> None:
    cards.play(f"cuda 12040\n{THREE_CARDS}")
    play(torch={"answer": cuda_build(device(0, H100, "NVIDIA H100", "9.0"), cuda="12.6")})
    torch = line(examined(), "torch")
    assert torch.status == "ok"
    assert "compatible" in torch.text


def test_torch_that_sees_no_card_says_why(cards: Driver, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    cards.play(THREE_CARDS)
    play(
        torch={
            "answer": cuda_build(why_none="CUDA unknown error - this may be due to an incorrectly set up environment")
        }
    )
    torch = line(examined(), "torch")
    assert torch.status == "problem"
    assert "CUDA unknown error" in torch.text
    for hiding in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hiding)
        record = examined()
        assert line(record, "torch").status == line(record, "visible").status == "note"
        assert {check.status for check in lines(record, "card")} == {"note"}
        assert line(record, "visible").remedy == "unset CUDA_VISIBLE_DEVICES"


def test_a_name_that_cuda_does_not_find_is_a_problem(
    cards: Driver, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.play(THREE_CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7,1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    play(torch={"answer": cuda_build(device(0, T4))})
    wrong, order = lines(examined(), "visible")
    assert wrong.status == "problem"
    assert "'7'" in wrong.text
    assert order.status == "ok"
    assert "nvidia-smi" in order.text


@pytest.mark.parametrize(
    ("kernels", "capability", "runs"),
    [
        (["sm_75", "sm_80", "sm_90"], "7.5", True),
        (["sm_75", "sm_80", "sm_90"], "8.9", True),
        (["sm_75", "sm_80", "sm_90"], "12.0", False),
        (["sm_75", "sm_80", "compute_90"], "12.0", True),
        (["sm_75", "sm_80", "sm_86"], "6.1", False),
        (["sm_86"], "8.0", False),
        (["sm_90a"], "9.0", True),
        (["sm_100", "sm_120"], "12.1", True),
        (["sm_100", "sm_120"], "10.3", True),
    ],
)
def test_a_card_for_which_torch_has_no_code_is_a_problem(
    kernels: list[str], capability: str, runs: bool, play: Play
) -> None:
    play(torch={"answer": {**cuda_build(device(0, T4, capability=capability)), "kernels": kernels}})
    found = [check for check in lines(examined(), "torch") if check.status == "problem"]
    assert [f"cuda:0, whose compute capability is {capability}" in check.text for check in found] == [True] * (not runs)


@pytest.mark.parametrize("driver_age", ["old"])
def test_an_older_driver_counts_its_own_share_among_what_others_hold(cards: Driver, play: Play) -> None:
    cards.play(THREE_CARDS)
    h100 = named(examined(), f"GPU-{H100}")
    assert h100.by_others.num_bytes == 2 * GIB + GIB // 2
    assert h100.by_others.how == "with what the driver keeps for itself"
    assert h100.free.num_bytes == 80 * GIB - 2 * GIB - GIB // 2
    assert "2.50 GiB used by others and the driver" in lines(examined(), "card")[1].text


@pytest.mark.parametrize(("compiler", "status"), [(True, "ok"), (False, "problem")])
def test_torchao_on_cuda_needs_a_compiler(compiler: bool, status: str, play: Play) -> None:
    play(adamw8bit_ao={"answer": {"device": "cuda:0", "not_on": "", "has_compiler": compiler}})
    check = line(examined(), "torchao")
    assert check.status == status
    assert "a step of adamw8bit-ao on cuda:0 works, uncompiled; a run compiles it" in check.text


def test_a_divided_card_without_instances_is_told(cards: Driver, play: Play) -> None:
    cards.play(f"card GPU-{T4} NVIDIA A100-SXM4-40GB\nmig on\nmemory 42949672960 0 0")
    assert "divided, but shows no MIG instance" in line(examined(), "card").text


def test_a_card_that_is_lost_while_it_is_looked_at_is_told(cards: Driver, play: Play) -> None:
    cards.play(f"{THREE_CARDS}\n    fail nvmlDeviceGetMemoryInfo 15 on GPU-{H100}")
    t4, h100, _ = examined().cards
    assert t4.total.num_bytes == 15 * GIB
    assert h100.total.num_bytes is None
    assert "lost" in (h100.total.reason or "")


@pytest.mark.parametrize("entry", ["7", "7,0", "GPU-unknown"])
def test_a_variable_that_names_no_card_here_hides_all_and_is_the_one_problem(
    entry: str, cards: Driver, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards.play(THREE_CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", entry)
    play(torch={"answer": cuda_build(why_none="no CUDA-capable device is detected")})
    record = examined()
    assert [check.name for check in record.problems] == ["visible"]
    assert line(record, "torch").remedy == "unset CUDA_VISIBLE_DEVICES"
    assert all("hidden by CUDA_VISIBLE_DEVICES" in check.text for check in lines(record, "card"))


def test_a_driver_that_no_torch_runs_with_is_to_be_updated_once(cards: Driver, play: Play) -> None:
    cards.play(f"cuda 11040\n{THREE_CARDS}")
    play(torch={"answer": cuda_build(why_none="The NVIDIA driver on your system is too old")})
    assert line(examined(), "torch").remedy == "update the NVIDIA driver: no torch that effcli needs runs with it"


@pytest.mark.parametrize("content", ["raise ImportError('half of it is missing')", "from_another_package = True"])
def test_a_binding_that_does_not_work_is_mended_by_pip_and_not_by_another_driver(
    content: str, tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.delitem(WELL, "driver")
    play()
    check = line(examined(), "driver")
    assert check.status == "problem"
    assert check.remedy.startswith("pip install")
    assert check.remedy.endswith("--force-reinstall")
    assert "pip" not in check.text


@pytest.mark.parametrize(
    ("failure", "beside_cards", "remedy"),
    [
        ("its process was killed by signal 6 (Aborted)", False, "pip install --force-reinstall"),
        ("its process was killed by signal 6 (Aborted)", True, "look at what nvidia-smi"),
        ("gave no answer within 90 s", False, "look at what nvidia-smi"),
        ("ImportError: libcudnn.so.9: cannot open shared object file", True, "pip install --force-reinstall"),
    ],
)
def test_torch_and_the_device_are_mended_in_the_same_way_where_torch_fails(
    failure: str, beside_cards: bool, remedy: str, cards: Driver, play: Play
) -> None:
    cards.play(THREE_CARDS if beside_cards else "")
    play(torch={"error": failure}, step={"error": failure})
    record = examined()
    assert line(record, "torch").remedy.startswith(remedy)
    assert line(record, "device").remedy == line(record, "torch").remedy


def test_a_history_that_cannot_be_written_is_a_problem_before_a_run_says_so(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("EFFCLI_HISTORY", str(tmp_path / "link" / "h.jsonl"))
    check = line(examined(), "history")
    assert check.status == "problem"
    assert check.text.endswith(": 0 runs, and no more can be written")
    monkeypatch.setenv("EFFCLI_HISTORY", str(tmp_path / "new" / "folders" / "h.jsonl"))
    assert line(examined(), "history").status == "ok"
