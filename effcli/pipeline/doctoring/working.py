"""Whether the device and the 8-bit optimizers work, proved by a step of each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effcli.measure.doctor_record import Check
from effcli.packages import installed_version
from effcli.pipeline.doctoring.asking import Reply
from effcli.pipeline.doctoring.driver import DriverFacts
from effcli.pipeline.doctoring.findings import Checks, note, ok, problem
from effcli.pipeline.doctoring.installed import pip_install
from effcli.pipeline.doctoring.torch_check import TorchFacts, command_for, mending

OPTIMIZERS = {"bitsandbytes": "adam8bit", "torchao": "adamw8bit-ao"}
"""Packages of 8-bit optimizers, and the optimizer that is tried; the first is needed, the second an extra."""
_GCC = "apt-get install gcc python3-dev, or name a compiler: export CC=FILE"
AUTO, CPU = "auto", "cpu"


def check_device(reply: Reply, requested: str | None, torch: TorchFacts, driver: DriverFacts) -> Checks:
    """Return whether a training step works on the device that was asked for, or on the one that a run would take."""
    wanted = requested or AUTO
    if reply.answer is None:
        # An error of ours names the flag, which this line does already, and says at its end what to do.
        why, _, advice = reply.failure.removeprefix(f"--device {wanted}: ").partition("; ")
        return (problem("device", f"{wanted} cannot train: {why}", _remedy(wanted, torch, driver, advice)),)
    used = reply.answer["device"]
    device = wanted if ":" in wanted else used
    named = f"{device} ({reply.answer['name']})" if reply.answer["name"] else device
    text = f"a training step on {named} works: forward, backward, AdamW"
    if wanted == AUTO and used == CPU:
        return (note("device", f"{text}; no GPU is used"),)
    return (ok("device", text),)


def _remedy(wanted: str, torch: TorchFacts, driver: DriverFacts, advice: str) -> str:
    if wanted.startswith("cuda") and torch.is_cpu_build and driver.usable_cards:
        return command_for(driver)
    if torch.failure:
        return mending(torch.failure, driver)
    on_cpu = wanted == CPU or (wanted == AUTO and not torch.devices)
    return advice or (f"{pip_install('torch')} --force-reinstall" if on_cpu else "use another device: --device cpu")


def check_optimizer(package: str, reply: Reply | None, device_works: bool) -> Checks:
    """Return whether a package's 8-bit optimizer made a step; `reply` is None where it was not asked.

    `device_works` says whether torch itself made a step on the device, without which an optimizer proves nothing.
    """
    found, name = installed_version(package), OPTIMIZERS[package]
    if found is None or reply is None:
        return (_missing(package),)
    if reply.answer is None and not device_works:
        return (note(package, f"{found}; a step of {name} was not proved, since the device does not work"),)
    if reply.answer is None:
        remedy = f"{pip_install(package)} --force-reinstall, or choose another --optim: effcli optimizers"
        return (problem(package, f"{found}; no step of {name}: {reply.failure}", remedy),)
    return (_stepped(package, f"{found}; a step of {name}", reply.answer),)


def _stepped(package: str, what: str, answer: Mapping[str, Any]) -> Check:
    """Return the line about an optimizer that made a step; torchao's is compiled in a run on CUDA, and not here."""
    text = f"{what} on {answer['device']} works"
    if answer["not_on"]:
        return note(package, f"{text}; {answer['not_on']}, which was asked for, is not there")
    if package != "torchao" or answer["device"] == CPU:
        return ok(package, text)
    text = f"{text}, uncompiled; a run compiles it"
    return (
        ok(package, text) if answer["has_compiler"] else problem(package, f"{text}, but there is no C compiler", _GCC)
    )


def _missing(package: str) -> Check:
    text, remedy = f"not installed; only {package}'s optimizers need it", pip_install(package)
    return problem(package, "not installed", remedy) if package == "bitsandbytes" else note(package, text, remedy)
