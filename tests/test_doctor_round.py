"""`effcli doctor`: nothing that hangs, crashes or fails can end its round, and no secret comes out of it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from effcli import main_memory
from effcli.errors import DeviceError, UsageError
from effcli.hub import go_offline_if_unreachable
from effcli.masking import MASK
from effcli.measure.doctor_record import Check, DoctorRecord
from effcli.pipeline.doctoring import asking, examine, installed, machine, trials
from effcli.pipeline.doctoring.asking import ProbeProcess
from effcli.pipeline.doctoring.disk import check_disk
from effcli.pipeline.doctoring.hub_reach import check_cache, check_hub
from effcli.report.doctor import render_doctor
from tests.commands import effcli
from tests.doctored import ANSWERS, PROGRAM, WELL, Told
from tests.histories import line as history_line

Play = Callable[..., None]
TOKEN = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return what sets the answers of fresh processes that are really started; those that are not named are well."""

    def play(**answers: dict[str, Any]) -> None:
        given = {name.replace("_", "-"): answer for name, answer in answers.items()}
        monkeypatch.setenv(ANSWERS, json.dumps({**WELL, **given}))

    monkeypatch.setattr(asking, "PROGRAM", PROGRAM)
    play()
    return play


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the doctor all fresh processes: their answers are well."""
    monkeypatch.setattr(examine, "ProbeProcess", Told)


def record_of(*flags: object) -> DoctorRecord:
    return DoctorRecord.model_validate(effcli("doctor", "--json", *flags).record)


def line(record: DoctorRecord, name: str) -> Check:
    return next(check for check in record.checks if check.name == name)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, whoever has still to collect it."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_process_that_hangs_is_ended_with_all_that_it_started(
    played: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "TRYING_S", 4.0)
    pids = tmp_path / "pids"
    played(adam8bit={"hang": str(pids), "complaint": "Warning: looking for a driver"})
    record = record_of()
    check = line(record, "bitsandbytes")
    assert check.status == "problem"
    assert "no step of adam8bit: gave no answer within 4 s: Warning: looking for a driver" in check.text
    assert line(record, "torchao").status == "ok"
    assert record.optimizers == {"adam8bit": False, "adamw8bit-ao": True}
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_a_process_that_crashes_is_told_with_its_last_words(played: Play) -> None:
    played(
        torch={"signal": int(signal.SIGSEGV)},
        step={
            "signal": int(signal.SIGABRT),
            "complaint": "terminate called\n  what():  CUDA error: an illegal instruction",
        },
        adam8bit={"code": 3},
    )
    record = record_of()
    assert ", does not work: its process was killed by signal 11 (Segmentation fault)" in line(record, "torch").text
    device = line(record, "device")
    assert device.status == "problem"
    assert "signal 6 (Aborted): what(): CUDA error: an illegal instruction" in device.text
    assert line(record, "bitsandbytes").status == "note"  # proves nothing, since torch itself fails
    assert record.device is None
    assert record.device_works is None


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        ("OSError: libcudnn.so.9: cannot open shared object file", "pip install --force-reinstall 'torch"),
        ("gave no answer within 90 s", "look at what nvidia-smi"),
    ],
)
def test_a_damaged_torch_is_installed_anew_and_one_that_hangs_is_not(
    failure: str, remedy: str, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "answers", {**WELL, "torch": {"error": failure}})
    assert line(record_of(), "torch").remedy.startswith(remedy)


@pytest.mark.parametrize("flags", [(), ("--json",), ("--quiet",)])
def test_a_device_that_was_asked_for_and_fails_is_exit_code_4_behind_the_report(
    flags: tuple[str, ...], at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    monkeypatch.setattr(Told, "answers", {**WELL, "step": {"error": said}})
    done = effcli("doctor", "--device", "cuda:1", *flags)
    assert done.code == 4
    assert done.error.startswith("--device cuda:1 cannot train: RuntimeError: CUDA error: no kernel image")
    if "--json" in flags:
        record = DoctorRecord.model_validate_json(done.stdout)
        assert (record.requested_device, record.device_works, record.device) == ("cuda:1", False, None)
    else:
        assert "cuda:1 cannot train" in " ".join(done.stdout.split())
        assert ("effcli doctor: 1 problem" in done.stdout) == ("--quiet" in flags) or "note" in done.stdout
    assert effcli("doctor", *flags).code == 0  # nobody asked for the device


def test_a_device_that_works_is_named_as_it_was_asked_for(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # The process hides all cards but one, which it then calls cuda:0.
    monkeypatch.setattr(Told, "answers", {**WELL, "step": {"answer": {"device": "cuda:0", "name": "NVIDIA L4"}}})
    record = record_of("--device", "cuda:1")
    assert record.device_works is True
    assert line(record, "device").text.startswith("a training step on cuda:1 (NVIDIA L4) works")


def test_an_unknown_device_is_refused_before_anything_is_looked_at() -> None:
    done = effcli("doctor", "--device", "gpu")
    assert done.code == 2
    assert "--device" in done.error
    assert done.stdout == ""
    assert effcli("doctor", "--history", "--device", "cpu").code == 2


def test_a_check_that_fails_itself_is_a_line_and_the_others_go_on(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setitem(examine._AFTER, "memory", fails)
    monkeypatch.setattr(examine, "check_torch", lambda *facts: fails())
    monkeypatch.setattr(examine, "known_cards", lambda *facts: fails())
    done = effcli("doctor", "--json")
    record = DoctorRecord.model_validate(done.record)
    for name in ("memory", "torch", "card"):
        assert line(record, name).text == "could not be checked: ZeroDivisionError: of all things"
    assert "Traceback" not in done.stderr
    assert {"effcli", "device", "hub", "terminal"} <= {check.name for check in record.checks}
    assert "in fails\n" in effcli("doctor", "--verbose").stderr


def test_a_look_that_hangs_is_left_behind(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(examine, "LOOKING_S", 0.3)
    monkeypatch.setitem(examine._AFTER, "cache", lambda: released.wait(60) and ())
    check = line(record_of(), "cache")
    released.set()
    assert check.status == "problem"
    assert check.text == "gave no answer within 0.3 s"


def test_a_signal_ends_the_doctor_and_what_it_started(played: Play, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    played(step={"hang": str(pids)}, torch={"hang": str(pids)})
    code = (
        "from effcli.pipeline.doctoring import asking; from tests.doctored import PROGRAM; asking.PROGRAM = PROGRAM;"
        "import sys; sys.argv = ['effcli', 'doctor']; from effcli.cli.app import main; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if pids.exists() and len(pids.read_text().splitlines()) == 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_a_process_that_cannot_be_started_is_told(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "ProbeProcess", ProbeProcess)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    record = record_of()
    assert "its process did not start: No such file or directory" in line(record, "device").text
    assert "No such file or directory" in line(record, "driver").text


def test_all_of_it_really_works_without_torch_in_the_process_of_the_doctor(tmp_path: Path) -> None:
    report = (
        "import atexit, sys; atexit.register(lambda: print('LOADED', *{name.partition('.')[0] for name in sys.modules},"
        " file=sys.stderr)); sys.argv = ['effcli', *sys.argv[1:]]; from effcli.cli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", report, "doctor", "--device", "cuda:99", "--json"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    record = DoctorRecord.model_validate_json(done.stdout)
    assert record.device_works is False
    assert record.optimizers == {"adam8bit": True, "adamw8bit-ao": True}
    loaded = set(done.stderr.rpartition("LOADED")[2].split())
    assert not loaded & {"torch", "transformers", "bitsandbytes", "torchao", "datasets", "accelerate"}
    import torch

    assert record.versions["torch"] == version("torch")  # which may lack the build that torch itself names
    assert line(record, "torch").text.startswith(torch.__version__)


def test_a_training_step_proves_that_the_processor_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert trials.step_on_device("cpu") == {"device": "cpu", "name": None}
    with pytest.raises(DeviceError):
        trials.step_on_device("cuda:99")


@pytest.mark.parametrize("fault", ["another loss", "no change"])
def test_a_device_that_computes_something_else_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = trials.losses_around_step
    wrong = (lambda *given: (0.1, 0.05)) if fault == "another loss" else (lambda *given: (true(*given)[0],) * 2)
    monkeypatch.setattr(trials, "losses_around_step", wrong)
    with pytest.raises(RuntimeError, match=r"its loss is 0\.1,|trained nothing"):
        trials.step_on_device("cpu")


@pytest.fixture
def server() -> Iterator[int]:
    """Yield the port of a server that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the doctor ask the hub, at an address that the test names."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_hub_that_answers_is_well(online: pytest.MonkeyPatch, server: int) -> None:
    online.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server}")
    (check,) = check_hub()
    assert check.status == "ok"
    assert f"http://127.0.0.1:{server} takes connections" in check.text
    assert "no token" in check.text
    online.setenv("HF_TOKEN", TOKEN)
    assert "a token is there" in check_hub()[0].text


