"""The NVIDIA driver, opened through `pynvml`, and its cards, found by what CUDA and torch call them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any

from effcli.nvml.answers import CardIdentity
from effcli.nvml.card import Card
from effcli.nvml.failures import (
    NO_PACKAGE,
    OLD_PACKAGE,
    DriverLostError,
    NvmlReturn,
    NvmlUnavailableError,
    code_of,
    explain,
    unless_lost,
)
from effcli.nvml.names import matching, readable
from effcli.units import listed

__all__ = ["Card", "DriverLostError", "NvmlSession", "NvmlUnavailableError", "cards", "find_card"]


class NvmlSession:
    """The driver, open until `close`, or for a `with` block; sessions of one process may overlap.

    `driver_version`, `nvml_version` and `cuda_version` (the newest CUDA that the driver serves) are None where the
    driver does not tell.
    """

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self._is_open = True
        self.driver_version = _text(binding, "nvmlSystemGetDriverVersion")
        self.nvml_version = _text(binding, "nvmlSystemGetNVMLVersion")
        self.cuda_version = _cuda_version(binding)

    @classmethod
    def open(cls) -> NvmlSession:
        """Return the opened driver.

        Raises:
            NvmlUnavailableError: there is no usable `pynvml`, no library, no driver, or it refuses.
        """
        binding = _binding()
        try:
            binding.nvmlInit()
        except Exception as error:  # whatever it is, nothing is open now, and nothing must be closed
            raise NvmlUnavailableError(explain(error)) from error
        try:
            return cls(binding)
        except BaseException:  # a Ctrl-C while the versions are asked for
            with suppress(Exception):
                binding.nvmlShutdown()
            raise

    def close(self) -> None:
        """Close the driver; a second call does nothing, and nothing is raised."""
        if self._is_open:
            self._is_open = False
            with suppress(Exception):  # a driver that was lost can't be closed either
                self.binding.nvmlShutdown()

    def __enter__(self) -> NvmlSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def cards(session: NvmlSession) -> tuple[CardIdentity, ...]:
    """Return all cards in the driver's order, each followed by its MIG instances.

    A card that the driver can't open is there too, with the reason and an empty identifier.

    Raises:
        NvmlUnavailableError: the driver does not say how many there are.
    """
    return tuple(card.identity for card in _all_cards(session.binding))


def find_card(session: NvmlSession, names: Sequence[str]) -> Card:
    """Return the card of the first name that fits one; see `matching` for what a name may be.

    A divided card stands for its instance where the driver shows a single one, since nothing runs on the whole of it.

    Raises:
        NvmlUnavailableError: no name fits, the first that fits stands for several, or the driver can't be asked.
    """
    known = _all_cards(session.binding)
    identities = [card.identity for card in known if card.identity.uuid]
    for name in names:
        fitting = matching(name, identities)
        if len(fitting) > 1:
            which = " and ".join(identity.uuid for identity in fitting)
            raise NvmlUnavailableError(f"'{readable(name)}' stands for more than one device: {which}")
        if fitting:
            chosen = _instead_of_divided(fitting[0], identities)
            return next(card for card in known if card.identity == chosen)
    return _by_name(session.binding, names, identities)


def _all_cards(binding: Any) -> list[Card]:
    """Return what `cards` tells, with the driver's handles."""
    try:
        num_cards = binding.nvmlDeviceGetCount()
    except Exception as error:
        unless_lost(error)
        raise NvmlUnavailableError(explain(error)) from error
    found: list[Card] = []
    for index in range(num_cards):
        card = _card(binding, index)
        found.append(card)
        if card.identity.mig_enabled:
            found.extend(_instances(binding, card))
    return found


def _card(binding: Any, index: int) -> Card:
    try:
        handle = binding.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(binding, "nvmlDeviceGetUUID", handle, required=True) or ""
    except Exception as error:
        unknown = CardIdentity(uuid="", name=None, index=index, unreadable=explain(error))
        return Card(identity=unknown, binding=binding, handle=None)
    name = _text(binding, "nvmlDeviceGetName", handle)
    mode = _ask(binding, "nvmlDeviceGetMigMode", handle) or (0, 0)
    identity = CardIdentity(uuid=uuid, name=name, index=index, mig_enabled=mode[0] == 1)
    return Card(identity=identity, binding=binding, handle=handle)


