"""What other processes hold of a device, asked once through the real binding and the stand-in driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from effcli.measure.device_monitor import CudaDevice
from effcli.measure.device_record import OthersFacts
from effcli.measure.others import held_by_others
from tests.nvml.standin import Driver
from tests.watched import CARD, FakeCounters

GIB = 2**30
TOTAL = 80 * GIB


def watched(
    names: Callable[[], tuple[str, ...]] = lambda: (CARD,), why_no_driver: str | None = None, reserved_bytes: int = 0
) -> CudaDevice:
    counters = FakeCounters(0, reserved_bytes)
    return CudaDevice(counters=counters, card_names=names, has_context=lambda: True, why_no_driver=why_no_driver)


def asked(driver: Driver, script: str) -> OthersFacts:
    driver.play(f"card {CARD} NVIDIA H100\n{script}")
    found = held_by_others(watched())
    assert found is not None
    assert driver.num_open() == 0
    return found


def test_what_is_in_use_beside_this_process_belongs_to_others(driver: Driver) -> None:
    found = asked(driver, f"memory {TOTAL} {11 * GIB} {GIB}\nprocess self {2 * GIB}\nprocess 645400 {8 * GIB}")
    assert found == OthersFacts(num_bytes=9 * GIB, device_bytes=11 * GIB)
    alone = asked(driver, f"memory {TOTAL} {2 * GIB} {GIB}\nprocess self {2 * GIB}")
    assert alone.num_bytes == 0


@pytest.mark.parametrize("driver_age", ["old"])
def test_an_old_driver_counts_what_it_keeps_among_them(driver: Driver) -> None:
    found = asked(driver, f"memory {TOTAL} {11 * GIB} {GIB}\nprocess self {2 * GIB}")
    assert (found.num_bytes, found.device_bytes, found.with_driver) == (10 * GIB, 12 * GIB, True)


def test_a_process_that_holds_less_than_torch_has_reserved_is_another_one(driver: Driver) -> None:
    driver.play(f"card {CARD} NVIDIA H100\nmemory {TOTAL} {11 * GIB}\nprocess self {2 * GIB}")
    found = held_by_others(watched(reserved_bytes=3 * GIB))
    assert (found.num_bytes, found.device_bytes) == (None, 11 * GIB)
    assert "less than torch has reserved" in str(found.reason)
    assert held_by_others(watched(reserved_bytes=GIB)).num_bytes == 9 * GIB


def test_a_process_that_the_driver_does_not_know_leaves_the_whole_device(driver: Driver) -> None:
    found = asked(driver, f"memory {TOTAL} {11 * GIB} {GIB}\nprocess 645400 {9 * GIB}")
    assert (found.num_bytes, found.device_bytes) == (None, 11 * GIB)
    assert "it lists 1 other" in str(found.reason)
    sentinel = asked(driver, f"memory {TOTAL} {11 * GIB} {GIB}\nprocess self n/a")
    assert (sentinel.num_bytes, sentinel.device_bytes) == (None, 11 * GIB)


def test_numbers_that_contradict_each_other_are_none(driver: Driver) -> None:
    found = asked(driver, f"memory {TOTAL} {GIB} {GIB}\nprocess self {2 * GIB}")
    assert (found.num_bytes, found.device_bytes) == (None, GIB)
    assert found.reason


@pytest.mark.parametrize("code", [1, 3, 4, 9, 15, 18, 999])
@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo", "*"])
def test_whatever_a_driver_answers_there_is_a_reason_and_no_number(function: str, code: int, driver: Driver) -> None:
    found = asked(driver, f"memory {TOTAL} {GIB} {GIB}\nprocess self {GIB}\nfail {function} {code}")
    assert found.num_bytes is None
    assert found.device_bytes is None
    assert found.reason
    assert "\n" not in found.reason


def test_a_fault_of_torch_is_a_reason_too(driver: Driver) -> None:
    def names() -> tuple[str, ...]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    driver.play(f"card {CARD} NVIDIA H100")
    assert held_by_others(watched(names)) == OthersFacts(
        reason="RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert driver.num_open() == 0


def test_a_driver_that_hangs_is_not_waited_for(driver: Driver) -> None:
    free = threading.Event()

    def names() -> tuple[str, ...]:
        free.wait(30)
        return (CARD,)

    driver.play(f"card {CARD} NVIDIA H100\nmemory {TOTAL} {GIB} {GIB}")
    found = held_by_others(watched(names), patience_s=0.05)
    assert found == OthersFacts(reason="the driver did not answer within 0.05 s")
    free.set()
    while any(thread.name == "effcli-nvml-others" for thread in threading.enumerate()):
        time.sleep(0.01)


def test_where_there_is_no_driver_to_ask_none_is_asked(driver: Driver) -> None:
    assert held_by_others(None) is None
    assert held_by_others(watched(why_no_driver="this is a ROCm build of torch")) == OthersFacts(
        reason="this is a ROCm build of torch"
    )
    assert driver.calls() == []
