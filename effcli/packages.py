"""Packages that only some settings need: imported when wanted, with one clear line where they are not there."""

from __future__ import annotations

import importlib
import importlib.util

from effcli.errors import DeviceError, MissingExtraError, first_line

DRAWING = ("altair", "vl_convert")
"""What draws charts."""
DRAWING_PIP = "'effcli[plot]'"


def require_package(package: str, wanted_by: str, *, pip: str | None = None) -> None:
    """Import `package` for `wanted_by`, a flag or an optimizer; `pip` is what installs it, where its name doesn't.

    Raises:
        MissingExtraError: it is not installed.
        DeviceError: it is installed but does not load, as with a native library built for another system.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"{wanted_by} needs the package '{package}', which does not import ({first_line(error)}); "
            f"type: pip install {pip or package}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise DeviceError(f"{wanted_by}: its package '{package}' does not load: {first_line(error)}") from error


def require_installed(package: str, wanted_by: str, *, pip: str | None = None) -> None:
    """Raise where `package` is not there to be imported, without the seconds that importing takes.

    Raises:
        MissingExtraError: it is not installed.
    """
    if not is_installed(package):
        raise MissingExtraError(
            f"{wanted_by} needs the package '{package}', which is not installed; type: pip install {pip or package}"
        )


def is_installed(package: str) -> bool:
    """Return whether `package` is there to be imported, without importing it."""
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def installed_version(package: str) -> str | None:
    """Return the version of a distribution, by its name on PyPI; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
