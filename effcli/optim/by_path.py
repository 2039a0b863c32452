"""Any optimizer class by its path, `--optim package.module:Class`, as an entry made on the spot. Torch only inside.

What the constructor's signature takes are the hyperparameters, with its defaults; the state is found by probing. Left
out: arguments whose default is neither a text nor a number nor a tuple of numbers, and options that only a parameter
group can carry.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effcli.errors import EffcliError, UsageError, first_line
from effcli.flags import FLAG_OF
from effcli.optim.class_path import load_class
from effcli.optim.entry import Groups, Hyper, OptimizerEntry, Schedule
from effcli.units import Basis, ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch

_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """One keyword of a constructor and the hyperparameters that it is made of: several for `betas` and `eps`."""

    keyword: str
    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    required: bool = False

    def value(self, hyper: Hyper) -> Any:
        """Return what to pass on."""
        values = tuple(hyper[name] for name in self.names)
        return values if len(values) > 1 else values[0]


def entry_by_path(path: str) -> OptimizerEntry:
    """Return the entry of the optimizer class at `package.module:Class`; imports the module.

    Raises:
        UsageError: the text is no path, or names no optimizer that makes a step by itself.
        MissingExtraError: a package is not installed.
        DeviceError: a package does not load.
    """
    cls = load_class(path)
    _refuse_step_with_arguments(cls, path)
    keywords = list(_keywords(cls))
    arguments = tuple(argument for keyword in keywords for argument in _argument(keyword))
    takes_weight_decay = any(keyword.name == "weight_decay" for keyword in keywords)
    package = path.partition(".")[0].partition(":")[0]
    build = _Builder(path=path, cls=cls, arguments=arguments, takes_weight_decay=takes_weight_decay)

    def settle(hyper: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
        for argument in arguments:
            name = argument.names[0]
            if argument.required and hyper[name] is None:
                flag = FLAG_OF.get(f"optim.{name}", f"--optim-arg {name}=")
                raise UsageError(f"optimizer '{path}' needs '{name}', which has no default; give {flag}")
        return hyper

    return OptimizerEntry(
        name=path,
        summary=f"{cls.__name__} of {package}, a class by its path.",
        law="What one step of the class allocates for a stand-in of the parameter's shape and dtype.",
        formula="",
        source=f"{cls.__module__.replace('.', '/')}.py, {package} {_version(package)}".rstrip(),
        package=package,
        pip=package,
        defaults={name: default for arg in arguments for name, default in zip(arg.names, arg.defaults, strict=True)},
        takes_weight_decay=takes_weight_decay,
        settle=settle,
        schedule=_schedule,
        build=build,
        state_layout=build.state_layout,
        basis=Basis.PROBED,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    """Makes the optimizer of one class, for a run and for probing alike."""

    path: str
    cls: type[torch.optim.Optimizer]
    arguments: tuple[_Argument, ...]
    takes_weight_decay: bool

    def __call__(self, groups: Groups, hyper: Hyper) -> torch.optim.Optimizer:
        """Return the optimizer, ready to train; the decay that counts is each group's own.

        Raises:
            UsageError: the class refuses the parameters or the hyperparameters, or knows no learning rate.
        """
        from effcli.optim.groups import upstream_groups
        from effcli.optim.modes import set_to_train

        decay = {"weight_decay": 0.0} if self.takes_weight_decay else {}
        with redirect_stdout(sys.stderr):  # some classes print, which would spoil a JSON document
            try:
                optimizer = self.cls(upstream_groups(groups, hyper, self._keywords), **self._keywords(hyper), **decay)
            except EffcliError:
                raise
            except Exception as error:  # whatever the class raises
                raise UsageError(f"optimizer '{self.path}' refuses what it is given: {first_line(error)}") from error
            self._check_rate(optimizer)
            set_to_train(optimizer)
        return optimizer

    def state_layout(self, param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
        """Return what one step of the class allocates for a stand-in of the parameter.

        Raises:
            UsageError: the class cannot make a step on it, or its state cannot be scaled to this size.
        """
        from effcli.optim.probing import probe_layout

        known = {name: hyper[name] for argument in self.arguments for name in argument.names}
        decay = {"weight_decay": hyper["weight_decay"]} if "weight_decay" in hyper else {}
        settings = tuple(sorted((known | decay).items(), key=lambda item: item[0]))
        return probe_layout(self, settings, param.shape, param.dtype, param.hidden)

    def _keywords(self, hyper: Hyper) -> dict[str, Any]:
        return {argument.keyword: argument.value(hyper) for argument in self.arguments}

    def _check_rate(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            if group.get("lr") is None and not group.get("relative_step"):
                raise UsageError(
                    f"optimizer '{self.path}' has no 'lr' in its parameter groups, which the schedule needs; "
                    "give --lr if it takes one"
                )


def _schedule(hyper: Hyper) -> Schedule:
    return "own" if hyper.get("lr") is None else "any"


def _keywords(cls: type) -> Iterator[inspect.Parameter]:
    """Yield what the constructor takes after the parameters, with what it passes on to base classes as `**kwargs`."""
    import torch

    seen: set[str] = set()
    for base in cls.__mro__:
        if base is torch.optim.Optimizer:
            return
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        kinds = {parameter.kind for parameter in own}
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            own = own[1:]
        for parameter in own:
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            inherited_need = bool(seen) and _is_required(parameter)
            if named and parameter.name not in seen and not inherited_need:
                yield parameter
        seen |= {parameter.name for parameter in own} | {"self"}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return


def _is_required(parameter: inspect.Parameter) -> bool:
    """Return whether there is no default; older classes mark that by `torch.optim.optimizer.required`."""
    from torch.optim.optimizer import required

    return parameter.default is parameter.empty or parameter.default is required


def _argument(parameter: inspect.Parameter) -> Iterator[_Argument]:
    """Yield how a keyword is made of hyperparameters; nothing for weight decay and what no text can say."""
    name, default = parameter.name, parameter.default
    if name == "weight_decay":
        return
    if _is_required(parameter):
        yield _Argument(keyword=name, names=(name,), defaults=(None,), required=True)
    elif isinstance(default, tuple | list) and all(type(item) in (int, float, type(None)) for item in default):
        if name in ("betas", "eps") and len(default) > 1:
            names = tuple(_numbered(name, index) for index in range(1, len(default) + 1))
            yield _Argument(keyword=name, names=names, defaults=tuple(default))
        elif default and None not in default:
            yield _Argument(keyword=name, names=(name,), defaults=(tuple(default),))
    elif type(default) in _SCALARS:
        value = float(default) if name == "lr" and type(default) is int else default
        yield _Argument(keyword=name, names=(name,), defaults=(value,))


def _numbered(name: str, index: int) -> str:
    return f"beta{index}" if name == "betas" else "eps" if index == 1 else f"eps{index}"


def _refuse_step_with_arguments(cls: Any, path: str) -> None:
    needed = list(inspect.signature(cls.step).parameters.values())[1:]
    for parameter in needed:
        named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if named and parameter.default is parameter.empty:
            raise UsageError(
                f"optimizer '{path}' needs '{parameter.name}' at each step, which effcli does not give; "
                "choose another one, see effcli optimizers"
            )


def _version(package: str) -> str:
    return str(getattr(sys.modules[package], "__version__", ""))
