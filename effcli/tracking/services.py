"""The services: what each one's tracker of accelerate is made with, where its files go, and how its run is ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effcli.errors import UsageError, first_line
from effcli.masking import masked
from effcli.packages import require_installed, require_package
from effcli.tracking.worker import Worker, kept_random_state

PROJECT = "effcli"
"""The project or experiment that runs are gathered under, where the service's own variable names no other."""

FINISH_S = 60.0
"""Seconds that a service has to send what is left when a run ends."""

CHECK_S = 30.0
"""Seconds in which a service must say whether somebody is logged in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a service is told about a run: its folder for files, its name, an id of its own, and where it begins.

    `goes_on` says that the service has been told of the updates before `first_update`; `remembered` is the id that it
    gave the run then.
    """

    folder: Path
    name: str
    run_id: str
    first_update: int
    goes_on: bool
    remembered: str | None


def _nothing(*ignored: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service. `arguments` are those of its tracker in `accelerate.tracking`, `exact_as_text` says that it keeps
    24 bits of a number, so that bytes are told as text too.

    `check` raises before anything is read where the service cannot work. `environment` holds while a call is made.
    `run_id` returns the id that the service gave, to be remembered, and `end` is given the tracker and the status of
    the record. `changes_config` says whether a run that goes on may have other settings than it began with.
    """

    package: str
    arguments: Callable[[Place], dict[str, Any]]
    exact_as_text: bool = False
    check: Callable[[], None] = _nothing
    environment: Callable[[Place], dict[str, str]] = lambda place: {}
    run_id: Callable[[Any], str | None] = _nothing
    end: Callable[[Any, str], None] = _nothing
    changes_config: bool = False


def require_services(names: Iterable[str]) -> None:
    """Raise where the package of a service is not installed, without importing it.

    Raises:
        MissingExtraError: with the command that installs it.
    """
    for name in names:
        require_installed(SERVICES[name].package, f"--track {name}", pip=f"'effcli[{name}]'")


def check_services(names: tuple[str, ...]) -> None:
    """Import the packages of services, and ask each whether it can work.

    Raises:
        MissingExtraError: a package is not installed.
        UsageError: nobody is logged in, or the service does not answer.
    """
    for name in names:
        service = SERVICES[name]
        with kept_random_state():
            require_package(service.package, f"--track {name}", pip=f"'effcli[{name}]'")
        worker = Worker(name)
        error = worker.call(service.check, limit_s=CHECK_S)
        worker.end()
        if error is not None:
            raise UsageError(f"--track {name}: {first_line(error)}") from error


def _tensorboard(place: Place) -> dict[str, Any]:
    """Hide what was logged of updates that are made once more, which TensorBoard's readers do by `purge_step`."""
    purge = {"purge_step": place.first_update} if place.goes_on else {}
    return {"run_name": "tensorboard", "logging_dir": str(place.folder), **purge}


def _wandb(place: Place) -> dict[str, Any]:
    """Leave to wandb's own variables what they say; its capture of the console would take the report's stdout."""
    import wandb

    settings: dict[str, Any] = {}
    if "WANDB_CONSOLE" not in os.environ:
        settings["console"] = "off"
    if "WANDB_FINISH_TIMEOUT" not in os.environ:
        settings["finish_timeout"] = FINISH_S / 2
    if any(masked(argument) != argument for argument in sys.argv):  # it keeps the command line
        settings["x_disable_meta"] = True
    return {
        "run_name": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": os.environ.get("WANDB_NAME", place.name),
        "id": os.environ.get("WANDB_RUN_ID", place.run_id),
        "dir": os.environ.get("WANDB_DIR", str(place.folder)),
        "resume": "allow" if place.goes_on else None,
        "settings": wandb.Settings(**settings),
    }


def _check_wandb() -> None:
    """Raise where nobody is logged in, or the login is refused: later wandb would ask on the terminal."""
    import wandb

    mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
    if mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False):
        return
    raise UsageError("nobody is logged in; type: wandb login, or set WANDB_MODE=offline")


def _end_wandb(tracker: Any, status: str) -> None:
    tracker.tracker.finish(exit_code={"completed": 0, "interrupted": 130}.get(status, 1))


def _mlflow(place: Place) -> dict[str, Any]:
    """Return the arguments; variables of mlflow for experiment and run are read by the tracker itself."""
    own = bool(_mlflow_store(place))
    return {
        "experiment_name": PROJECT,
        "logging_dir": str(place.folder.resolve() / "mlflow") if own else None,
        "run_id": place.remembered,
        "run_name": os.environ.get("MLFLOW_RUN_NAME", place.name),
    }


def _mlflow_store(place: Place) -> dict[str, str]:
    """Return the variable that puts mlflow's database into the run folder, unless it names a place already."""
    variable = "MLFLOW_TRACKING_URI"
    return {} if os.environ.get(variable) else {variable: f"sqlite:///{place.folder.resolve() / 'mlflow.db'}"}


def _end_mlflow(tracker: Any, status: str) -> None:
    import mlflow

    mlflow.end_run({"completed": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED"))


def _trackio(place: Place) -> dict[str, Any]:
    """Resume by a name that no other run has. Files stay where trackio is told by TRACKIO_DIR, read when imported."""
    return {
        "run_name": PROJECT,
        "name": f"{place.name}-{place.run_id}",
        "resume": "allow" if place.goes_on else "never",
        "embed": False,
    }


SERVICES: dict[str, Service] = {
    "tensorboard": Service(
        package="tensorboard",
        arguments=_tensorboard,
        exact_as_text=True,
    ),
    "wandb": Service(package="wandb", arguments=_wandb, check=_check_wandb, end=_end_wandb, changes_config=True),
    "mlflow": Service(
        package="mlflow",
        arguments=_mlflow,
        environment=_mlflow_store,
        run_id=lambda tracker: str(tracker.tracker.info.run_id),
        end=_end_mlflow,
    ),
    "trackio": Service(package="trackio", arguments=_trackio, changes_config=True),
}
"""The services by the name that `--track` takes, which is accelerate's too."""
