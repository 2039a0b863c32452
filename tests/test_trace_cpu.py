"""What CPU kernels are said to take, beside what the allocator hands out while they run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from effcli.trace.cpu import CpuKernels
from tests.profiled import profiled_peak

ATEN = torch.ops.aten
SHAPE = (8, 64, 128)


def plain(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.rand(shape or SHAPE, dtype=dtype)


def turned(dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(8, 128, 64, dtype=dtype).transpose(1, 2)


def heads(dtype: torch.dtype, tokens: int) -> torch.Tensor:
    return torch.rand(2, tokens, 4, 32, dtype=dtype).transpose(1, 2)


def normed(dtype: torch.dtype) -> tuple[Any, ...]:
    values, weight = plain(dtype), torch.rand(128, dtype=dtype)
    _, mean, spread = ATEN.native_layer_norm(values, [128], weight, weight, 1e-5)
    return turned(dtype), values, [128], mean, spread, weight, weight, [True, True, True]


def attended(dtype: torch.dtype, tokens: int, is_causal: bool) -> tuple[Any, ...]:
    query, key = heads(dtype, tokens), heads(dtype, 600)
    output, sums = ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, key, 0.0, is_causal)
    return torch.rand_like(output), query, key, key, output, sums, 0.0, is_causal


CALLS: dict[str, Callable[[torch.dtype], tuple[Any, ...]]] = {
    "a sum of two precisions": lambda dtype: (ATEN.add.Tensor, plain(dtype), plain(torch.float64)),
    "a product in place with a wider factor": lambda dtype: (ATEN.mul_.Tensor, plain(dtype), plain(torch.float64)),
    "a comparison of two precisions": lambda dtype: (ATEN.lt.Tensor, plain(dtype), plain(torch.float64)),
    "a comparison with a number": lambda dtype: (ATEN.lt.Scalar, plain(dtype), 0.5),
    "a mask as a factor": lambda dtype: (ATEN.mul.Tensor, plain(dtype) > 0.5, plain(dtype)),
    "a choice between precisions": lambda dtype: (
        ATEN.where.self,
        plain(dtype) > 0.5,
        plain(dtype),
        plain(torch.float64),
    ),
    "three factors": lambda dtype: (ATEN.addcmul.default, plain(dtype), plain(torch.float64), plain(dtype)),
    "softmax of masked scores": lambda dtype: (ATEN._safe_softmax.default, plain(torch.float32), -1),
    "softmax of turned scores": lambda dtype: (ATEN._softmax.default, turned(dtype), -1, False),
    "the gradient of a softmax": lambda dtype: (
        ATEN._softmax_backward_data.default,
        turned(dtype),
        plain(dtype),
        -1,
        dtype,
    ),
    "the gradient of a log-softmax": lambda dtype: (
        ATEN._log_softmax_backward_data.default,
        plain(dtype),
        plain(dtype),
        -1,
        dtype,
    ),
    "a layer norm": lambda dtype: (ATEN.native_layer_norm.default, turned(dtype), [128], None, None, 1e-5),
    "the gradient of a layer norm": lambda dtype: (ATEN.native_layer_norm_backward.default, *normed(dtype)),
    "an embedding of turned ids": lambda dtype: (
        ATEN.embedding.default,
        torch.rand(10, 128, dtype=dtype),
        torch.ones(64, 8, dtype=torch.int64).t(),
    ),
    "the gradient of an embedding": lambda dtype: (
        ATEN.embedding_dense_backward.default,
        turned(dtype),
        torch.ones(8, 64, dtype=torch.int64),
        1000,
        -1,
        False,
    ),
    "attention of few tokens": lambda dtype: (
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        heads(dtype, 20),
        heads(dtype, 20),
        heads(dtype, 20),
    ),
    "attention of many tokens": lambda dtype: (
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        heads(dtype, 800),
        heads(dtype, 800),
        heads(dtype, 800),
    ),
    "attention to others": lambda dtype: (
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        heads(dtype, 200),
        heads(dtype, 600),
        heads(dtype, 600),
    ),
    "a count of marks": lambda dtype: (ATEN.sum.default, plain(dtype) > 0.5),
    "a product of matrices": lambda dtype: (ATEN.mm.default, plain(dtype)[0], turned(dtype)[1].t()),
    "a product with one number all over": lambda dtype: (
        ATEN.mm.default,
        torch.ones((), dtype=dtype).expand(64, 128),
        turned(dtype)[0].t(),
    ),
    "a product of every other column": lambda dtype: (
        ATEN.addmm.default,
        torch.rand(64, dtype=dtype),
        plain(dtype)[0, :, ::2],
        plain(dtype)[0, :, :64],
    ),
    "products of turned matrices": lambda dtype: (ATEN.bmm.default, turned(dtype), plain(dtype).transpose(1, 2)),
    "products of every other column": lambda dtype: (ATEN.bmm.default, plain(dtype)[..., ::2], turned(dtype)),
    "a sum of products with a part of each row": lambda dtype: (
        ATEN.baddbmm.default,
        torch.rand(8, 64, 64, dtype=dtype),
        plain(dtype)[..., :64],
        turned(dtype)[..., :64],
    ),
    "a choice of scores by position": lambda dtype: (
        ATEN.gather.default,
        plain(dtype),
        -1,
        torch.ones(8, 64, 32, dtype=torch.int64),
    ),
    "the gradient of such a choice": lambda dtype: (
        ATEN.scatter_add.default,
        plain(dtype),
        -1,
        torch.ones(8, 64, 32, dtype=torch.int64),
        torch.rand(8, 64, 32, dtype=dtype),
    ),
    "windows that are shifted": lambda dtype: (ATEN.roll.default, plain(dtype), [2, 2], [1, 2]),
    "gelu": lambda dtype: (ATEN.gelu.default, turned(dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_takes_what_is_said_beside_its_results(name: str, dtype: torch.dtype) -> None:
    operator, *args = CALLS[name](dtype)
    kept: list[Any] = []

    taken = profiled_peak(lambda: kept.append(operator(*args)))

    results = [result for result in (kept[0] if isinstance(kept[0], tuple) else kept) if result is not args[0]]
    said = CpuKernels().workspace_bytes(operator, args)
    assert sum(said) + sum(result.untyped_storage().nbytes() for result in results) == pytest.approx(taken, abs=64)


PRODUCTS = {
    "many rows": (1100, 768, 96),
    "deep": (33, 2049, 130),
    "deep, and rows of 8 KiB": (1024, 4096, 48),
    "few rows for many columns": (5, 300, 2048),
    "one row": (1, 1100, 130),
    "one column": (130, 1100, 1),
    "shallow": (257, 3, 200),
    "as deep as a power of two": (100, 2048, 40),
    "too small for oneDNN": (16, 16, 16),
}
"""Rows, depth, columns."""


@pytest.mark.parametrize("is_turned", [False, True], ids=["bfloat16", "bfloat16, turned"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_bfloat16_takes_what_is_said(name: str, is_turned: bool) -> None:
    rows, depth, columns = PRODUCTS[name]
    left = torch.rand(depth, rows, dtype=torch.bfloat16).t() if is_turned else plain(torch.bfloat16, rows, depth)
    right = plain(torch.bfloat16, depth, columns)

    taken = profiled_peak(lambda: torch.mm(left, right))

    said = CpuKernels().workspace_bytes(ATEN.mm.default, (left, right))
    assert sum(said) + 2 * rows * columns == taken


def test_a_product_in_bfloat16_takes_nothing_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    left = right = plain(torch.bfloat16, 64, 64)

    taken = profiled_peak(lambda: torch.mm(left, right))
    said = CpuKernels().workspace_bytes(ATEN.mm.default, (left, right))

    assert taken == 2 * 64 * 64
    assert sum(said) == 0


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE"])
def test_lesser_processors_take_what_is_said(limit: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        "bfloat16",
        __file__,
    ]

    run = subprocess.run(command, env={**os.environ, "ONEDNN_MAX_CPU_ISA": limit}, capture_output=True, text=True)

    assert run.returncode == 0, run.stdout


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The profiler sees nothing that other threads take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("tokens", [20, 200, 777])
def test_the_gradient_of_attention_takes_blocks_of_scores_for_each_thread(
    tokens: int, is_causal: bool, dtype: torch.dtype
) -> None:
    args = attended(dtype, tokens, is_causal)
    operator = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    kept: list[Any] = []

    taken = profiled_peak(lambda: kept.append(operator(*args)))

    said = CpuKernels().workspace_bytes(operator, args)
    assert sum(said) + sum(result.nbytes for result in kept[0]) == pytest.approx(taken, abs=64)


FILTERS = {
    "patches of 16": (3, 64, 16, 16, 0),
    "patches of 8": (3, 32, 8, 8, 0),
    "the first layer of a ResNet": (3, 32, 7, 2, 3),
    "channels in blocks": (16, 32, 3, 1, 1),
    "fewer places": (16, 32, 3, 2, 1),
}
"""Channels in and out, size of a filter, stride, padding."""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="oneDNN chooses kernels by processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FILTERS)
def test_a_convolution_takes_what_is_said_beside_its_results(name: str, dtype: torch.dtype) -> None:
    channels, filters, size, stride, padding = FILTERS[name]
    values, weight = (
        torch.rand(4, channels, 64, 64, dtype=dtype),
        torch.rand(filters, channels, size, size, dtype=dtype),
    )
    geometry = [stride, stride], [padding, padding], [1, 1], False, [0, 0], 1
    forward = ATEN.convolution.default, values, weight, torch.rand(filters, dtype=dtype), *geometry
    gradient = ATEN.convolution(*forward[1:])
    wanted = [channels > 3, True, True]
    backward = ATEN.convolution_backward.default, gradient, values, weight, [filters], *geometry, wanted
    for operator, *args in (forward, backward):
        kept: list[Any] = []

        taken = profiled_peak(lambda operator=operator, args=args, kept=kept: kept.append(operator(*args)))

        results = kept[0] if isinstance(kept[0], tuple) else kept
        said = CpuKernels().workspace_bytes(operator, args)
        made = sum(result.nbytes for result in results if result is not None)
        assert sum(said) + made == pytest.approx(taken, rel=1e-3)


def test_more_threads_take_more_for_attention() -> None:
    operator = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    args = [heads(torch.float32, 20)] * 3

    one, eight = (sum(CpuKernels(num_threads=count).workspace_bytes(operator, args)) for count in (1, 8))

    assert eight == 8 * one


def test_libraries_keep_nothing_of_the_cpu_allocator() -> None:
    assert CpuKernels().lasting_bytes() == {}
