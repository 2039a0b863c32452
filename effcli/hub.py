"""The hub: whether it can be reached, and one clear line for each way in which it can fail to answer."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from effcli.errors import UnreachableError, UsageError, chain
from effcli.masking import masked

PROBE_TIMEOUT_S = 2.0
OFFLINE = "HF_HUB_OFFLINE"
ENDPOINT = "HF_ENDPOINT"
DEFAULT_ENDPOINT = "https://huggingface.co"
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def go_offline_if_unreachable() -> bool:
    """Return whether the hub can be asked; where it cannot be connected to, make the hub library use its cache alone.

    Without this, huggingface_hub (2.4) retries every file for more than 20 seconds when there is no network.

    Raises:
        UsageError: `HF_ENDPOINT` is no address.
    """
    if is_offline():
        return False
    if not is_address(endpoint()):
        raise UsageError(f"{not_an_address()}; unset {ENDPOINT}")
    if proxy_variable() is not None:
        return True  # the proxy resolves the name, so a direct connection proves nothing
    try:
        connect()
    except OSError:
        os.environ[OFFLINE] = "1"
        for name in ("huggingface_hub.constants", "datasets.config"):  # both read the variable when imported
            if name in sys.modules:
                sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
        return False
    return True


def is_offline() -> bool:
    """Return whether the hub must not be asked, because `HF_HUB_OFFLINE` says so."""
    return os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def proxy_variable() -> str | None:
    """Return the name of the environment variable that sends requests through a proxy; None where none does."""
    return next((name for name in PROXIES if os.environ.get(name)), None)


def endpoint() -> str:
    """Return the address of the hub, which `HF_ENDPOINT` may change."""
    return os.environ.get(ENDPOINT, DEFAULT_ENDPOINT)


def is_address(text: str) -> bool:
    """Return whether a text is an address at which a hub can be looked for."""
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed, an empty part of a name
        return False


def not_an_address() -> str:
    """Return in words that the address of the hub is none, without what is secret in it."""
    return f"{ENDPOINT} is '{masked(endpoint())}', which is no address such as {DEFAULT_ENDPOINT}"


def connect() -> None:
    """Connect to the hub once, within `PROBE_TIMEOUT_S` and the time that its name takes to be resolved.

    Raises:
        OSError: it does not answer.
    """
    address = urlsplit(endpoint())
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S).close()


@contextmanager
def hub_errors(what: str, name: str, *, flag: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into `UnreachableError`; `what` is "model" or "data set", `flag` its option.

    Raises:
        UnreachableError: the repository is gated, missing, or out of reach.
        UsageError: the name is no hub id.
    """
    from huggingface_hub import errors

    local = f"give a local path with {flag}"
    try:
        yield
    except OSError as error:
        # transformers raises plain OSError over what the hub library said.
        causes = [cause for cause in chain(error) if type(cause).__module__.startswith("huggingface_hub")]
        kinds = tuple(type(cause) for cause in causes)
        if any(issubclass(kind, errors.GatedRepoError) for kind in kinds):
            raise UnreachableError(
                f"{what} '{name}' is gated: ask for access on its hub page and log in with `hf auth login`, or {local}"
            ) from error
        if any(issubclass(kind, errors.RepositoryNotFoundError) for kind in kinds):
            raise UnreachableError(
                f"{what} '{name}' was not found on the hub (or is private: `hf auth login`); "
                f"check the spelling, or {local}"
            ) from error
        if any(issubclass(kind, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled) for kind in kinds):
            raise _out_of_reach(what, name, local) from error
        if any(issubclass(kind, errors.EntryNotFoundError) for kind in kinds):
            raise UnreachableError(f"{what} '{name}' is on the hub but lacks a file that is needed; {local}") from error
        if kinds or isinstance(error, ConnectionError):
            raise _out_of_reach(what, name, local) from error
        raise
    except errors.HFValidationError as error:
        raise UsageError(f"{what} '{name}' is neither a local path nor a hub id such as owner/name; {local}") from error


def _out_of_reach(what: str, name: str, local: str) -> UnreachableError:
    return UnreachableError(
        f"{what} '{name}' is not in the local cache, and the hub cannot be reached "
        f"(no network, or {OFFLINE} is set); {local}"
    )
