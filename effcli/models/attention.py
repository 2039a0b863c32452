"""How attention is computed: what `--attn` needs of precision, device, packages and model."""

from __future__ import annotations

from typing import Any

from effcli.errors import DeviceError, UsageError
from effcli.packages import require_package

FLASH = "flash_attention_2"
_SUPPORT = {"sdpa": ("_supports_sdpa",), FLASH: ("_supports_flash_attn", "_supports_flash_attn_2")}
"""Implementation -> the attributes by which a model class of transformers says that it has it, an older name last."""


def check_attention(attn: str | None, precision: str) -> None:
    """Raise unless the implementation computes in the precision; cheap, before a model is there.

    Raises:
        UsageError: flash-attn, whose kernels know 16 bit alone, in fp32.
    """
    if attn == FLASH and precision == "fp32":
        raise UsageError(f"--attn {FLASH} computes in 16 bit only; add --precision bf16 or fp16, or use --attn sdpa")


def check_attention_runs(attn: str | None, device: str) -> None:
    """Raise unless the implementation can run here on `device`, `cpu` or `cuda:0`.

    Raises:
        DeviceError: flash-attn on a CPU.
        MissingExtraError: flash-attn is not installed.
    """
    if attn != FLASH:
        return
    if device == "cpu":
        raise DeviceError(f"--attn {FLASH} needs a CUDA device; use --attn sdpa")
    require_package("flash_attn", f"--attn {FLASH}", pip="flash-attn --no-build-isolation")


def traced_as(attn: str | None) -> str | None:
    """Return the implementation that is built where a model is traced and not run.

    The kernels of flash-attn run on a GPU alone. They keep what torch's flash kernel keeps, which sdpa chooses where
    the mask can be left out: queries, keys, values, output and logsumexp (`flash_attn_func`, flash-attn 2.6).
    """
    return "sdpa" if attn == FLASH else attn


def check_model_attention(attn: str | None, model_class: Any, *, name: str, model_type: str) -> None:
    """Raise unless the model's code has the implementation; `name` is for the message.

    Raises:
        UsageError: it has not.
    """
    if attn is None or _has(model_class, attn):
        return
    others = [other for other in ("sdpa", "eager", FLASH) if _has(model_class, other)]
    raise UsageError(f"--attn {attn}: '{name}' ({model_type}) has no such attention; use --attn {' or '.join(others)}")


def _has(model_class: Any, attn: str) -> bool:
    return attn not in _SUPPORT or any(getattr(model_class, name, False) for name in _SUPPORT[attn])
