"""The connections that gloo opens between the processes of a group. No torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def open_sockets() -> frozenset[tuple[int, str]]:
    """Return number and name of each socket that this process has open; none where the system does not say (Linux)."""
    found = set()
    with suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed since
                if (name := os.readlink(entry)).startswith("socket:"):
                    found.add((int(entry.name), name))
    return frozenset(found)


def hang_up(sockets: frozenset[tuple[int, str]]) -> None:
    """End the connections of those sockets that are still open, so that the other side notices at once.

    Leaving a group does not close them while anything refers to it, as a replica does (torch 2.13).
    """
    for number, _ in sockets & open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo aborts where it cannot accept
                connection.shutdown(socket.SHUT_RDWR)
