"""The doctor's round: everything that can be wrong here, none of which can end the round or keep it waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from effcli.measure.doctor_record import CardFacts, DoctorRecord
from effcli.packages import installed_version
from effcli.pipeline.doctoring.asking import ProbeProcess, Reply
from effcli.pipeline.doctoring.cards import check_cards, known_cards
from effcli.pipeline.doctoring.disk import check_disk
from effcli.pipeline.doctoring.driver import DriverFacts, check_driver, driver_facts
from effcli.pipeline.doctoring.findings import BackgroundCheck, Checks, Tell, failed, guarded
from effcli.pipeline.doctoring.hub_reach import check_cache, check_hub
from effcli.pipeline.doctoring.installed import check_packages, check_program, versions
from effcli.pipeline.doctoring.machine import check_history, check_memory, check_terminal
from effcli.pipeline.doctoring.torch_check import TorchFacts, check_torch, torch_facts
from effcli.pipeline.doctoring.visible import check_visible, named_identifiers
from effcli.pipeline.doctoring.working import AUTO, OPTIMIZERS, check_device, check_optimizer

LOOKING_S = 20.0
"""Longest time for what is looked at in this process: a name to be resolved, a disk."""
DRIVER_S = 15.0
TRYING_S = 90.0
"""Longest time for what imports torch, which takes half a minute on a busy machine, more from a slow disk."""

NamedChecks = Mapping[str, Callable[[], Checks]]

_BEFORE: NamedChecks = {"effcli": check_program, "packages": check_packages}
_AFTER: NamedChecks = {
    "hub": check_hub,
    "cache": check_cache,
    "memory": check_memory,
    "disk": check_disk,
    "history": check_history,
    "terminal": check_terminal,
}
"""What is looked at beside the rest, and stands before and behind the lines about devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the processes answered; an optimizer whose package is not installed was not asked for."""

    driver: DriverFacts
    torch: TorchFacts
    step: Reply
    optimizers: Mapping[str, Reply]


def examine(device: str | None, tell: Tell) -> DoctorRecord:
    """Return what works here. `device` is the one that was asked for, None for the one that a run would take.

    `tell` takes tracebacks, and what processes complained about.
    """
    before, after = _started(_BEFORE, tell), _started(_AFTER, tell)
    answers = _ask(device or AUTO, tell)
    driver, torch, step = answers.driver, answers.torch, answers.step
    cards, no_cards = _known(answers, tell)
    about_devices = [guarded(name, look, tell) for name, look in _about_devices(answers, cards, device).items()]
    found = (*(one.checks() for one in before), *about_devices, no_cards, *(one.checks() for one in after))
    return DoctorRecord(
        versions={**versions(), "torch_cuda": torch.cuda, "torch_rocm": torch.hip, "driver": driver.driver}
        | {"nvml": driver.nvml, "driver_cuda": driver.cuda},
        requested_device=device,
        device_works=None if device is None else step.answer is not None,
        device=None if step.answer is None else step.answer["device"],
        optimizers={OPTIMIZERS[name]: reply.answer is not None for name, reply in answers.optimizers.items()},
        checks=tuple(check for checks in found for check in checks),
        cards=cards,
    )


def _started(looks: NamedChecks, tell: Tell) -> list[BackgroundCheck]:
    return [BackgroundCheck(name, look, limit_s=LOOKING_S, tell=tell) for name, look in looks.items()]


def _ask(device: str, tell: Tell) -> Answers:
    """Ask the driver first, so that what is tried on a card is not counted among what others hold; the rest at once."""
    with ExitStack() as stack:
        driver = _replied(stack.enter_context(ProbeProcess("driver", limit_s=DRIVER_S)), tell)
        start = partial(ProbeProcess, limit_s=TRYING_S)
        step = stack.enter_context(start("step", device=device))
        torch = stack.enter_context(start("torch"))
        optimizers = {
            package: stack.enter_context(start("optimizer", name=name, device=device))
            for package, name in OPTIMIZERS.items()
            if installed_version(package) is not None
        }
        return Answers(
            driver=driver_facts(driver),
            torch=torch_facts(_replied(torch, tell)),
            step=_replied(step, tell),
            optimizers={package: _replied(asked, tell) for package, asked in optimizers.items()},
        )


def _replied(probe: ProbeProcess, tell: Tell) -> Reply:
    reply = probe.reply()
    if reply.details:
        tell(f"{probe.question}: {reply.details}")
    return reply


def _known(answers: Answers, tell: Tell) -> tuple[tuple[CardFacts, ...], Checks]:
    """Return the cards of driver and torch, and a problem where they could not be brought together."""
    try:
        return known_cards(answers.driver, answers.torch, named_identifiers(answers.driver)), ()
    except Exception as error:
        return (), (failed("card", error, tell),)


def _about_devices(answers: Answers, cards: Sequence[CardFacts], device: str | None) -> NamedChecks:
    driver, torch, step = answers.driver, answers.torch, answers.step
    return {
        "driver": lambda: check_driver(driver),
        "torch": lambda: check_torch(torch, driver),
        "visible": lambda: check_visible(cards, driver),
        "card": lambda: check_cards(cards, driver),
        "device": lambda: check_device(step, device, torch, driver),
        **{
            package: partial(check_optimizer, package, answers.optimizers.get(package), step.answer is not None)
            for package in OPTIMIZERS
        },
    }
