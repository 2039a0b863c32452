"""A tape that was lengthened has the very events of a trace of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers

from effcli.memory.allocator import PlainAllocator
from effcli.memory.compose import resident, updates
from effcli.memory.replay import replay
from effcli.memory.scale import NotAffineError, scaled
from effcli.memory.tape import Alloc, Free, MicroTape
from effcli.trace.batches import BatchShape, fake_batch, own_loss
from effcli.trace.tracer import Tracer
from effcli.units import Category

SMALL: dict[str, Any] = {"vocab_size": 200, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
MODELS: dict[str, tuple[Any, str, str]] = {
    "llama": (transformers.LlamaConfig(num_hidden_layers=9, **SMALL), "AutoModelForCausalLM", "causal-lm"),
    "gpt2": (
        transformers.GPT2Config(n_layer=7, n_embd=32, n_head=2, vocab_size=200, bos_token_id=0, eos_token_id=0),
        "AutoModelForCausalLM",
        "causal-lm",
    ),
    "bert": (transformers.BertConfig(num_hidden_layers=8, **SMALL), "AutoModelForMaskedLM", "masked-lm"),
    "t5": (
        transformers.T5Config(
            vocab_size=200,
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_heads=2,
            num_layers=8,
            num_decoder_layers=7,
            decoder_start_token_id=0,
        ),
        "AutoModelForSeq2SeqLM",
        "seq2seq",
    ),
    "gemma2, sliding and global by turns": (
        transformers.Gemma2Config(num_hidden_layers=13, num_key_value_heads=1, head_dim=16, **SMALL),
        "AutoModelForCausalLM",
        "causal-lm",
    ),
    "deberta, with sums through all layers": (
        transformers.DebertaV2Config(
            num_hidden_layers=7,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            position_buckets=16,
            **SMALL,
        ),
        "AutoModelForMaskedLM",
        "masked-lm",
    ),
    "modernbert, in threes with one left over": (
        transformers.ModernBertConfig(num_hidden_layers=19, pad_token_id=0, cls_token_id=1, sep_token_id=2, **SMALL),
        "AutoModelForMaskedLM",
        "masked-lm",
    ),
}


class PlainKernels:
    """Kernels that take nothing beside what they return."""

    def chosen(self, precision: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def workspace_bytes(self, operator: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
        return ()

    def lasting_bytes(self) -> Mapping[str, tuple[int, ...]]:
        return {}


def traced(name: str, *, whole: bool, recompute: bool = False, batch_size: int = 2) -> tuple[Tracer, MicroTape]:
    config, auto, task = MODELS[name]

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            model = getattr(transformers, auto).from_config(config)
        if recompute:
            model.activation_checkpointing_enable()
        return model

    tracer = Tracer(build, PlainKernels(), whole=whole)
    shape = BatchShape(batch_size=batch_size, max_length=24)
    tape = tracer.micro(lambda: fake_batch(config, task, shape), forward=own_loss, loss=lambda loss, batch: loss)
    return tracer, tape


def course(tape: MicroTape) -> list[tuple[object, ...]]:
    """Return the events with blocks numbered in the order in which they come to life; frees in a row are sorted."""
    numbers: dict[int, int] = {}
    events: list[tuple[object, ...]] = []
    freed: list[int] = []
    for event in (*tape.events, Alloc(0, 0, Category.ACTIVATIONS, "", "")):
        if isinstance(event, Alloc):
            events += [(number,) for number in sorted(freed)]
            freed = []
            numbers[event.block] = len(numbers)
            events.append((numbers[event.block], *event[1:]))
        elif isinstance(event, Free):
            freed.append(numbers[event.block])
    return events


@pytest.mark.parametrize(
    ("name", "recompute"),
    [*((name, False) for name in MODELS), ("llama", True), ("t5", True)],
    ids=lambda value: value if isinstance(value, str) else "recomputed" if value else "kept",
)
def test_a_lengthened_tape_is_that_of_all_layers(name: str, recompute: bool) -> None:
    whole_tracer, whole = traced(name, whole=True, recompute=recompute)
    short_tracer, short = traced(name, whole=False, recompute=recompute)
    assert short_tracer.is_shortened, "the layers were traced one by one"
    assert course(short) == course(whole)
    assert set(short.gradients) == set(whole.gradients)
    assert short_tracer.parameters == whole_tracer.parameters
    peaks = [
        replay(list(updates(resident(tracer.parameters, {}), tape, (None, None), accum=2)), PlainAllocator()).peak
        for tracer, tape in ((whole_tracer, whole), (short_tracer, short))
    ]
    assert peaks[0].num_bytes == peaks[1].num_bytes


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_third_batch_follows_from_two(name: str) -> None:
    small, large, asked = (traced(name, whole=False, batch_size=size)[1] for size in (2, 5, 16))
    assert course(scaled(small, large, sizes=(2, 5), to=16)) == course(asked)


def test_tapes_with_other_events_give_no_third() -> None:
    with pytest.raises(NotAffineError):
        scaled(traced("bert", whole=True)[1], traced("gpt2", whole=True)[1], sizes=(2, 5), to=16)
