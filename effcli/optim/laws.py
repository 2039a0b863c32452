"""Building blocks of entries: what upstream's common allocations take, and what Adam's kin have in common. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from effcli.optim.entry import Hyper
from effcli.optim.implementation import NAME as IMPLEMENTATION
from effcli.units import DTYPE_BYTES, ParamInfo, Placement, Role, StateTensor

TORCH_STEP = StateTensor(key="step", num_elements=1, num_bytes=4, role=Role.STEP, placement=Placement.HOST)
"""torch keeps `step` as a 0-dim float32 on the host unless fused or capturable (torch/optim/adam.py, 2.13)."""


def torch_step(hyper: Hyper) -> StateTensor:
    """Return `step` of a torch optimizer that has a fused implementation, which keeps it on the device."""
    return replace(TORCH_STEP, placement=Placement.DEVICE) if hyper[IMPLEMENTATION] == "fused" else TORCH_STEP


PYTHON_STEP = StateTensor(key="step", num_elements=1, num_bytes=0, role=Role.STEP, placement=Placement.HOST)
"""A plain Python number: one element, no storage."""


ADAM_DEFAULTS = {"lr": 5e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
"""Upstream's, but the rate at which transformers' Trainer fine-tunes, where theirs are for training from scratch."""


def bytes_per_parameter(num_bytes: int) -> Callable[[int, Hyper], int]:
    """Return the rule of thumb that an optimizer takes so many bytes per trained parameter."""
    return lambda num_parameters, hyper: num_bytes * num_parameters


def width(param: ParamInfo) -> int:
    """Return the bytes of one element of the parameter."""
    return DTYPE_BYTES[param.dtype]


def full(key: str, param: ParamInfo, *, dtype_bytes: int | None = None) -> StateTensor:
    """Return a statistic of the parameter's shape, in its dtype or with `dtype_bytes` per element."""
    size = width(param) if dtype_bytes is None else dtype_bytes
    return StateTensor(key=key, num_elements=param.num_elements, num_bytes=param.num_elements * size)


def sized(key: str, num_elements: int, dtype_bytes: int) -> StateTensor:
    """Return a statistic of `num_elements` elements on the device."""
    return StateTensor(key=key, num_elements=num_elements, num_bytes=num_elements * dtype_bytes)


def constant(key: str, num_bytes: int, *, shared: bool = False) -> StateTensor:
    """Return a quantisation constant, which has bytes but no elements; `shared` by all parameters or the own one's."""
    return StateTensor(key=key, num_elements=0, num_bytes=num_bytes, role=Role.QUANTISATION, shared=shared)


def num_rows(param: ParamInfo) -> int:
    """Return the elements of a row factor: one per row of each slice of the last two dimensions."""
    return math.prod(param.shape[:-1])


def num_columns(param: ParamInfo) -> int:
    """Return the elements of a column factor: one per column of each slice of the last two dimensions."""
    return math.prod(param.shape[:-2]) * param.shape[-1]
