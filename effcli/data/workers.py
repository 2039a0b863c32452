"""What data workers do with signals that are meant for the run."""

from __future__ import annotations

import os
import signal
import threading


def leave_stopping_to_the_run(worker: int) -> None:
    """Let nothing but the run itself end a data worker: it is the run that decides when to stop.

    A terminal sends SIGINT, and a batch system SIGTERM, to every process of a run; without its workers it could not
    end the update it is at. torch's own handler dies of a SIGTERM that is not the parent's (torch 2.13), so the signal
    is kept from it and read here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_the_run, args=(os.getppid(),), daemon=True).start()


def _end_with_the_run(run: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != run:
        pass
    os._exit(0)
