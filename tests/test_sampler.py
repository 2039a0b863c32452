"""The sampler against the stand-in of the driver's library: what is read, what is not, and how reading ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from effcli.measure.device_monitor import DeviceMonitor, read_baseline
from effcli.measure.device_record import Amount, NvmlFacts
from effcli.measure.device_samples import Baseline
from effcli.measure.sampler import Sampler, pause_s
from effcli.measure.side_thread import SideThread
from effcli.nvml.answers import Answer, CardIdentity, CardReading
from tests.nvml.standin import Driver
from tests.watched import CARD, MIB, FakeCounters, believe_in_a_device

GPU = torch.device("cuda", 0)
INTERVAL_S = 0.01


def sampled(
    *, until: int = 1, baseline: Baseline | None = None, meanwhile: Callable[[], None] = lambda: None
) -> NvmlFacts:
    """Return what a monitor read until it had that many samples, or gave up."""
    with DeviceMonitor(GPU, interval_s=INTERVAL_S, baseline=baseline) as monitor:
        meanwhile()
        deadline = time.monotonic() + 20
        while monitor.nvml_facts().num_samples < until and not lost(monitor) and time.monotonic() < deadline:
            time.sleep(0.005)
    return monitor.nvml_facts()


def lost(monitor: DeviceMonitor) -> bool:
    facts = monitor.nvml_facts()
    return bool(facts.reason) and "before a first sample" not in str(facts.reason)


def card(used: int, *processes: str, kept: str = "0", total: int = 24_000) -> str:
    """Return the script of one card; amounts are in MiB."""
    lines = [f"card {CARD} NVIDIA A10", f"memory {total * MIB} {used * MIB} {kept}", *processes]
    return "\n".join(lines)


def own(mib: int) -> str:
    return f"process self {mib * MIB}"


def same(amount: Amount, mib: int) -> bool:
    return amount == Amount(peak_bytes=mib * MIB, last_bytes=mib * MIB)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> FakeCounters:
    """Return the counters of case C23."""
    made = FakeCounters(15_006 * MIB, 16_726 * MIB)
    believe_in_a_device(monkeypatch, made)
    return made


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("effcli")]


def test_what_driver_and_allocator_count_differs_by_the_context(driver: Driver, counters: FakeCounters) -> None:
    driver.play(card(18_000, own(17_300)))
    facts = sampled(until=2)
    assert same(facts.process, 17_300)
    assert same(facts.context, 574)
    assert same(facts.others, 700)
    assert same(facts.device, 18_000)
    assert (facts.name, facts.uuid, facts.total_bytes, facts.reason) == ("NVIDIA A10", CARD, 24_000 * MIB, None)
    assert (facts.interval_s, facts.driver_reserved_bytes, facts.num_failed) == (INTERVAL_S, 0, 0)
    assert facts.driver_version == "570.86.15"
    assert facts.num_samples >= 2
    assert 0 < facts.mean_interval_s < 20
    moment = facts.highest
    assert moment.model_dump() == {
        "allocated_bytes": 15_006 * MIB, "reserved_bytes": 16_726 * MIB, "context_bytes": 574 * MIB,
        "process_bytes": 17_300 * MIB, "others_bytes": 700 * MIB, "device_bytes": 18_000 * MIB,
    }  # fmt: skip
    assert threads() == []


def test_a_short_run_has_a_sample_and_peaks_are_told_from_what_came_last(
    driver: Driver, counters: FakeCounters
) -> None:
    driver.play(card(18_000, own(17_300)))
    with DeviceMonitor(GPU, interval_s=3600, baseline=None) as monitor:
        pass
    assert monitor.nvml_facts().num_samples in (1, 2)
    assert same(monitor.nvml_facts().process, 17_300)
    driver.play(
        card(18_000, own(17_300)) + f"\nthen 2\nmemory {24_000 * MIB} {21_000 * MIB} 0\nprocess self {17_400 * MIB}"
        f"\nthen 4\nmemory {24_000 * MIB} {17_900 * MIB} 0\nprocess self {17_350 * MIB}"
    )
    facts = sampled(until=7)
    peaks = [amount.peak_bytes // MIB for amount in (facts.device, facts.process, facts.context, facts.others)]
    lasts = [amount.last_bytes // MIB for amount in (facts.device, facts.process, facts.context, facts.others)]
    assert peaks == [21_000, 17_400, 674, 3_600]
    assert lasts == [17_900, 17_350, 624, 550]
    assert facts.highest.device_bytes == 21_000 * MIB


def test_numbers_taken_while_the_allocator_grew_give_no_context(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Growing(FakeCounters):
        def read(self) -> Any:
            now = super().read()
            self.hold(now.allocated_bytes + 1, now.reserved_bytes + 1)
            return now

    believe_in_a_device(monkeypatch, Growing(5, 10))
    driver.play(card(18_000, own(17_300)))
    facts = sampled(until=2)
    assert same(facts.process, 17_300)
    for amount in (facts.context, facts.others):
        assert amount.peak_bytes is None
        assert "during every sample" in amount.reason
    assert facts.highest.context_bytes is None


def test_a_process_that_holds_less_than_torch_has_reserved_is_another_one(
    driver: Driver, counters: FakeCounters
) -> None:
    grown = f"then 1\nmemory {24_000 * MIB} {18_000 * MIB} 0\n{own(17_300)}"
    driver.play(f"{card(18_000, own(16_000))}\n{grown}")
    facts = sampled(until=3)
    assert facts.process.reason.startswith("the driver says that this process holds less than torch has reserved")
    assert (facts.process.peak_bytes, facts.context.peak_bytes, facts.others.peak_bytes) == (None, None, None)
    assert same(facts.device, 18_000)
    assert (facts.highest.process_bytes, facts.highest.device_bytes) == (None, 18_000 * MIB)
    facts = sampled(baseline=Baseline(used_bytes=700 * MIB))
    assert (facts.process.peak_bytes, facts.context.peak_bytes) == (17_300 * MIB, 574 * MIB)
    assert "in use before this run: the driver says that this process holds less" in facts.process.how


def test_a_process_that_holds_more_than_is_in_use_leaves_no_others(driver: Driver, counters: FakeCounters) -> None:
    driver.play(card(17_000, own(17_300)))
    facts = sampled()
    assert same(facts.process, 17_300)
    assert facts.others == Amount(reason="the driver says that this process holds more than is in use")


def test_a_device_with_less_in_use_than_torch_has_reserved_is_not_this_one(
    driver: Driver, counters: FakeCounters
) -> None:
    driver.play(card(5_000, own(17_300)))
    facts = sampled(baseline=Baseline(used_bytes=0))
    reason = "the driver says that less of the device is in use than torch has reserved"
    assert (facts.device, facts.others) == (Amount(reason=reason), Amount(reason=reason))
    assert (facts.highest.device_bytes, facts.highest.others_bytes) == (None, None)


def test_a_run_never_takes_nothing_of_a_device(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    believe_in_a_device(monkeypatch, FakeCounters())
    driver.play(card(700, "process self n/a"))
    facts = sampled(baseline=Baseline(used_bytes=700 * MIB))
    assert (facts.process.peak_bytes, facts.context.peak_bytes) == (None, None)
    assert "is less than torch has reserved" in facts.process.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("process 645400 9663676416", "process"),
        ("process self n/a", "report"),
        ("fail nvmlDeviceGetComputeRunningProcesses 4", "permission"),
    ],
)
def test_without_a_number_of_its_own_a_process_is_what_the_device_took_since(
    line: str, reason: str, driver: Driver, counters: FakeCounters
) -> None:
    driver.play(card(700))
    baseline = read_baseline(GPU, interval_s=INTERVAL_S)
    assert baseline == Baseline(used_bytes=700 * MIB)
    driver.play(card(18_000, line))
    facts = sampled(baseline=baseline)
    assert facts.process.peak_bytes == 17_300 * MIB
    assert facts.context.peak_bytes == 574 * MIB
    assert facts.others.peak_bytes == 700 * MIB
    assert facts.process.how.startswith("the whole device less what was in use before this run: ")
    assert reason in facts.process.how
    assert facts.context.how == facts.process.how
    assert "in use before this run" in facts.others.how
    assert facts.reason is None


def test_without_a_baseline_there_is_a_reason_and_neither_zero_nor_a_huge_number(
    driver: Driver, counters: FakeCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.play(card(18_000, "process self n/a"))
    believe_in_a_device(monkeypatch, counters, has_context=lambda: True)
    baseline = read_baseline(GPU, interval_s=INTERVAL_S)
    assert baseline == Baseline(reason="this process had used CUDA before this run began")
    for given in (None, baseline, Baseline(used_bytes=2_000 * MIB)):
        facts = sampled(baseline=given)
        assert same(facts.device, 18_000)
        assert (facts.process.peak_bytes, facts.context.peak_bytes, facts.others.peak_bytes) == (None, None, None)
        assert facts.context.reason == facts.others.reason == "what this process holds is not known"
        assert (facts.highest.process_bytes, facts.highest.device_bytes) == (None, 18_000 * MIB)
    assert "is less than torch has reserved" in facts.process.reason


def test_a_device_that_this_process_holds_already_is_no_baseline(driver: Driver, counters: FakeCounters) -> None:
    driver.play(card(700, own(500)))
    assert "held memory" in read_baseline(GPU, interval_s=INTERVAL_S).reason
    assert read_baseline(GPU, interval_s=0) is None


@pytest.mark.parametrize(("code", "told"), [(9, "not loaded"), (18, "version"), (12, "library")])
def test_a_driver_that_does_not_open_is_a_reason_and_is_not_closed(
    code: int, told: str, driver: Driver, counters: FakeCounters
) -> None:
    driver.play(card(700) + f"\nfail nvmlInit {code}")
    assert told in read_baseline(GPU, interval_s=INTERVAL_S).reason
    facts = sampled()
    assert told in facts.reason
    for amount in (facts.device, facts.process, facts.context, facts.others):
        assert amount == Amount(reason=facts.reason)
    assert "shutdown" not in [what for what, _ in driver.calls()]


def test_a_card_that_the_driver_does_not_know_is_a_reason(
    driver: Driver, counters: FakeCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.play(card(18_000, own(17_300)))
    believe_in_a_device(monkeypatch, counters, names=("GPU-ffffffff",))
    facts = sampled()
    assert facts.num_samples == 0
    assert facts.reason


@pytest.mark.parametrize("code", [15, 1])
def test_a_driver_that_is_lost_half_way_leaves_what_was_read(code: int, driver: Driver, counters: FakeCounters) -> None:
    driver.play(card(18_000, own(17_300)) + f"\nfail nvmlDeviceGetMemoryInfo {code} after 3")
    facts = sampled(until=1000)
    assert facts.num_samples == 3
    assert facts.reason.endswith(", after 3 samples")
    assert same(facts.process, 17_300)
    assert threads() == []


def test_a_device_whose_memory_is_not_counted_still_tells_of_the_process(
    driver: Driver, counters: FakeCounters
) -> None:
    driver.play(card(18_000, own(17_300)) + "\nfail nvmlDeviceGetMemoryInfo 3")
    facts = sampled()
    assert facts.device.peak_bytes is None
    assert "not support" in facts.device.reason
    assert same(facts.process, 17_300)
    assert same(facts.context, 574)
    assert facts.others.reason == facts.device.reason


class Silent:
    """A driver that stops answering, until it is let go; keeps whether it was closed."""

    identity = CardIdentity(uuid=CARD, name="NVIDIA A10", index=0)
    driver_version = None

    def __init__(self, answers: int) -> None:
        self.answers, self.go_on, self.is_closed = answers, threading.Event(), False

    @contextmanager
    def open(self) -> Iterator[Silent]:
        yield self
        self.is_closed = True

    def read(self) -> CardReading:
        self.answers -= 1
        if self.answers < 0:
            self.go_on.wait(30)
        mib = Answer(num_bytes=MIB)
        return CardReading(total=mib, used=mib, driver_reserved=mib, process=mib)


@pytest.mark.parametrize(("answers", "after"), [(0, ""), (2, ", after 2 samples")])
def test_a_driver_that_does_not_answer_holds_up_nothing_and_is_not_closed_under_its_call(
    answers: int, after: str
) -> None:
    silent = Silent(answers)
    sampler = Sampler(silent.open, FakeCounters(), interval_s=0.01, baseline=None, patience_s=0.2)
    sampler.start()
    while silent.answers >= 0:
        time.sleep(0.005)
    sampler.stop()
    sampler.stop()
    facts = sampler.facts()
    assert (facts.reason, facts.num_samples) == (f"the driver did not answer within 0.2 s{after}", answers)
    assert not silent.is_closed
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "effcli-nvml"]
    assert thread.daemon
    silent.go_on.set()
    thread.join()
    assert silent.is_closed


def test_what_goes_wrong_in_a_sample_is_counted_and_sampling_goes_on(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FakeCounters):
        failures = 3

        def read(self) -> Any:
            self.failures -= 1
            if self.failures >= 0:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
            return super().read()

    driver.play(card(18_000, own(17_300)))
    sampler = Sampler(Silent(10**9).open, Failing(), interval_s=INTERVAL_S, baseline=None)
    sampler.start()
    while not sampler.facts().num_samples:
        time.sleep(0.005)
    sampler.stop()
    assert (sampler.facts().num_failed, sampler.facts().reason) == (3, None)

    counters = Failing()
    counters.failures = 10**9
    sampler = Sampler(Silent(10**9).open, counters, interval_s=INTERVAL_S, baseline=None)
    sampler.start()
    sampler.stop()
    assert sampler.facts().reason == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_system_without_room_for_a_thread_is_a_reason(
    driver: Driver, counters: FakeCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert sampled().reason == "can't start new thread"
    assert read_baseline(GPU, interval_s=INTERVAL_S).reason == "can't start new thread"


def test_a_rocm_build_and_a_run_without_sampling_ask_no_driver(
    driver: Driver, counters: FakeCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DeviceMonitor(GPU, interval_s=0, baseline=None) as monitor:
        assert monitor.nvml_facts() == NvmlFacts(reason="sampling is switched off (--nvml-interval 0)")
        assert monitor.peaks() == (15_006 * MIB, 16_726 * MIB)
    believe_in_a_device(monkeypatch, counters, why_no_driver="this is a ROCm build of torch")
    with DeviceMonitor(GPU, interval_s=0.2, baseline=None) as monitor:
        assert monitor.nvml_facts() == NvmlFacts(reason="this is a ROCm build of torch")
    assert "ROCm" in read_baseline(GPU, interval_s=0.2).reason
    assert driver.calls() == []


def test_a_cpu_is_not_watched(driver: Driver) -> None:
    cpu = torch.device("cpu")
    with DeviceMonitor(cpu, interval_s=0.2, baseline=read_baseline(cpu, interval_s=0.2)) as monitor:
        assert (monitor.peaks(), monitor.allocator_facts()) == (None, None)
    assert monitor.nvml_facts() == NvmlFacts(reason="the run was on cpu, not on an NVIDIA GPU")
    assert driver.calls() == []


def test_a_sample_is_followed_by_at_least_a_hundred_times_the_processor_time_that_it_took() -> None:
    assert pause_s(0.2, 0.0) == pause_s(0.2, 0.0019) == 0.2
    assert pause_s(0.2, 0.01) == pytest.approx(1.0)


class Stop(BaseException):
    """What a signal's handler raises."""


def test_what_a_signal_raises_waits_until_the_thread_has_ended() -> None:
    done: list[int] = []

    def work() -> None:
        time.sleep(0.2)  # by then it is waited for
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)
        done.append(1)

    def handle(*ignored: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, handle)
    thread = SideThread(work, "effcli-test")
    try:
        thread.start()
        with pytest.raises(Stop):
            thread.ends_within(20)
        assert done == [1]
        assert thread.ends_within(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert threads() == []


def test_a_signal_while_the_thread_starts_leaves_nothing_open(
    driver: Driver, counters: FakeCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise Stop

    driver.play(card(18_000, own(17_300)))
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(Stop), DeviceMonitor(GPU, interval_s=3600, baseline=None):
        pass
    assert threads() == []
    with pytest.raises(Stop):
        read_baseline(GPU, interval_s=INTERVAL_S)
    assert threads() == []
    assert driver.calls() == [("init", 0), ("shutdown", 0)] * 2
