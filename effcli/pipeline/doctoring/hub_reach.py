"""The hub: whether it answers, whether there is a token, and where what came from it is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from effcli import hub
from effcli.errors import first_line
from effcli.files import at_home
from effcli.measure.doctor_record import Check
from effcli.pipeline.doctoring.disk import existing, is_writable, room
from effcli.pipeline.doctoring.findings import Checks, in_words, note, ok, problem
from effcli.units import format_bytes

_COUNTED_WITHIN_S = 2.0
_ANOTHER_TOKEN = "export HF_HOME=FOLDER, a folder of yours, or HF_TOKEN_PATH=FILE"


def check_hub() -> Checks:
    """Return whether the hub can be asked, and whether there is a token for it, which is never shown."""
    address = hub.endpoint().rstrip("/")
    if not hub.is_address(address):
        return (problem("hub", hub.not_an_address(), f"unset {hub.ENDPOINT}"),)
    try:
        token = _token()
    except (OSError, ValueError) as error:  # every question to the hub reads it, and fails as this does
        return (problem("hub", f"the token's file cannot be read: {in_words(error)}", _ANOTHER_TOKEN),)
    if hub.is_offline():
        return (note("hub", f"not asked, since {hub.OFFLINE} is set: only what is cached can be used; {token}"),)
    if (proxy := hub.proxy_variable()) is not None:
        return (note("hub", f"{address} through the proxy of {proxy}, which was not tried; {token}"),)
    return (_reached(address, token),)


def _reached(address: str, token: str) -> Check:
    started = time.monotonic()
    try:
        hub.connect()
    except OSError as error:
        return _not_reached(address, error.strerror or first_line(error), token)
    return ok("hub", f"{address} takes connections, after {time.monotonic() - started:.2f} s; {token}")


def _not_reached(address: str, why: str, token: str) -> Check:
    """Return a problem for an address that somebody chose, else a note: not every machine has a network."""
    text = f"{address} does not answer ({why}): only what is cached can be used; {token}"
    if address == hub.DEFAULT_ENDPOINT:
        return note("hub", text)
    return problem("hub", text, f"correct {hub.ENDPOINT}, or: unset {hub.ENDPOINT}")


def _token() -> str:
    from huggingface_hub import get_token

    return "a token is there" if get_token() else "no token, which gated and private models need (hf auth login)"


def check_cache() -> Checks:
    """Return where models and data sets are cached, how much that is, and what room is left."""
    from huggingface_hub import constants

    models = at_home(constants.HF_HUB_CACHE)
    data = at_home(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    return (_cache(models, "from the hub", "HF_HOME"), _cache(data, "tokenised data", "HF_DATASETS_CACHE"))


def _cache(path: Path, what: str, variable: str) -> Check:
    found = existing(path)
    if not is_writable(found):
        return problem("cache", f"{path} ({what}) cannot be written", f"export {variable}=FOLDER, a folder of yours")
    return ok("cache", f"{path}, {what}: {_amount(path)}, {room(found)}")


def _amount(path: Path) -> str:
    """Return what a folder holds in words; as far as it could be counted in a short time."""
    if not path.exists():
        return "nothing yet"
    ends, total, all_counted = time.monotonic() + _COUNTED_WITHIN_S, 0, True
    for num_bytes in _sizes(path):
        total += num_bytes
        if time.monotonic() > ends:
            all_counted = False
            break
    return format_bytes(total) if all_counted else f"{format_bytes(total)} and more"


def _sizes(path: Path) -> Iterator[int]:
    """Yield the bytes of each file in a folder; links, which the cache has to each file, count for nothing."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    yield entry.stat(follow_symlinks=False).st_size
    except OSError:
        return
