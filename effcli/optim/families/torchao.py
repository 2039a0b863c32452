"""torchao's AdamW with state in 8 bit, 4 bit or fp8. Build and state law side by side; no torch at import."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from effcli.optim.building import builder, named, with_betas
from effcli.optim.entry import Hyper, OptimizerEntry
from effcli.optim.laws import ADAM_DEFAULTS, TORCH_STEP, bytes_per_parameter, constant, full, width
from effcli.optim.ranges import AT_LEAST_1, Range
from effcli.units import ParamInfo, StateTensor

if TYPE_CHECKING:
    import torch

# transformers imports torchao wherever it is installed, and torchao 0.18 then complains about kernels for quantised
# models that do not fit this GPU or Python, and torch 2.13 about how torchao registers enums. The registry, which
# loads this module, is imported before either of them.
_NOISE = {
    "torchao": ("Failed to load", "Skipping import of cpp extensions"),
    "torch.utils._pytree": ("<enum 'KernelPreference'>", "<enum 'ScaleCalculationMode'>"),
}


def _silence(logger: str, beginnings: tuple[str, ...]) -> None:
    logging.getLogger(logger).addFilter(lambda record: not record.getMessage().startswith(beginnings))


for _logger, _beginnings in _NOISE.items():
    _silence(_logger, _beginnings)


def _step_uncompiled_on_a_cpu(optimizer: Any, hyper: Hyper) -> None:
    """Let the optimizer step as `_step` says, and torch keep a remark about its compiled code to itself."""
    # What torch 2.13 says of every tensor subclass whose compiled code it caches. Not `catch_warnings` in the step:
    # leaving it makes Python forget which warnings it has shown, so that those of the model would come every time.
    warnings.filterwarnings("ignore", message=".*does not implement _stable_hash_for_caching")
    # On the instance, as torch's schedulers do: a subclass of a class that torch has already hooked would run its
    # step hooks twice.
    optimizer.step = MethodType(_step, optimizer)


def _step(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> float | None:
    """Make one step, uncompiled where every weight is on a CPU.

    Upstream compiles its step for each shape. On CUDA that fuses the kernels; on a CPU it takes tens of seconds and a
    C++ compiler, for the same state.
    """
    import torch

    on_cpu = all(param.device.type == "cpu" for group in optimizer.param_groups for param in group["params"])
    with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
        result: float | None = type(optimizer).step(optimizer, closure)
        return result


def _layout(bits: int, map_bytes: int) -> Callable[[ParamInfo, Hyper], tuple[StateTensor, ...]]:
    def layout(param: ParamInfo, hyper: Hyper) -> tuple[StateTensor, ...]:
        """Return `step` and two moments: codes, a float32 scale per block and a code table of their own.

        Source: `_AdamBase._new_buffer` in torchao/optim/adam.py and `zeros` in subclass_8bit.py, subclass_4bit.py and
        subclass_fp8.py, 0.18: a moment with fewer than 4,096 elements, or a number of them that is no multiple of the
        block size, stays a plain tensor in the weight's dtype. Each quantised moment is one tensor subclass, so codes
        and constants share its key. fp8 needs no table.
        """
        num_elements, block_size = param.num_elements, hyper["block_size"]
        moments = ("exp_avg", "exp_avg_sq")
        if not _is_quantised(param, hyper):
            return (TORCH_STEP, *(full(key, param) for key in moments))
        constants = [4 * (num_elements // block_size), *([map_bytes] if map_bytes else [])]
        quantised: list[StateTensor] = [TORCH_STEP]
        for key in moments:
            quantised.append(StateTensor(key=key, num_elements=num_elements, num_bytes=num_elements * bits // 8))
            quantised += (constant(key, num_bytes) for num_bytes in constants)
        return tuple(quantised)

    return layout


def _is_quantised(param: ParamInfo, hyper: Hyper) -> bool:
    return param.num_elements >= _QUANTISED_FROM and param.num_elements % hyper["block_size"] == 0


def _workspace(has_table: bool) -> Callable[[ParamInfo, Hyper, str], tuple[int, ...]]:
    def workspace(param: ParamInfo, hyper: Hyper, device: str) -> tuple[int, ...]:
        """Return nothing on CUDA, assuming that the compiled step is one kernel; on a CPU what it takes uncompiled.

        Source: `single_param_adam` in torchao/optim/adam.py and `quantize_8bit_with_qmap`, `scale_tensor` and
        `_fp32_to_bf16_sr` in quant_utils.py, 0.18. With a code table the highest moment is the search for codes, in
        bytes of one element: 16 for weight, moments and scaled moment in float32, 37 for three int64 codes, three
        float32 values and a mark. Else it is the update, six float32 copies, or the stochastic rounding. A narrower
        weight adds its gradient's copy.
        """
        if device == "cuda":
            return ()
        num_elements = param.num_elements
        narrow = width(param) < 4
        per_element = 24
        if has_table and _is_quantised(param, hyper):
            return (num_elements * (53 + 4 * narrow), 4 * (num_elements // hyper["block_size"]))
        if hyper["bf16_stochastic_round"] and param.dtype == "bfloat16":
            per_element = 37
        return (num_elements * (per_element + 4 * narrow),)

    return workspace


def _multiple_of(number: int) -> Range:
    return AT_LEAST_1 if number == 1 else Range(lambda x: x >= 1 and x % number == 0, f"a multiple of {number}")


_QUANTISED_FROM = 4096
"""Elements: upstream keeps smaller moments whole, as bitsandbytes does (torchao/optim/adam.py, 0.18)."""
_ON_CPU = "on a CPU torchao's step runs uncompiled: the same state, no compiler needed, but slower than adamw."


def _entry(
    name: str,
    class_name: str,
    aliases: tuple[str, ...],
    summary: str,
    *,
    bits: int,
    map_bytes: int,
    block_size: int,
    paper: str,
) -> OptimizerEntry:
    table = f"a {map_bytes:,}-byte code table of its own" if map_bytes else "no code table"
    parts = ["n" if bits == 8 else "n//2", "4*(n//block_size)", *([str(map_bytes)] if map_bytes else [])]
    return OptimizerEntry(
        name=name,
        aliases=aliases,
        summary=summary,
        law=f"Two moments of {bits} bits an element, each with one float32 scale per block and {table}; "
        "below 4,096 elements, or where their number is no multiple of block_size, two moments in the weight's dtype. "
        "And a 4-byte step.",
        formula=f"2*({' + '.join(parts)}) + 4 if n >= {_QUANTISED_FROM} and n % block_size == 0 else 2*w*n + 4",
        source=f"{paper}; torchao/optim/adam.py, torchao 0.18",
        package="torchao",
        pip="torchao",
        defaults={**ADAM_DEFAULTS, "block_size": block_size, "bf16_stochastic_round": False},
        hyper_help={
            "block_size": "elements that share one scale",
            "bf16_stochastic_round": "round bf16 weights up or down at random, so that small updates count on average",
        },
        # codes fill whole bytes
        ranges={"block_size": _multiple_of(8 // bits)},
        rule_of_thumb_bytes=bytes_per_parameter(2 * bits // 8),
        build=builder(
            "torchao.optim",
            class_name,
            with_betas("eps"),
            for_all=named("block_size", "bf16_stochastic_round"),
            finish=_step_uncompiled_on_a_cpu,
        ),
        state_layout=_layout(bits, map_bytes),
        step_workspace=_workspace(has_table=map_bytes > 0),
        cpu_note=f"{name}: {_ON_CPU}",
    )


# Upstream's `amsgrad` is left out: its step takes the maximum of two quantised states, which the tensor subclasses do
# not implement (0.18), so that it fails at the first parameter of 4,096 elements.
ENTRIES = (
    _entry(
        "adamw8bit-ao",
        "AdamW8bit",
        ("adamw_torch_8bit",),
        "8-bit AdamW of torchao, block-wise, in plain torch.",
        bits=8,
        map_bytes=256 * 4,
        block_size=256,
        paper="Dettmers et al., arXiv 2110.02861",
    ),
    _entry(
        "adamw4bit",
        "AdamW4bit",
        ("adamw_torch_4bit",),
        "4-bit AdamW of torchao, block-wise.",
        bits=4,
        map_bytes=16 * 4,
        block_size=128,
        paper="Li et al., arXiv 2309.01507",
    ),
    _entry(
        "adamwfp8",
        "AdamWFp8",
        (),
        "AdamW of torchao with moments in fp8 (e4m3); on CUDA for compute capability 8.9 and later.",
        bits=8,
        map_bytes=0,
        block_size=256,
        paper="Micikevicius et al., arXiv 2209.05433",
    ),
)
