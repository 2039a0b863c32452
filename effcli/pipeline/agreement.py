"""What all processes of a run must have in common, proved before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effcli.errors import DataError
from effcli.flags import field_label
from effcli.packages import installed_version
from effcli.ranks.group import gathered, world_size
from effcli.setting_texts import dotted

if TYPE_CHECKING:
    import torch

    from effcli.pipeline.prepare import Prepared
    from effcli.spec import RunSpec

_PACKAGES = ("effcli", "torch", "transformers", "datasets", "accelerate", "bitsandbytes", "torchao")


def started_with(spec: RunSpec, **flags: bool) -> dict[str, str]:
    """Return the versions and the settings that a process was started with, by the names that a message gives them."""
    versions = {f"version of {package}": installed_version(package) or "none" for package in _PACKAGES}
    settings = {field_label(name): str(value) for name, value in dotted(spec.model_dump(mode="json")).items()}
    return {**versions, **settings, **{f"--{name}": str(value) for name, value in flags.items()}}


def check_same_rows(prepared: Prepared) -> None:
    """Prove that all processes have read the same rows; collective.

    Raises:
        DataError: they have not.
    """
    if not prepared.launch.has_many:
        return
    from effcli.data.fingerprint import fingerprint

    evaluation = prepared.data.eval
    mine = {
        "training": (prepared.data.train_rows, prepared.rows_fingerprint()),
        "evaluation": (0, "") if evaluation is None else (len(evaluation), fingerprint(evaluation)),
    }
    of_all = gathered(mine)
    for rank, others in enumerate(of_all):
        for name, (num_rows, print_of_rows) in others.items():
            main_rows, main_print = of_all[0][name]
            if print_of_rows != main_print:
                raise DataError(
                    f"rank {rank} has read other {name} rows than rank 0 ({num_rows:,} and {main_rows:,}), in texts, "
                    "labels, order or tokens; give all processes the same files"
                )


def check_same_weights(model: torch.nn.Module) -> None:
    """Prove that all processes have loaded the same weights; collective.

    Replicas would take those of rank 0, and shards would be put together from several models.

    Raises:
        DataError: they have not.
    """
    if world_size() == 1:
        return
    from effcli.engines.same_weights import first_that_differs

    if found := first_that_differs(model):
        rank, name = found
        raise DataError(
            f"rank {rank} has loaded other weights than rank 0 of {name}; give all processes the same files of the "
            "model"
        )
