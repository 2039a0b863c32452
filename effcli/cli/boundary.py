"""The one place where exceptions become a line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import typer

from effcli.errors import EffcliError


def run_guarded(command: Callable[[], object], *, verbose: bool) -> int:
    """Return the exit code of `command`; whatever goes wrong is one line on stderr.

    The traceback of an unexpected fault, without values of variables, is shown with `verbose` only.
    """
    try:
        code = command()
    except EffcliError as error:
        _say(str(error))
        return error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "effcli"
        _say(f"{error.format_message()} See `{path} --help`.")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted; checkpoints saved before are intact")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit flush finds no broken pipe
        return 0
    except Exception as error:
        if verbose:
            traceback.print_exc()
        _say(f"unexpected fault, {type(error).__name__}: {error} (a bug of effcli; --verbose shows where)")
        return 1
    return code if isinstance(code, int) else 0


def _say(text: str) -> None:
    sys.stderr.write(f"effcli: error: {' '.join(text.split())}\n")
