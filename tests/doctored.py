"""Answers of a doctor's fresh processes as a test wants them: given at once, or played by real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effcli.pipeline.doctoring.asking import Reply

ANSWERS = "EFFCLI_TEST_ANSWERS"
PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from tests.doctored import main
main()
"""
"""Takes the place of `effcli.pipeline.doctoring.asking.PROGRAM`: plays what the environment says of each question."""

CPU_BUILD: dict[str, Any] = {
    "version": "2.13.0+cpu", "cuda": None, "hip": None, "kernels": [], "devices": [], "why_none": "",
}  # fmt: skip
NO_DRIVER = {"driver": None, "nvml": None, "cuda": None, "cards": [], "reason": "no driver here", "code": 12}
WELL: dict[str, Any] = {
    "driver": {"answer": NO_DRIVER},
    "torch": {"answer": CPU_BUILD},
    "step": {"answer": {"device": "cpu", "name": None}},
    "adam8bit": {"answer": {"device": "cpu", "not_on": "", "has_compiler": True}},
    "adamw8bit-ao": {"answer": {"device": "cpu", "not_on": "", "has_compiler": True}},
}
"""What is said to each question, or about each optimizer: an answer, an error, or what else a process may do."""


def device(index: int, uuid: str, name: str = "NVIDIA T4", capability: str = "7.5") -> dict[str, Any]:
    """Return a device as torch's process describes it; `uuid` has no prefix."""
    return {"index": index, "name": name, "uuid": uuid, "capability": capability, "bf16": capability >= "8",
        "unified": False, "total_bytes": 15 * 2**30}  # fmt: skip


def cuda_build(*devices: dict[str, Any], cuda: str = "12.6", why_none: str = "") -> dict[str, Any]:
    """Return the answer of a torch that is built for CUDA and sees these devices."""
    return {**CPU_BUILD, "version": "2.13.0+cu126", "cuda": cuda, "devices": list(devices), "why_none": why_none}


class Told:
    """Takes the place of `effcli.pipeline.doctoring.asking.ProbeProcess`: replies at once, without a process."""

    answers: dict[str, Any] = WELL

    def __init__(self, question: str, *, limit_s: float, **about: Any) -> None:
        self.question = question
        self._about = about

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def reply(self) -> Reply:
        """Return what the test wants; a question that it does not name is answered in this process."""
        from effcli.pipeline.doctoring import answering
        from effcli.pipeline.doctoring.asking import Reply

        said = self.answers.get(self._about.get("name", self.question))
        said = json.loads(json.dumps(answering.said(self.question, self._about) if said is None else said))
        return Reply(answer=said.get("answer"), failure=said.get("error", ""), details=said.get("details", ""))


def main() -> None:
    """Play what the environment says about the question; one that it does not name is really answered."""
    question, about = sys.argv[1], json.loads(sys.argv[2])
    play = json.loads(os.environ[ANSWERS]).get(about.get("name", question))
    if play is None:
        from effcli.pipeline.doctoring import answering  # takes longer than all the rest

        answering.main()
        return
    if "complaint" in play:
        print(play["complaint"], file=sys.stderr, flush=True)
    if "hang" in play:  # with a process of its own, as a compiler would be
        started = subprocess.Popen(["sleep", "600"])
        with open(play["hang"], "a") as file:
            file.write(f"{os.getpid()} {started.pid}\n")
        time.sleep(600)
    if "signal" in play:
        signal.signal(play["signal"], signal.SIG_DFL)
        os.kill(os.getpid(), play["signal"])
    if "code" in play:
        sys.exit(play["code"])
    print("a library said this where only the answer should be")
    print(json.dumps(play))