def test_a_hub_out_of_reach_is_a_note_and_a_chosen_one_a_problem(online: pytest.MonkeyPatch) -> None:
    def refused(*address: object, **settings: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    online.setattr(socket, "create_connection", refused)
    online.delenv("HF_ENDPOINT", raising=False)
    (usual,) = check_hub()
    online.setenv("HF_ENDPOINT", "https://mirror.example")
    (chosen,) = check_hub()
    assert (usual.status, chosen.status) == ("note", "problem")
    assert "https://huggingface.co does not answer (Connection refused)" in usual.text
    assert "unset HF_ENDPOINT" in chosen.remedy


@pytest.mark.parametrize(
    "address", ["mirror.example", "", "ftp://x", "http://host:port", "http://[::1", "http://a..b", "http://x:99999"]
)
def test_an_endpoint_that_is_no_address_is_a_problem(address: str, online: pytest.MonkeyPatch) -> None:
    online.setenv("HF_ENDPOINT", address)
    (check,) = check_hub()
    assert check.status == "problem"
    assert check.remedy == "unset HF_ENDPOINT"
    with pytest.raises(UsageError, match="HF_ENDPOINT"):  # what a run that needs the hub says of it
        go_offline_if_unreachable()


def test_a_token_that_cannot_be_read_is_a_problem_of_the_hub(online: pytest.MonkeyPatch, tmp_path: Path) -> None:
    online.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path))
    (check,) = check_hub()
    assert check.status == "problem"
    assert "the token's file cannot be read: IsADirectoryError" in check.text
    assert "HF_TOKEN_PATH" in check.remedy