def _instances(binding: Any, card: Card) -> Iterator[Card]:
    """Yield the MIG instances of a card; most of their places are usually empty."""
    for place in range(_ask(binding, "nvmlDeviceGetMaxMigDeviceCount", card.handle) or 0):
        handle = _ask(binding, "nvmlDeviceGetMigDeviceHandleByIndex", card.handle, place)
        uuid = None if handle is None else _text(binding, "nvmlDeviceGetUUID", handle)
        if uuid is None:
            continue
        yield _instance(binding, handle, uuid, card.identity)


def _instance(binding: Any, handle: Any, uuid: str, card: CardIdentity) -> Card:
    ids = tuple(_ask(binding, f"nvmlDeviceGet{kind}InstanceId", handle) for kind in ("Gpu", "Compute"))
    identity = CardIdentity(
        uuid=uuid,
        name=_text(binding, "nvmlDeviceGetName", handle) or card.name,
        index=None,
        parent_uuid=card.uuid,
        instance=None if None in ids else (ids[0], ids[1]),
    )
    return Card(identity=identity, binding=binding, handle=handle)


def _instead_of_divided(identity: CardIdentity, identities: Sequence[CardIdentity]) -> CardIdentity:
    """Return the only instance of a divided card, or what was given."""
    instances = [other for other in identities if other.parent_uuid == identity.uuid]
    return instances[0] if identity.mig_enabled and len(instances) == 1 else identity


def _by_name(binding: Any, names: Sequence[str], identities: Sequence[CardIdentity]) -> Card:
    """Return the card that the driver itself knows by a name, though it did not list it.

    Raises:
        NvmlUnavailableError: it knows none, and why.
    """
    reason = None
    for name in names:
        try:
            handle = binding.nvmlDeviceGetHandleByUUID(name)
        except Exception as error:
            unless_lost(error)
            is_unknown = code_of(error) in (NvmlReturn.INVALID_ARGUMENT, NvmlReturn.NOT_FOUND)
            reason = reason or (None if is_unknown else explain(error))
            continue
        identity = CardIdentity(uuid=name, name=_text(binding, "nvmlDeviceGetName", handle), index=None)
        return Card(identity=identity, binding=binding, handle=handle)
    if reason is None:
        there = listed([identity.uuid for identity in identities], shown=8) if identities else "none"
        asked = listed([f"'{readable(name)}'" for name in names]) if names else "a device without a name"
        reason = f"the NVIDIA driver does not know {asked}; it has {there}"
    raise NvmlUnavailableError(reason)


def _ask(binding: Any, function: str, *given: Any) -> Any:
    """Return what the driver answers, None where it does not."""
    try:
        return getattr(binding, function)(*given)
    except Exception:
        return None


def _text(binding: Any, function: str, *given: Any, required: bool = False) -> str | None:
    """Return a text of the driver in printable letters, None where it gives none (which is raised where required)."""
    try:
        return readable(getattr(binding, function)(*given))
    except UnicodeDecodeError as error:  # pynvml decodes strictly
        return readable(bytes(error.object).decode(errors="replace"))
    except Exception:
        if required:
            raise
        return None


def _cuda_version(binding: Any) -> str | None:
    """Return the newest CUDA that the driver serves, such as "12.8": NVML gives 1000 x major + 10 x minor."""
    for function in ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"):
        number = _ask(binding, function)
        if number:
            return f"{number // 1000}.{number % 1000 // 10}"
    return None


def _binding() -> Any:
    """Return the module `pynvml`, as far as it can do what is needed."""
    try:
        binding = import_module("pynvml")
    except ImportError as error:
        raise NvmlUnavailableError(NO_PACKAGE) from error
    except Exception as error:
        raise NvmlUnavailableError(explain(error)) from error
    if not all(
        hasattr(binding, name) for name in ("nvmlInit", "nvmlShutdown", "NVMLError", "nvmlDeviceGetHandleByUUID")
    ):
        raise NvmlUnavailableError(OLD_PACKAGE)
    return binding
