"""`package.module:Class` -> the optimizer class, with a line that helps where there is none. Torch only inside."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from contextlib import redirect_stdout
from types import ModuleType
from typing import TYPE_CHECKING, Any

from effcli.errors import DeviceError, MissingExtraError, UsageError, first_line, kind_and_line, nearest
from effcli.units import listed

if TYPE_CHECKING:
    import torch

_LISTED = 8
"""Classes named in a message, which should stay within a few lines of a terminal."""


def load_class(path: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class at `package.module:Class`; a module in the current folder is found as well.

    Raises:
        UsageError: the text is no path, the package has no such module, the module no such optimizer, or its import
            fails.
        MissingExtraError: the package, or one that it needs, is not installed.
        DeviceError: a native library of the package does not load.
    """
    import torch

    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise UsageError(f"'{path}' is no path of a class; write package.module:Class, such as torch.optim:AdamW")
    found: Any = getattr(_import(module_name), name, None)
    base = torch.optim.Optimizer
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    choices = _optimizers(sys.modules[module_name])
    what = f"'{module_name}' has no '{name}'" if found is None else f"'{path}' is no optimizer class of torch's kind"
    raise UsageError(f"{what}; its optimizers are {listed(choices, _LISTED) or 'none'}.{nearest(name, choices)}")


def _optimizers(module: ModuleType) -> list[str]:
    import torch

    base = torch.optim.Optimizer
    return [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base) and v is not base]


def _import(name: str) -> ModuleType:
    package = name.partition(".")[0]
    if not _is_there(package):
        raise MissingExtraError(
            f"the package '{package}' is not installed; type: pip install {package} "
            f"(a file {package}.py of yours must lie in the current folder)"
        )
    try:
        with redirect_stdout(sys.stderr):  # what it prints would spoil a JSON document
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise _no_module(name, missing) from error
        needed = missing.partition(".")[0]
        raise MissingExtraError(
            f"'{name}' needs the package '{needed}', which is not installed; type: pip install {needed}"
        ) from error
    except ImportError as error:
        raise MissingExtraError(
            f"'{name}' does not import ({first_line(error)}); type: pip install --upgrade {package}"
        ) from error
    except OSError as error:
        raise DeviceError(f"the package '{package}' does not load: {first_line(error)}") from error
    except (Exception, SystemExit) as error:  # whatever the module does at import
        raise UsageError(f"'{name}' does not import: {kind_and_line(error)}") from error


def _is_there(package: str) -> bool:
    """Return whether the package can be found; the command of an installed effcli does not look into the current
    folder by itself."""
    if importlib.util.find_spec(package) is not None:
        return True
    folder = os.getcwd()
    if folder in sys.path:
        return False
    sys.path.append(folder)
    importlib.invalidate_caches()
    if importlib.util.find_spec(package) is not None:
        return True
    sys.path.remove(folder)
    return False


def _no_module(name: str, missing: str) -> UsageError:
    parent = missing.rpartition(".")[0]
    folders = getattr(sys.modules.get(parent), "__path__", ())
    choices = [f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders)]
    return UsageError(f"'{parent}' has no module '{missing.rpartition('.')[2]}'.{nearest(missing, choices)}")