def test_a_link_that_leads_nowhere_is_no_place_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "runs")
    (tmp_path / "hub").symlink_to("/nowhere/at/all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", "~nobody-of-this-name/data")
    assert check_disk()[0].status == "problem"
    assert [check.status for check in check_cache()] == ["problem", "ok"]


def test_an_offline_hub_and_a_proxy_are_notes(online: pytest.MonkeyPatch) -> None:
    online.setenv("HTTPS_PROXY", "http://someone:password@proxy:3128")
    (check,) = check_hub()
    assert check.status == "note"
    assert "HTTPS_PROXY" in check.text
    assert "password" not in check.text
    online.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in check_hub()[0].text


@pytest.mark.parametrize("flags", [(), ("--json",), ("--verbose",)])
def test_no_secret_is_ever_shown(
    flags: tuple[str, ...], at_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", "https://someone:passw0rd@mirror.example")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", TOKEN)
    monkeypatch.setattr(
        Told, "answers", {**WELL, "step": {"error": f"RuntimeError: {TOKEN}", "details": f"Traceback: {MASK}"}}
    )
    done = effcli("doctor", *flags)
    assert done.code == 0
    for secret in (TOKEN, "passw0rd"):
        assert secret not in done.stdout + done.stderr
    assert "a token is there" in " ".join(done.stdout.split())


def test_caches_are_counted_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = tmp_path / "hub" / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "b").write_bytes(bytes(3 * 1024))
    (blobs / "link").symlink_to(blobs / "b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "none"))
    models, data = check_cache()
    assert models.text.startswith(f"{tmp_path / 'hub'}, from the hub: 3.00 KiB, ")
    assert data.text.startswith(f"{tmp_path / 'none'}, tokenised data: nothing yet, ")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file"))
    assert check_cache()[1].status == "problem"


def fake_package(folder: Path, name: str, version: str, *files: str) -> None:
    """Let a package of this name be installed in a folder, with such files."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.mark.parametrize(
    ("version", "files", "status"),
    [("11.5.3", ("pynvml/__init__.py",), "problem"), ("12.0.0", ("pynvml_utils/__init__.py",), "note")],
)
def test_the_deprecated_package_that_hides_the_drivers_binding_is_found(
    version: str, files: tuple[str, ...], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(tmp_path, "pynvml", version, *files)
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = (check for check in installed.check_packages() if check.name == "pynvml")
    assert check.status == status
    assert "pip uninstall" in check.remedy


def test_packages_outside_their_ranges_are_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(tmp_path, "transformers", "4.57.0")
    fake_package(tmp_path, "torchao", "0.9.0")
    fake_package(tmp_path, "altair", "6.1.0")
    declared = [
        "transformers<6,>=5", "psutil>=5.9", "no-such-package>=2", 'torchao>=0.15; extra == "torchao"',
        'altair<7,>=6; extra == "plot"', 'nothing-here; extra == "plot"', 'ruff>=99; extra == "dev"',
        'only-elsewhere; sys_platform == "plan9"',
    ]  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "requires", lambda name: declared)
    check = installed.check_packages()[0]
    assert check.status == "problem"
    assert check.text == (
        "transformers 4.57.0 is outside <6,>=5; no-such-package is not installed; torchao 0.9.0 is outside >=0.15"
    )
    assert check.remedy == "pip install 'transformers<6,>=5' 'no-such-package>=2' 'torchao>=0.15'"


def test_a_missing_extra_is_a_note_and_a_missing_requirement_a_problem(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "installed_version", lambda package: None)
    monkeypatch.setattr("effcli.pipeline.doctoring.working.installed_version", lambda package: None)
    record = record_of()
    assert (line(record, "torchao").status, line(record, "bitsandbytes").status) == ("note", "problem")
    assert line(record, "torchao").remedy.startswith("pip install")
    assert record.optimizers == {}


def test_the_limit_of_a_container_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    total = psutil.virtual_memory().total
    new, old = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    monkeypatch.setattr(main_memory, "GROUP_LIMITS", (new, old))
    assert main_memory.group_limit(total) is None
    old.write_text("9223372036854771712\n")
    assert main_memory.group_limit(total) is None
    new.write_text("max\n")
    assert main_memory.group_limit(total) is None
    new.write_text(f"{2**30}\n")
    assert "allows 1.00 GiB" in machine.check_memory()[0].text


def test_the_history_is_named_with_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCLI_HISTORY", str(tmp_path / "h.jsonl"))
    assert machine.check_history()[0].text == f"{tmp_path / 'h.jsonl'}: 0 runs"
    monkeypatch.setenv("EFFCLI_HISTORY", "off")
    assert machine.check_history()[0].status == "note"
    monkeypatch.setenv("EFFCLI_HISTORY", str(tmp_path))
    assert machine.check_history()[0].status == "problem"


def test_the_history_is_shown_instead_of_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "h.jsonl"
    monkeypatch.setenv("EFFCLI_HISTORY", str(file))
    assert "No runs yet" in effcli("doctor", "--history").stdout
    file.write_text(json.dumps(history_line()) + "\n")
    assert len(effcli("doctor", "--history", "--json").record["runs"]) == 1
    assert effcli("doctor", "--history").stdout.startswith("effcli doctor: history\n")


CHECKS = (
    Check(name="effcli", status="ok", text="0.1.0"),
    Check(
        name="card",
        status="note",
        text="NVIDIA [bold]T4[/bold] \x1b[31m (hidden by CUDA_VISIBLE_DEVICES): " + "x " * 60,
    ),
    Check(name="bitsandbytes", status="problem", text="does not load", remedy="pip install 'bitsandbytes>=0.50,<1'"),
)


def shown(width: int, *, quiet: bool = False, checks: tuple[Check, ...] = CHECKS) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, markup=False, emoji=False, highlight=False, color_system=None)
    render_doctor(DoctorRecord(checks=checks), console, quiet=quiet)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 59, 60, 80, 200])
def test_lines_are_wrapped_and_not_cut(width: int) -> None:
    lines = shown(width)
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert text.startswith("effcli doctor: 1 problem, 1 note ")
    assert "[bold]T4[/bold] \\x1b[31m" in text
    assert text.count(" x") == 60
    assert "to mend: pip install 'bitsandbytes>=0.50,<1'" in text


def test_quiet_leaves_problems_alone() -> None:
    assert [line.split()[0] for line in shown(80, quiet=True)] == ["effcli", "problem", "to"]
    assert shown(80, quiet=True, checks=CHECKS[:1]) == ["effcli doctor: all is well"]


def test_verbose_adds_the_versions(at_once: None) -> None:
    shown = [line.split() for line in effcli("doctor", "--verbose").stdout.splitlines()]
    assert ["torch", version("torch")] in shown
