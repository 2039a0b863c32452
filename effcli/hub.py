"""The hub: whether it can be reached, and one clear line for each way in which it can fail to answer."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from effcli.errors import UnreachableError

PROBE_TIMEOUT_S = 2.0
OFFLINE = "HF_HUB_OFFLINE"
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def go_offline_if_unreachable() -> bool:
    """Return whether the hub can be asked; where it cannot be connected to, make the hub library use its cache alone.

    Without this, huggingface_hub (2.4) retries every file for more than 20 seconds when there is no network.
    """
    if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if any(os.environ.get(name) for name in PROXIES):
        return True  # the proxy resolves the name, so a direct connection proves nothing
    try:
        address = (endpoint.hostname or "", endpoint.port or (80 if endpoint.scheme == "http" else 443))
        socket.create_connection(address, timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        os.environ[OFFLINE] = "1"
        for name in ("huggingface_hub.constants", "datasets.config"):  # both read the variable when imported
            if name in sys.modules:
                sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        return False
    return True


@contextmanager
def hub_errors(what: str, name: str, *, flag: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into `UnreachableError`; `what` is "model" or "data set", `flag` its option.

    Raises:
        UnreachableError: the repository is gated, missing, or out of reach.
    """
    from huggingface_hub import errors

    local = f"give a local path with {flag}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UnreachableError(
            f"{what} '{name}' is gated: ask for access on its hub page and log in with `hf auth login`, or {local}"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UnreachableError(
            f"{what} '{name}' was not found on the hub (or is private: `hf auth login`); check the spelling, or {local}"
        ) from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _out_of_reach(what, name, local) from error
        raise UnreachableError(f"{what} '{name}' is on the hub but lacks a file that is needed; {local}") from error
    except (errors.HfHubHTTPError, ConnectionError) as error:  # OfflineModeIsEnabled is a ConnectionError
        raise _out_of_reach(what, name, local) from error


def _out_of_reach(what: str, name: str, local: str) -> UnreachableError:
    return UnreachableError(
        f"{what} '{name}' is not in the local cache, and the hub cannot be reached "
        f"(no network, or {OFFLINE} is set); {local}"
    )
