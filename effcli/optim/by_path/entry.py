"""Any optimizer class by its path, `--optim package.module:Class`, as an entry made on the spot. Torch only inside.

The keywords of the constructor are the hyperparameters, with the defaults of the class; the state is found by probing.
Left out: options that only a parameter group can carry.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.errors import EffcliError, UsageError, first_line
from effcli.optim import flat
from effcli.optim.by_path.load import load_class
from effcli.optim.by_path.signature import WEIGHT_DECAY, Argument, arguments_of, needed_for_a_step, takes_weight_decay
from effcli.optim.entry import Groups, Hyper, OptimizerEntry, Schedule, never_on_shards
from effcli.optim.groups import upstream_groups
from effcli.optim.hyper import flag_of
from effcli.optim.modes import set_to_train
from effcli.units import Basis, ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch


def entry_by_path(path: str) -> OptimizerEntry:
    """Return the entry of the optimizer class at `package.module:Class`; imports the module.

    Raises:
        UsageError: the text is no path, or names no optimizer that makes a step by itself.
        MissingExtraError: a package is not installed.
        DeviceError: a package does not load.
    """
    cls = load_class(path)
    needed = needed_for_a_step(cls)
    if needed is not None:
        raise UsageError(
            f"optimizer '{path}' needs '{needed}' at each step, which effcli does not give; "
            "choose another one, see effcli optimizers"
        )
    named = _ClassByPath(path=path, cls=cls, arguments=arguments_of(cls), has_decay=takes_weight_decay(cls))
    package = path.partition(":")[0].partition(".")[0]
    version = getattr(sys.modules[package], "__version__", "")
    return OptimizerEntry(
        name=path,
        summary=f"{cls.__name__} of {package}, a class by its path.",
        law="What one step of the class allocates for a stand-in of the parameter's shape and dtype.",
        formula="",
        source=f"{cls.__module__.replace('.', '/')}.py, {package} {version}".rstrip(),
        package=package,
        pip=package,
        defaults=named.defaults(),
        takes_weight_decay=named.has_decay,
        settle=named.settle,
        schedule=_schedule,
        build=named,
        state_layout=named.state_layout,
        basis=Basis.PROBED,
        shard_fault=never_on_shards("nothing is known about what a class by its path does to shards"),
        flat_fault=flat.NOT_KNOWN,
    )


def _schedule(hyper: Hyper) -> Schedule:
    return "own" if hyper.get("lr") is None else "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassByPath:
    """A class with its arguments; called, it makes the optimizer, for a run and for probing alike."""

    path: str
    cls: type[torch.optim.Optimizer]
    arguments: tuple[Argument, ...]
    has_decay: bool

    def defaults(self) -> dict[str, Any]:
        """Return the hyperparameters with the defaults of the class; None for those that must be given."""
        return {
            name: default
            for argument in self.arguments
            for name, default in zip(argument.names, argument.defaults, strict=True)
        }

    def settle(self, hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
        """Return the hyperparameters as they are.

        Raises:
            UsageError: one without default is not given.
        """
        for name in (argument.keyword for argument in self.arguments if argument.required):
            if hyper[name] is None:
                raise UsageError(
                    f"optimizer '{self.path}' needs '{name}', which has no default; "
                    f"give {flag_of(name)} to effcli train or effcli estimate"
                )
        return hyper

    def __call__(self, groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
        """Return the optimizer, ready to train; the weight decay that counts is each group's own.

        Raises:
            UsageError: the class refuses the parameters or the hyperparameters, exits, or knows no learning rate.
        """
        keywords = {a.keyword: a.value(hyper) for a in self.arguments if not (a.inherited and a.is_default(hyper))}
        decay = {WEIGHT_DECAY: 0.0} if self.has_decay else {}
        with redirect_stdout(sys.stderr):  # some classes print, which would spoil a JSON document
            try:
                optimizer = self.cls(upstream_groups(groups, hyper, self._options), **keywords, **decay)
            except EffcliError:
                raise
            except Exception as error:  # whatever the class raises
                raise UsageError(f"optimizer '{self.path}' refuses what it is given: {first_line(error)}") from error
            except SystemExit as error:
                raise UsageError(
                    f"optimizer '{self.path}' ends the program in its constructor: sys.exit, {first_line(error)}"
                ) from error
            self._check_rate(optimizer)
            set_to_train(optimizer)
        return optimizer

    def state_layout(self, param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
        """Return what one step of the class allocates for a stand-in of the parameter.

        Raises:
            UsageError: the class cannot make a step on it, or its state cannot be scaled to this size.
        """
        from effcli.optim.by_path.probe import probe_layout

        names = [*self.defaults(), WEIGHT_DECAY]
        settings = tuple((name, hyper[name]) for name in names if name in hyper)
        return probe_layout(self, settings, param.shape, param.dtype, param.hidden)

    def _options(self, hyper: Hyper) -> dict[str, Any]:
        return {argument.keyword: argument.value(hyper) for argument in self.arguments}

    def _check_rate(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            if group.get("lr") is None and not group.get("relative_step"):
                raise UsageError(
                    f"optimizer '{self.path}' has no 'lr' in its parameter groups, which the schedule needs; "
                    "give --lr if it takes one"
                )
