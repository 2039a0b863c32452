"""torch as it was built, held against the driver: a build without CUDA beside a card, or a driver that is too old."""

from __future__ import annotations

import os
from dataclasses import dataclass
from shlex import quote
from typing import Any

from effcli.measure.doctor_record import Check
from effcli.nvml.cuda_versions import needs_newer_driver, version_numbers
from effcli.nvml.visible import VISIBLE, check_listing, read_listing
from effcli.packages import installed_version
from effcli.pipeline.doctoring.asking import LATE, Reply
from effcli.pipeline.doctoring.driver import DriverFacts
from effcli.pipeline.doctoring.findings import Checks, note, ok, problem
from effcli.pipeline.doctoring.installed import pip_install
from effcli.units import count

_INDEX = "https://download.pytorch.org/whl/"
_BUILDS = (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 0), "cu126"))
"""CUDA version of the driver from which a build of torch runs, and the folder of that build; a build runs with every
driver of its major version (NVIDIA's minor version compatibility), but needs 12.8 for cards of 2025."""

_UPDATE = "update the NVIDIA driver: no torch that effcli needs runs with it"

_NOT_LOADED = ("ImportError", "ModuleNotFoundError", "OSError")
"""How the failure of a torch begins that is damaged, rather than at odds with a driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """A device by torch's index. `uuid` has no prefix; `failure` says why it cannot be asked."""

    index: int
    name: str | None = None
    uuid: str | None = None
    capability: str | None = None
    bf16: bool | None = None
    unified: bool = False
    total_bytes: int | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """torch's version and build, the architectures that it has kernels for, its devices, and why there are none."""

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    kernels: tuple[str, ...] = ()
    devices: tuple[TorchDevice, ...] = ()
    why_none: str = ""
    failure: str = ""

    @property
    def is_cpu_build(self) -> bool:
        """Return whether it has no code for GPUs."""
        return self.version is not None and self.cuda is None and self.hip is None


def torch_facts(reply: Reply) -> TorchFacts:
    """Return what torch's process answered; when it did not, that as `failure`."""
    if reply.answer is None:
        return TorchFacts(failure=reply.failure)
    answer: dict[str, Any] = dict(reply.answer)
    devices = tuple(TorchDevice(**device) for device in answer.pop("devices"))
    return TorchFacts(**{**answer, "kernels": tuple(answer["kernels"])}, devices=devices)


def check_torch(torch: TorchFacts, driver: DriverFacts) -> Checks:
    """Return the line about torch: whether its build suits the driver, and has code for each device."""
    if torch.failure:
        return (_failing(torch.failure, driver),)
    return (_build(torch, driver), *_without_kernels(torch))


def _failing(failure: str, driver: DriverFacts) -> Check:
    """Return the line about a torch that is not there, does not load, or hangs or crashes where it looks for CUDA."""
    found = installed_version("torch")
    text = "not installed" if found is None else f"{found}, does not work: {failure}"
    return problem("torch", text, mending(failure, driver))


def mending(failure: str, driver: DriverFacts) -> str:
    """Return what to do about a torch that failed; beside cards the driver may be at fault, and a hang says nothing."""
    if installed_version("torch") is None:
        return pip_install("torch")
    damaged = failure.startswith(_NOT_LOADED) or not (driver.cards or failure.startswith(LATE))
    return _forced("") if damaged else "look at what nvidia-smi and --verbose say"


def _build(torch: TorchFacts, driver: DriverFacts) -> Check:
    if torch.is_cpu_build:
        text = f"{torch.version}, built without CUDA"
        if driver.usable_cards:
            return problem("torch", f"{text}, though there is an NVIDIA card", command_for(driver))
        return ok("torch", text)
    text = f"{torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else f'ROCm {torch.hip}'}"
    if torch.devices:
        return ok("torch", f"{text}, sees {count(len(torch.devices), 'device')}{_older_driver(torch, driver)}")
    if hides_all(driver):
        return note("torch", f"{text}; {VISIBLE} hides all cards", f"unset {VISIBLE}")
    if torch.cuda and needs_newer_driver(torch.cuda, driver.cuda):
        text, command = f"{text}, but the driver serves CUDA up to {driver.cuda}", command_for(driver)
        return problem("torch", text, command if command == _UPDATE else f"update the NVIDIA driver, or: {command}")
    text = f"{text}, but sees no device: {torch.why_none}"
    return problem("torch", text, "look at what nvidia-smi says") if driver.usable_cards else note("torch", text)


def hides_all(driver: DriverFacts) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES leaves no card, of the driver's where it lists them."""
    if VISIBLE not in os.environ:
        return False
    listing = read_listing(os.environ[VISIBLE])
    return not (check_listing(listing, driver.identities) if driver.identities else listing).entries


def command_for(driver: DriverFacts) -> str:
    """Return the command that installs a build of torch which this driver can run."""
    if driver.cuda is None:
        return _forced("")
    build = next((name for needed, name in _BUILDS if version_numbers(driver.cuda) >= needed), None)
    return _UPDATE if build is None else _forced(build)


def _forced(build: str) -> str:
    command = pip_install("torch").replace("pip install", "pip install --force-reinstall", 1)
    return f"{command} --index-url {quote(_INDEX + build)}" if build else command


def _older_driver(torch: TorchFacts, driver: DriverFacts) -> str:
    """Return what should be said of a driver that serves an older CUDA, though torch runs with it."""
    if torch.cuda and driver.cuda and version_numbers(torch.cuda) > version_numbers(driver.cuda):
        return f" (the driver is that of CUDA {driver.cuda}, which it is compatible with)"
    return ""


def _without_kernels(torch: TorchFacts) -> Checks:
    """Return a problem for each CUDA device that torch has neither compiled code for nor code to compile."""
    if not torch.cuda or not torch.kernels:
        return ()
    return tuple(
        problem(
            "torch",
            f"has no code for cuda:{device.index}, whose compute capability is {device.capability}: only for "
            f"{', '.join(torch.kernels)}",
            f"{pip_install('torch')} --upgrade, or a build for older cards from https://pytorch.org",
        )
        for device in torch.devices
        if device.capability and not _has_code(device.capability, torch.kernels)
    )


def _has_code(capability: str, kernels: tuple[str, ...]) -> bool:
    """Return whether one of the architectures runs: `sm_` on its own major version from its minor one on, `compute_`
    (compiled when it is loaded) on everything that is not older; a letter behind the number binds it to that number.
    """
    wanted = version_numbers(capability)
    for kernel in kernels:
        kind, _, digits = kernel.partition("_")
        number = digits.rstrip("af")
        have = (int(number[:-1] or 0), int(number[-1])) if number.isdecimal() else (0, 0)
        if kind == "compute" and have <= wanted:
            return True
        if kind == "sm" and have[0] == wanted[0] and (have <= wanted if not digits.endswith("a") else have == wanted):
            return True
    return False
