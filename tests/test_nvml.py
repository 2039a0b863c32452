"""What the driver says of a card's memory, through the real `pynvml` and the stand-in of the driver's library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pynvml
import pytest

from effcli.nvml.answers import Answer, CardReading
from effcli.nvml.failures import NvmlReturn
from effcli.nvml.session import DriverLostError, NvmlSession, NvmlUnavailableError, cards, find_card
from tests.commands import effcli
from tests.nvml.standin import AGES, Age, Driver

MIB, GIB = 2**20, 2**30
UUID = "GPU-11111111-aaaa-bbbb-cccc-000000000000"
ONE_CARD = f"card {UUID} NVIDIA H100 80GB HBM3\nmemory {80 * GIB} {17 * GIB} {GIB // 2}\n"
DIVIDED = f"""
    card {UUID} NVIDIA A100-SXM4-40GB
    mig on
    memory {40 * GIB} {10 * GIB} {GIB // 2}
    fail nvmlDeviceGetMemoryInfo 4 on {UUID}
    fail nvmlDeviceGetComputeRunningProcesses 4 on {UUID}
    instance MIG-22222222-aaaa-bbbb-cccc-000000000001 7 0 0
    memory {4864 * MIB} {3 * GIB} 0
    process self {2 * GIB}
"""
OWN = os.getpid()


def read(*names: str) -> CardReading:
    with NvmlSession.open() as session:
        return find_card(session, names or (UUID,)).read(OWN)


def amounts(reading: CardReading) -> list[int | None]:
    return [part.num_bytes for part in (reading.total, reading.used, reading.driver_reserved, reading.process)]


def no_session() -> str:
    with pytest.raises(NvmlUnavailableError) as caught:
        NvmlSession.open()
    return caught.value.reason


def test_a_card_tells_its_memory_and_what_a_process_holds(driver: Driver) -> None:
    driver.play(ONE_CARD + f"process self {16 * GIB}\nprocess 1 {GIB}")
    with NvmlSession.open() as session:
        versions = (session.driver_version, session.nvml_version, session.cuda_version)
        (identity,) = cards(session)
        reading = find_card(session, [UUID]).read(OWN)
    assert versions == ("570.86.15", "12.570.86.15", "12.8")
    assert (identity.uuid, identity.name, identity.index) == (UUID, "NVIDIA H100 80GB HBM3", 0)
    assert amounts(reading) == [80 * GIB, 17 * GIB, GIB // 2, 16 * GIB]
    assert driver.calls() == [("init", 0), ("shutdown", 0)]


def test_memory_changes_while_it_is_read(driver: Driver) -> None:
    later = f"then 2\nmemory {80 * GIB} {30 * GIB}\nprocess self {29 * GIB}\nthen 3\nmemory {80 * GIB} {2 * GIB}\n"
    driver.play(ONE_CARD + f"process self {16 * GIB}\n" + later)
    with NvmlSession.open() as session:
        card = find_card(session, [UUID])
        readings = [card.read(OWN) for _ in range(4)]
    assert [reading.used.num_bytes for reading in readings] == [17 * GIB, 17 * GIB, 30 * GIB, 2 * GIB]
    assert [reading.process.num_bytes for reading in readings] == [16 * GIB, 16 * GIB, 29 * GIB, None]


# --- the driver does not open -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"),
    [(12, "was not found"), (9, "not loaded"), (18, "reboot"), (4, "permission"), (999, "unknown"), (77, "77")],
)
def test_c22_a_driver_that_does_not_open_is_a_reason_and_is_not_closed(
    code: int, expected: str, driver: Driver
) -> None:
    driver.play(ONE_CARD + f"fail nvmlInit {code}")
    reason = no_session()
    assert expected in reason
    assert "\n" not in reason
    assert driver.calls() == [("init", code)]


def test_a_driver_that_opens_at_the_second_attempt_is_closed_once(driver: Driver) -> None:
    driver.play(ONE_CARD + "fail nvmlInit 9")
    no_session()
    driver.play(ONE_CARD)
    session = NvmlSession.open()
    session.close()
    session.close()
    assert driver.calls() == [("init", 9), ("init", 0), ("shutdown", 0)]


def test_a_driver_is_closed_where_its_opening_is_interrupted(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    driver.play(ONE_CARD)
    monkeypatch.setattr(pynvml, "nvmlSystemGetNVMLVersion", interrupt)
    with pytest.raises(KeyboardInterrupt):
        NvmlSession.open()
    assert driver.calls() == [("init", 0), ("shutdown", 0)]


def test_no_error_comes_out_of_closing(driver: Driver) -> None:
    driver.play(ONE_CARD + "fail nvmlShutdown 15")
    NvmlSession.open().close()
    assert driver.num_open() == 0


def test_without_a_package_or_with_a_broken_one_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in no_session()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise RuntimeError('made for another machine')", "made for another machine"),
        ("nvmlInit = print", "pip install --upgrade nvidia-ml-py"),
    ],
)
def test_another_package_of_that_name_is_a_reason(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml")
    assert expected in no_session()


@pytest.mark.skipif(find_library("nvidia-ml") is not None, reason="this machine has the driver's library")
def test_a_process_without_the_driver_library_has_a_reason() -> None:
    environment = variables({"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")})
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True, env=environment)
    assert "libnvidia-ml) was not found" in done.stdout


PROGRAM = f"""
import json, os
from effcli.nvml.session import NvmlSession, NvmlUnavailableError, cards, find_card
try:
    with NvmlSession.open() as session:
        print(*(card.uuid for card in cards(session)))
        print(find_card(session, ["{UUID}"]).read(os.getpid()).process.num_bytes)
except NvmlUnavailableError as error:
    print(error.reason)
"""


def variables(more: dict[str, str]) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"], **more}


def test_another_process_loads_the_library_by_its_own_name(driver: Driver) -> None:
    driver.play(ONE_CARD + f"process self {GIB}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        check=True,
        text=True,
        env=variables(driver.environment()),
    )
    assert done.stdout.split() == [UUID, str(GIB)]
    assert driver.calls() == [("init", 0), ("shutdown", 0)]


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "held"),
    [
        (["self 100 compute"], 100),
        (["self 100 compute", "self 70 graphics"], 100),
        (["self 100 compute", "self 170 graphics"], 170),
        (["self 100 graphics"], 100),
        (["self 100 mps", "1 5"], 100),
        (["self n/a compute", "self 70 graphics"], 70),
        (["self 100", "self 70"], 100),
        (["1 5", "2 6", "self 100", "3 7"], 100),
    ],
)
def test_a_process_in_several_lists_counts_once(processes: list[str], held: int, driver: Driver) -> None:
    driver.play(ONE_CARD + "\n".join(f"process {line}" for line in processes))
    assert read().process == Answer(num_bytes=held)


def test_c19_a_process_whose_memory_is_not_reported_has_a_reason(driver: Driver) -> None:
    driver.play(ONE_CARD + "process self n/a")
    reading = read()
    assert amounts(reading) == [80 * GIB, 17 * GIB, GIB // 2, None]
    assert "the driver doesn't report it" in str(reading.process.reason)


def test_c20_a_process_that_is_not_listed_is_told_of_containers(driver: Driver) -> None:
    driver.play(ONE_CARD + f"process 645400 {9 * GIB}")
    reading = read()
    assert amounts(reading) == [80 * GIB, 17 * GIB, GIB // 2, None]
    assert all(word in str(reading.process.reason) for word in (str(OWN), "lists 1 other", "container", "--pid=host"))


def test_an_empty_list_is_not_zero_bytes(driver: Driver) -> None:
    driver.play(ONE_CARD)
    assert "lists none" in str(read().process.reason)


@pytest.mark.parametrize(("listed", "expected"), [("0", "0 bytes"), (str(90 * GIB), "more than the card has")])
def test_what_a_process_cannot_hold_is_no_number(listed: str, expected: str, driver: Driver) -> None:
    driver.play(ONE_CARD + f"process self {listed}")
    answer = read().process
    assert answer.num_bytes is None
    assert expected in str(answer.reason)


@pytest.mark.parametrize(("code", "expected"), [(3, "not supported"), (4, "permission"), (999, "unknown"), (13, "old")])
def test_a_list_that_the_driver_refuses_leaves_the_memory(code: int, expected: str, driver: Driver) -> None:
    driver.play(ONE_CARD + f"process self 100\nfail nvmlDeviceGetComputeRunningProcesses {code}")
    reading = read()
    assert amounts(reading) == [80 * GIB, 17 * GIB, GIB // 2, None]
    assert expected in str(reading.process.reason)


def test_a_list_of_graphics_that_the_driver_refuses_does_not_matter(driver: Driver) -> None:
    driver.play(ONE_CARD + "process self 100\nfail nvmlDeviceGetGraphicsRunningProcesses 3")
    assert read().process == Answer(num_bytes=100)


def test_a_list_that_grows_while_it_is_read_is_read_again(driver: Driver) -> None:
    driver.play(ONE_CARD + "process self 100")
    with NvmlSession.open() as session:
        card = find_card(session, [UUID])
        asked: list[int] = []

        class Growing:
            """The real binding, whose first list fails as where processes came between its two calls."""

            def __getattr__(self, name: str) -> Any:
                if name == "nvmlDeviceGetComputeRunningProcesses" and not asked:
                    asked.append(1)
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
                return getattr(pynvml, name)

        again = type(card)(identity=card.identity, binding=Growing(), handle=card.handle)
        assert again.read(OWN).process == Answer(num_bytes=100)
    assert asked


@pytest.mark.parametrize(("num_others", "place"), [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (5, 2), (5, 3), (5, 5)])
def test_longer_entries_of_early_535_drivers_are_not_misread(num_others: int, place: int, driver: Driver) -> None:
    processes = [f"process {101 + other} {other * MIB}" for other in range(num_others)]
    processes.insert(place, f"process self {5 * GIB}")
    driver.play(ONE_CARD + "\n".join(["wide", *processes]))
    with NvmlSession.open() as session:
        card = find_card(session, [UUID])
        garbled = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card.handle)}
        assert garbled != {OWN, *(101 + other for other in range(num_others))}
        assert card.read(OWN).process == Answer(num_bytes=5 * GIB)


# --- old drivers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver_age", AGES)
def test_an_old_driver_says_less_and_is_not_misread(driver: Driver, driver_age: Age) -> None:
    driver.play(ONE_CARD + "process self 100")
    reading = read()
    if driver_age == "new":
        assert amounts(reading) == [80 * GIB, 17 * GIB, GIB // 2, 100]
    else:  # it counts what it keeps as in use
        assert amounts(reading) == [80 * GIB, 17 * GIB + GIB // 2, None, 100 if driver_age == "old" else None]
        assert "doesn't tell it apart" in str(reading.driver_reserved.reason)
    if driver_age == "ancient":
        assert "too old" in str(reading.process.reason)
    with NvmlSession.open() as session:
        assert session.cuda_version == "12.8"


@pytest.mark.parametrize("code", [3, 13, 25])
def test_a_new_library_with_an_old_driver_falls_back(code: int, driver: Driver) -> None:
    driver.play(ONE_CARD + f"fail nvmlDeviceGetMemoryInfo_v2 {code}")
    assert amounts(read())[:3] == [80 * GIB, 17 * GIB + GIB // 2, None]


def test_a_passing_failure_does_not_mix_two_meanings_of_used(driver: Driver) -> None:
    driver.play(ONE_CARD + "fail nvmlDeviceGetMemoryInfo_v2 999")
    reading = read()
    assert amounts(reading) == [None] * 4
    assert "unknown" in str(reading.used.reason)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (f"{80 * GIB} n/a {GIB}", [80 * GIB, None, GIB]),
        (f"{80 * GIB} {GIB} n/a", [80 * GIB, GIB, None]),
        (f"n/a {GIB} 5", [None, GIB, 5]),
        ("n/a n/a n/a", [None, None, None]),
        ("0 0 0", [None, None, None]),
        (f"0 {GIB} 0", [None, None, None]),
        (f"{GIB} {2 * GIB} 5", [GIB, None, 5]),
        (f"{GIB} 5 {2 * GIB}", [GIB, 5, None]),
        (f"{GIB} 0 0", [GIB, 0, 0]),
    ],
)
def test_amounts_that_are_missing_or_cannot_be_are_reasons(
    memory: str, expected: list[int | None], driver: Driver
) -> None:
    driver.play(f"card {UUID} A card\nmemory {memory}")
    reading = read()
    assert amounts(reading)[:3] == expected
    for answer in (reading.total, reading.used, reading.driver_reserved, reading.process):
        assert (answer.num_bytes is None) == (answer.reason is not None)


def test_unified_memory_has_its_own_reason_and_the_process_is_still_told(driver: Driver) -> None:
    driver.play(f"card {UUID} NVIDIA GB10\nfail nvmlDeviceGetMemoryInfo 3\nprocess self {3 * GIB}")
    reading = read()
    assert amounts(reading) == [None, None, None, 3 * GIB]
    assert "shares the system's memory" in str(reading.used.reason)


def test_codes_have_the_names_that_the_binding_gives_them() -> None:
    assert {code.name: code.value for code in NvmlReturn} == {
        code.name: getattr(pynvml, f"NVML_ERROR_{code.name}") for code in NvmlReturn
    }


# --- the driver is lost -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected"), [(15, "lost"), (16, "reset"), (9, "loaded"), (18, "reboot"), (1, "closed")]
)
@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses", "*"])
def test_a_driver_that_is_lost_half_way_is_told_apart(function: str, code: int, expected: str, driver: Driver) -> None:
    driver.play(ONE_CARD + f"process self 100\nfail {function} {code} after 20")
    with NvmlSession.open() as session:
        card = find_card(session, [UUID])
        assert amounts(card.read(OWN)) == [80 * GIB, 17 * GIB, GIB // 2, 100]
        with pytest.raises(DriverLostError) as caught:
            [card.read(OWN) for _ in range(30)]
    assert expected in caught.value.reason
    assert driver.num_open() == 0


def test_a_session_that_another_closed_is_a_lost_driver(driver: Driver) -> None:
    driver.play(ONE_CARD)
    with NvmlSession.open() as session:
        card = find_card(session, [UUID])
        pynvml.nvmlShutdown()
        with pytest.raises(DriverLostError, match="closed"):
            card.read(OWN)
        pynvml.nvmlInit()


def test_sessions_of_one_process_may_overlap(driver: Driver) -> None:
    driver.play(ONE_CARD)
    with NvmlSession.open() as session:
        card = find_card(session, [UUID])
        NvmlSession.open().close()
        assert card.read(OWN).used.num_bytes == 17 * GIB


def test_one_card_may_be_read_from_several_threads(driver: Driver) -> None:
    driver.play(ONE_CARD + "process self 100")
    wrong: list[Any] = []

    def repeat(card: Any) -> None:
        try:
            wrong.extend(reading for reading in (card.read(OWN) for _ in range(200)) if None in amounts(reading))
        except Exception as error:
            wrong.append(error)

    with NvmlSession.open() as session:
        card = find_card(session, [UUID])
        threads = [threading.Thread(target=repeat, args=(card,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


# --- what the driver writes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"NVIDIA \xff\xfe card", "NVIDIA \ufffd\ufffd card"),
        (b"\x1b[31mred\x07", "?[31mred?"),
        (b"[bold]x[/bold]", "[bold]x[/bold]"),
        (b"n" * 95, "n" * 95),
        (b"n" * 96, None),  # no room for it in pynvml's buffer: the driver refuses
        (b"", ""),
    ],
)
def test_odd_names_neither_fail_nor_reach_the_terminal(name: bytes, expected: str | None, driver: Driver) -> None:
    driver.play(f"card {UUID} ".encode() + name + f"\nmemory {GIB} 5 0".encode())
    with NvmlSession.open() as session:
        (identity,) = cards(session)
    assert (identity.uuid, identity.name) == (UUID, expected)


@pytest.mark.parametrize(
    "function", ["nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion"]
)
def test_versions_that_the_driver_does_not_tell_are_none(function: str, driver: Driver) -> None:
    driver.play(ONE_CARD + f"fail {function} 999")
    with NvmlSession.open() as session:
        versions = (session.driver_version, session.nvml_version, session.cuda_version)
    assert versions.count(None) == 1


# --- MIG --------------------------------------------------------------------------------------------------------------


def test_c21_a_divided_card_refuses_and_its_instance_answers(driver: Driver) -> None:
    driver.play(DIVIDED)
    with NvmlSession.open() as session:
        card, instance = cards(session)
        assert (card.mig_enabled, card.parent_uuid, card.index) == (True, None, 0)
        assert (instance.parent_uuid, instance.instance, instance.index) == (UUID, (7, 0), None)
        reading = find_card(session, [instance.uuid, UUID]).read(OWN)
    assert amounts(reading) == [4864 * MIB, 3 * GIB, 0, 2 * GIB]


def test_c21_where_the_instance_refuses_too_there_are_reasons(driver: Driver) -> None:
    driver.play(DIVIDED + "\nfail nvmlDeviceGetMemoryInfo 4\nfail nvmlDeviceGetComputeRunningProcesses 4")
    assert amounts(read("MIG-22222222")) == [None] * 4


def test_a_divided_card_of_several_instances_says_what_to_name(driver: Driver) -> None:
    driver.play(DIVIDED + f"\ninstance MIG-33333333-x 8 0 1\nmemory {4864 * MIB} 5 0")
    reading = read(UUID)
    assert amounts(reading) == [None] * 4
    for answer in (reading.used, reading.process):
        assert "CUDA_VISIBLE_DEVICES" in str(answer.reason)


def test_what_root_is_told_of_a_divided_card_is_not_what_an_instance_has(driver: Driver) -> None:
    driver.play(
        f"card {UUID} A card\nmig on\nmemory {40 * GIB} {10 * GIB}\nprocess self 100 compute 7 0\n"
        f"instance MIG-1 7 0 0\nmemory {GIB} 5\ninstance MIG-2 8 0 1\nmemory {GIB} 5\n"
    )
    reading = read(UUID)
    assert amounts(reading) == [None, None, None, 100]
    assert "CUDA_VISIBLE_DEVICES" in str(reading.used.reason)


def test_a_process_on_a_divided_card_adds_up_over_instances_not_over_lists(driver: Driver) -> None:
    driver.play(
        f"card {UUID} A card\nmig on\nmemory {40 * GIB} {10 * GIB}\n"
        "process self 100 compute 7 0\nprocess self 90 graphics 7 0\nprocess self 20 compute 8 0\n"
    )
    assert read().process == Answer(num_bytes=120)


def test_an_instance_counts_its_own_entries_alone(driver: Driver) -> None:
    lines = "process self 100 compute 7 0\nprocess self 20 compute 8 0\nprocess self 3 compute 7 1"
    driver.play(f"card {UUID} A card\nmig on\nmemory {GIB} 5\ninstance MIG-1 7 0 3\nmemory {GIB} 5\n{lines}")
    assert read("MIG-1").process == Answer(num_bytes=100)


# --- whole commands ---------------------------------------------------------------------------------------------------

ESTIMATE = ("estimate", "distilbert-base-cased")
COMPARE = ("compare", "adamw", "adafactor", "--estimate-only", "--model", "{folder}")
FAILURES = ("blocked", "12", "9", "18", "4", "999")


@pytest.mark.parametrize(
    ("failure", "arguments"),
    [
        *((failure, arguments) for failure in FAILURES for arguments in (("--help",), ESTIMATE)),
        ("blocked", COMPARE),
        ("18", COMPARE),
    ],
)
def test_c22_commands_that_need_no_driver_do_without(
    failure: str, arguments: tuple[str, ...], driver: Driver, distilbert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if failure == "blocked":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        driver.play(f"fail nvmlInit {failure}")
    assert effcli(*(argument.format(folder=distilbert) for argument in arguments)).code == 0
    assert all(what == "init" for what, _ in driver.calls())


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["blocked", "18"])
def test_c22_runs_on_a_cpu_do_without_a_driver(
    failure: str, driver: Driver, distilbert: Path, data: Path, tmp_path: Path
) -> None:
    driver.play(f"fail nvmlInit {failure}")
    blocking = tmp_path / "blocking"
    blocking.mkdir()
    if failure == "blocked":
        (blocking / "pynvml.py").write_text("raise ImportError")
    paths = {"PYTHONPATH": os.pathsep.join([str(blocking), *sys.path])}
    command = [sys.executable, "-m", "effcli", "compare", "adamw", "adafactor", "--model", str(distilbert)]
    rest = ["--data", str(data), "--max-steps", "1", "--out", str(tmp_path / "o"), "--json"]
    environment = {**os.environ, **driver.environment(), **paths}
    done = subprocess.run([*command, *rest], capture_output=True, text=True, env=environment, check=True)
    runs = json.loads(done.stdout)["runs"]
    assert [run["status"] for run in runs] == ["completed"] * 2
    assert all(what == "init" for what, _ in driver.calls())


def test_c22_the_package_is_imported_without_pynvml(driver: Driver) -> None:
    program = "import sys; sys.modules['pynvml'] = None; import effcli, effcli.cli.app; print(effcli.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, env=variables({})
    )
    assert done.stdout.strip()
