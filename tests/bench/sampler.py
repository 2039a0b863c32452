"""What watching a device costs: the sampler's share of a processor core, updates with and without it, a boundary.

    python tests/bench/sampler.py [--seconds 20] [--pairs 20]

With an NVIDIA driver it is the driver that is asked, about the card that torch uses (without CUDA, about the first);
else a stand-in, whose answers cost next to nothing, so that what is left is ours and pynvml's. Updates are made in
turns with and without the sampler, in one process, and compared pair by pair.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pynvml
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from effcli.devices import card_names
from effcli.measure.card_readings import opened
from effcli.measure.cuda_allocator import AllocatorPhases, Counters, TorchCounters
from effcli.measure.device_monitor import CudaDevice
from effcli.measure.sampler import Sampler
from effcli.nvml.session import NvmlSession, NvmlUnavailableError, cards, find_card
from effcli.spec import RunSpec
from tests.nvml.standin import Driver, built
from tests.watched import CARD, MIB, FakeCounters

UPDATES = 25
"""Updates of one turn: some seconds, many samples."""


def use_stand_in(folder: Path) -> None:
    """Put the stand-in in the place of the driver's library."""
    library = built(folder)
    if library is None:
        raise SystemExit("neither an NVIDIA driver nor a C compiler for its stand-in")
    stand_in = Driver(folder, library)
    others = [f"process {pid} {500 * MIB}" for pid in range(100_000, 100_020)]
    lines = [f"card {CARD} NVIDIA A10", f"memory {24_000 * MIB} {18_000 * MIB} 0", *others, f"process self {900 * MIB}"]
    stand_in.play("\n".join(lines))
    os.environ |= stand_in.variables()
    pynvml.nvmlLib = ctypes.CDLL(str(library))


def asked_card(folder: Path, device: torch.device) -> tuple[str, str]:
    """Return the identifier of the card that is asked about, and in words who answers."""
    try:
        with NvmlSession.open() as session:
            is_cuda = device.type == "cuda"
            card = find_card(session, card_names(device)).identity if is_cuda else cards(session)[0]
            return card.uuid, f"the driver {session.driver_version}"
    except (NvmlUnavailableError, IndexError):
        use_stand_in(folder)
        return CARD, "the stand-in"


def sampler_of(device: CudaDevice, interval_s: float) -> Sampler:
    """Return a sampler as a run has it."""
    return Sampler(lambda: opened(device.card_names), device.counters, interval_s=interval_s, baseline=None)


def print_share(device: CudaDevice, interval_s: float, seconds: float) -> None:
    """Print how much of a core the sampler's thread takes while the process has nothing else to do."""
    sampler = sampler_of(device, interval_s)
    began_s = time.perf_counter()
    sampler.start()
    time.sleep(seconds)
    sampler.stop()
    took_s = time.perf_counter() - began_s
    facts = sampler.facts()
    if not facts.num_samples:
        raise SystemExit(f"nothing was read: {facts.reason}")
    each_s = sampler.processor_s / facts.num_samples
    print(
        f"interval {interval_s:g} s: {facts.num_samples} samples in {took_s:.1f} s, {each_s * 1e6:.0f} us of processor "
        f"time each with opening and closing: {sampler.processor_s / took_s:.3%} of a core"
    )


def training(device: torch.device) -> Callable[[], None]:
    """Return what makes one update of a small transformer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randn(8, 64, 256, device=device)

    def update() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


@contextmanager
def sampling(device: CudaDevice, interval_s: float) -> Iterator[None]:
    """Sample meanwhile."""
    sampler = sampler_of(device, interval_s)
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()


def turn(update: Callable[[], None], torch_device: torch.device) -> tuple[float, float]:
    """Return the wall seconds, and the processor seconds of all threads, that the updates of one turn take."""
    began_s, processor_s = time.perf_counter(), time.process_time()
    for _ in range(UPDATES):
        update()
    if torch_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s, time.process_time() - processor_s


def print_updates(device: CudaDevice, torch_device: torch.device, interval_s: float, pairs: int) -> None:
    """Print updates per second with the sampler and without, and the ratio of the two in each pair."""
    update = training(torch_device)
    turn(update, torch_device)
    took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for pair in range(pairs):
        for is_sampled in (pair % 2 == 0, pair % 2 == 1):
            with sampling(device, interval_s) if is_sampled else nullcontext():
                took[is_sampled].append(turn(update, torch_device))
    for clock, name in enumerate(("wall", "processor")):
        without, with_it = ([UPDATES / seconds[clock] for seconds in took[is_sampled]] for is_sampled in (False, True))
        ratios = sorted(one / other for one, other in zip(with_it, without, strict=True))
        print(
            f"updates per {name} second on {torch_device.type}: {statistics.median(without):.2f} without, "
            f"{statistics.median(with_it):.2f} with the sampler at {interval_s:g} s; median ratio "
            f"{statistics.median(ratios):.4f} of {pairs} pairs ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


def print_boundary(counters: Counters, whose: str) -> None:
    """Print what it takes where one part of an update ends."""
    phases, rounds = AllocatorPhases(counters), 2000
    began_s = time.perf_counter()
    for _ in range(rounds):
        phases.enter("forward")
        phases.enter("backward")
    each_s = (time.perf_counter() - began_s) / rounds / 2
    print(f"a boundary between two parts of an update, with {whose} counters: {each_s * 1e6:.1f} us")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pairs", type=int, default=20)
    asked = parser.parse_args()
    interval_s = RunSpec().loop.nvml_interval
    has_cuda = torch.cuda.is_available()
    torch_device = torch.device("cuda", 0) if has_cuda else torch.device("cpu")
    counters: Counters = TorchCounters(torch_device) if has_cuda else FakeCounters(600 * MIB, 800 * MIB)
    with tempfile.TemporaryDirectory() as folder:
        uuid, who = asked_card(Path(folder), torch_device)
        device = CudaDevice(counters=counters, card_names=lambda: (uuid,), has_context=lambda: True)
        print(f"asked: {who}")
        for seconds_between in (interval_s, interval_s / 10):
            print_share(device, seconds_between, asked.seconds / 2)
        print_updates(device, torch_device, interval_s, asked.pairs)
        print_boundary(counters, "torch's" if has_cuda else "made-up")


if __name__ == "__main__":
    main()
