"""Which device a run gets, what is hidden from it, and what is said where there is none.

Torch is a build for the CPU here: a pretended CUDA reads its variables when it is first asked, as the real one does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from effcli.devices import activate, card_names, check_precision, resolve_device
from effcli.errors import DeviceError
from effcli.hidden_devices import environment_with_all_devices, show_all_devices
from effcli.nvml import hardware
from effcli.nvml.session import NvmlSession, find_card
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder
from tests.nvml.standin import Driver
from tests.test_nvml_cards import A100, H100, LARGE, SMALL, T4, THREE

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class Cuda:
    """Three cards, or what CUDA_VISIBLE_DEVICES leaves of them, from the moment when CUDA is first asked.

    `counted` are the cards as CUDA counts them, which is not the driver's order. Torch's own parser says what the
    variable means.
    """

    counted: tuple[str, ...] = (H100, A100, T4)
    shown: list[str] | None = None
    contexts: list[str] = field(default_factory=list)
    majors: dict[str, int] = field(default_factory=lambda: {H100: 9, A100: 8, T4: 7})
    current: int = 0

    def start(self) -> list[str]:
        if self.shown is None:
            listed: list[Any] = torch.cuda._parse_visible_devices()
            if listed and isinstance(listed[0], str):
                self.shown = [next(uuid for uuid in self.counted if uuid.startswith(name)) for name in listed]
            else:
                self.shown = [self.counted[index] for index in listed if index < len(self.counted)]
        return self.shown

    def properties(self, device: Any) -> SimpleNamespace:
        uuid = self.start()[device if isinstance(device, int) else device.index or 0]
        return SimpleNamespace(uuid=uuid.partition("-")[2], major=self.majors[uuid], name=uuid)

    def set_device(self, device: torch.device) -> None:
        self.current = device.index
        self.contexts.append(self.start()[device.index])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """A build of torch for CUDA 12.8 on a machine with three cards; the variables are put back afterwards."""
    made = Cuda()
    monkeypatch.setenv(VISIBLE, "")  # so that it is put back
    monkeypatch.delenv(VISIBLE)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: made.shown is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(made.start()))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made.start()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", made.properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: made.properties(device).name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    show_all_devices()
    yield made
    show_all_devices()


def chosen(name: str, cuda: Cuda) -> str:
    """Return the card that a run gets for `--device`, or `cpu`."""
    device = resolve_device(name)
    return "cpu" if device.type == "cpu" else cuda.start()[device.index]


@pytest.mark.parametrize(
    ("visible", "name", "expected"),
    [
        (None, "auto", H100),
        (None, "cuda", H100),
        (None, "cuda:2", T4),
        ("2,1", "cuda", T4),
        ("2,1", "cuda:1", A100),
        (f"{T4},{H100}", "cuda:1", H100),
        ("GPU-b,GPU-aaaa2", "cuda:1", A100),
        ("1,-1,0", "cuda:0", A100),
        ("", "auto", "cpu"),
        ("-1", "auto", "cpu"),
        ("none", "auto", "cpu"),
        ("-1,0", "auto", "cpu"),
        ("0", "cpu", "cpu"),
    ],
)
def test_a_run_gets_the_card_that_cuda_counts_and_sees_no_other(
    visible: str | None, name: str, expected: str, cuda: Cuda, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.play(THREE)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    assert chosen(name, cuda) == expected
    if expected != "cpu":
        assert cuda.shown == [expected]
    assert not cuda.contexts


@pytest.mark.parametrize(
    ("visible", "name", "words"),
    [
        ("", "cuda", ["shows no device", f"{VISIBLE}=''", "unset it", "--device cpu"]),
        ("-1", "cuda:0", ["shows no device", "'-1'"]),
        ("0,-1,1", "cuda:1", ["shows 1 device", "CUDA stops at '-1'", "--device cuda:0"]),
        ("7,0", "cuda:1", ["shows no device", "'7'"]),
        ("0,1", "cuda:2", ["shows 2 devices", "--device cuda:1"]),
        ("0,0", "cuda", ["twice"]),
        ("GPU-aaaa", "cuda", ["more than one device", A100, H100]),
        (None, "cuda:3", ["3 cards", "from 0"]),
    ],
)
def test_what_hides_a_card_is_told_and_nothing_is_changed(
    visible: str | None, name: str, words: list[str], cuda: Cuda, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.play(THREE)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(DeviceError) as caught:
        resolve_device(name)
    message = str(caught.value)
    assert message.startswith(f"--device {name}: ")
    assert all(word in message for word in words)
    assert os.environ.get(VISIBLE) == visible


@pytest.mark.parametrize("visible", ["0,1", f"{SMALL},{LARGE}"])
def test_without_a_driver_to_ask_the_text_alone_decides(
    visible: str, cuda: Cuda, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.play("fail nvmlInit 999")
    monkeypatch.setenv(VISIBLE, visible)
    monkeypatch.setattr(cuda, "counted", (H100, A100, T4, SMALL, LARGE))
    assert chosen("cuda:1", cuda) in (A100, LARGE)


def test_a_second_run_in_the_process_counts_as_the_first(cuda: Cuda, driver: Driver) -> None:
    driver.play(THREE)
    assert [chosen("cuda:1", cuda), chosen("cuda:1", cuda), chosen("auto", cuda)] == [A100] * 3
    for name in ("cuda", "cuda:2"):
        with pytest.raises(DeviceError, match="has used cuda:1 and can't change"):
            resolve_device(name)


def test_where_cuda_did_not_start_another_device_may_be_chosen(
    cuda: Cuda, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.play(THREE)
    monkeypatch.setenv(VISIBLE, "2,0")
    assert chosen("cuda:0", cuda) == T4
    cuda.shown = None
    assert chosen("cuda:1", cuda) == H100


def test_where_cuda_has_started_nothing_is_hidden(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "2,0")
    cuda.start()
    assert chosen("cuda:1", cuda) == H100
    assert os.environ[VISIBLE] == "2,0"
    with pytest.raises(DeviceError, match="there are 2 CUDA devices"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(("answer", "hidden"), [(0, None), (3, "1")])
def test_cuda_that_another_library_started_reads_no_variable_any_more(
    answer: int, hidden: str | None, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def load(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(cuDeviceGetCount=lambda pointer: answer)  # 3 is CUDA_ERROR_NOT_INITIALIZED

    monkeypatch.setattr("effcli.hidden_devices.ctypes.CDLL", load)
    assert chosen("cuda:1", cuda) == A100
    assert asked == ["libcuda.so.1"]
    assert os.environ.get(VISIBLE) == hidden


@pytest.mark.parametrize("visible", [None, "2,0"])
def test_another_process_sees_what_this_one_saw_at_first(
    visible: str | None, cuda: Cuda, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.play(THREE)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    before = dict(os.environ)
    resolve_device("cuda:1")
    assert os.environ[VISIBLE] == ("1" if visible is None else "0")
    assert environment_with_all_devices() == before
    monkeypatch.setenv(VISIBLE, "1,2")  # by someone else
    assert environment_with_all_devices()[VISIBLE] == "1,2"


# --- why there is no CUDA ---------------------------------------------------------------------------------------------


def refusal(name: str = "cuda") -> str:
    with pytest.raises(DeviceError) as caught:
        resolve_device(name)
    return str(caught.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build of torch without CUDA")
def test_a_build_without_cuda_says_where_another_is() -> None:
    visible = os.environ.get(VISIBLE)
    assert all(word in refusal() for word in ("CPU-only build", "pytorch.org", "--device cpu"))
    assert resolve_device("auto") == torch.device("cpu")
    assert os.environ.get(VISIBLE) == visible


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("fail nvmlInit 9", ["driver is not loaded"]),
        ("fail nvmlInit 18", ["reboot"]),
        ("cuda 11040\n" + THREE, ["built for CUDA 12.8", "serves CUDA up to 11.4", "update the driver"]),
        ("cuda 12020\n" + THREE, ["finds no CUDA device", "3 cards", "nvidia-smi"]),
        ("cuda 13000", ["0 cards"]),
    ],
)
def test_a_machine_without_cuda_tells_the_drivers_reason(
    script: str, words: list[str], cuda: Cuda, driver: Driver
) -> None:
    driver.play(script)
    cuda.counted = ()
    message = refusal()
    assert all(word in message for word in words)
    assert "\n" not in message
    assert resolve_device("auto") == torch.device("cpu")


# --- the context ------------------------------------------------------------------------------------------------------


def test_a_device_takes_memory_when_it_is_activated_and_not_before(cuda: Cuda) -> None:
    device = resolve_device("cuda:1")
    check_precision("bf16", device)
    card_names(device)
    assert cuda.contexts == []
    activate(device)
    assert cuda.contexts == [A100]
    activate(torch.device("cpu"))
    assert cuda.contexts == [A100]


def test_bfloat16_is_asked_of_the_device_of_the_run(cuda: Cuda) -> None:
    cuda.start()
    check_precision("bf16", torch.device("cuda", 1))
    with pytest.raises(DeviceError, match="has no bfloat16"):
        check_precision("bf16", torch.device("cuda", 2))


# --- the driver's names -----------------------------------------------------------------------------------------------


def names(visible: str | None, index: int | None, uuid: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    if visible is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    return card_names(torch.device("cuda", index) if index is not None else torch.device("cuda"))


@pytest.mark.parametrize(
    ("visible", "index", "reported", "expected"),
    [
        (None, 0, H100[4:], H100),
        ("2,0", 0, T4[4:], T4),
        ("2,0", 1, H100[4:], H100),
        (f"GPU-aaaa3,{T4}", 1, T4[4:], T4),
        ("GPU-b", 0, "", T4),  # by a torch that tells no identifier
        ("GPU-b,GPU-aaaa3", None, "", H100),  # the current one
        (SMALL, 0, SMALL[4:], SMALL),
        (SMALL, 0, A100[4:], SMALL),  # by a CUDA that tells that of the whole card
        ("MIG-cccc0002", 0, A100[4:], LARGE),
        (f"MIG-{A100}/5/0", 0, A100[4:], LARGE),
        (None, 0, LARGE[4:], LARGE),
    ],
)
def test_the_driver_finds_the_card_that_torch_means(
    visible: str | None,
    index: int | None,
    reported: str,
    expected: str,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver.play(
        f"card {T4} T4\ncard {A100} A100\nmig on\ninstance {SMALL} 7 0 0\ninstance {LARGE} 5 0 1\ncard {H100} H100"
    )
    with NvmlSession.open() as session:
        assert find_card(session, names(visible, index, reported, monkeypatch)).identity.uuid == expected


def test_a_number_is_never_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names("1", 0, "", monkeypatch) == ()
    assert names("1", 0, "x", monkeypatch) == ("GPU-x", "MIG-x")


def test_torchs_own_identifier_goes_before_a_listed_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(H100, 0, A100[4:], monkeypatch)[0] == A100


# --- torch's own start ------------------------------------------------------------------------------------------------


def test_choosing_a_device_for_cpu_asks_no_driver(driver: Driver) -> None:
    driver.play(THREE)
    resolve_device("cpu")
    assert driver.calls() == []


def test_this_module_imports_neither_torch_nor_the_binding() -> None:
    program = "import sys, effcli.devices; print(sorted({'torch', 'pynvml', 'pydantic'} & set(sys.modules)))"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, env=environment)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_run_has_its_device_before_libraries_are_imported_that_start_cuda(command: str) -> None:
    """torchao asks Triton about the card as it is imported, and transformers' models import torchao."""
    program = f"""
import sys
from effcli import devices, pipeline
from effcli.report.progress import QuietProgress
from effcli.spec import RunSpec

def choose(name, launch):
    sys.exit(f"{{name}} {{sorted({{'transformers', 'torchao', 'peft', 'accelerate'}} & set(sys.modules))}}")

devices.resolve_device = choose
pipeline.{command}(RunSpec(loop={{"device": "cuda:1"}}), progress=QuietProgress())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stderr.strip() == "cuda:1 []"


def test_a_driver_that_serves_nvml_alone_is_no_cuda_device(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.play(f"{THREE}\n")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 0, raising=False)
    with pytest.raises(DeviceError, match="finds no CUDA device, though the NVIDIA driver has 3 cards"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("listed", "flags", "said"),
    [
        (None, (), True),
        ("0", (), True),
        ("", (), False),
        ("-1", (), False),
        (None, ("--device", "cpu"), False),
    ],
)
def test_a_card_that_torch_does_not_see_is_told_where_nobody_asked_for_the_cpu(
    listed: str | None, flags: tuple[str, ...], said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "CONTROL_DEVICE", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if listed is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, listed)
    folder, data = model_folder(tmp_path / "m", TINY_DISTILBERT), csv_file(tmp_path / "d.csv")
    result = effcli("train", folder, "--data", data, *flags, "--dry-run", "--json")
    note = "torch does not see this machine's NVIDIA card: the run is on the CPU. `effcli doctor` says why."
    assert (note in result.record["notes"]) is said
