"""The planned peak of a rank, held against what torch really allocates where a model is replicated or sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from effcli.measure.profiled import UpdateProfiler
from effcli.memory.allocator import PlainAllocator
from effcli.memory.compose import updates
from effcli.memory.replay import Replay, replay
from effcli.memory.sharding import zero
from effcli.memory.sharding.program import exchanging, held
from effcli.memory.sharding.share import Sharding
from effcli.memory.sharding.shares import shares
from effcli.models.build import parameter_infos, recompute_activations
from effcli.optim import registry
from effcli.pipeline.planning import LATER, Limits, plan_memory, with_changes
from effcli.pipeline.predicting import Choice, Predictor, Settings, Subject
from effcli.pipeline.subjects import target
from effcli.spec import OptimSpec
from effcli.trace.layers import buffer_bytes
from tests.processes import called_in

ROWS, TOKENS, VOCABULARY = 2, 48, 1001
FEW_TOKENS = 2
MANY_WORDS = 16_001
"""A vocabulary whose embedding outweighs all layers: with so few tokens the peak is where that is gathered."""
WARM = 3
SMALL = 4096
"""Bytes by which a trace is off: counts and norms of one element, and what of a batch a loop lets go earlier."""


def model(name: str) -> torch.nn.Module:
    """Return a small model whose rows few numbers of processes divide: with tied embeddings, with a head of its own.

    Of `frozen` the embeddings are not trained, so that the first layer's input has no gradient; of `wordy`, with many
    words, neither.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "gpt2": {"n_embd": 66, "n_layer": 6, "n_head": 2, "n_positions": 64},
        "llama": {"hidden_size": 66, "intermediate_size": 131, "num_hidden_layers": 6, "num_attention_heads": 2,
                  "num_key_value_heads": 1, "head_dim": 16},
    }["llama" if name == "llama" else "gpt2"]  # fmt: skip
    kind = "llama" if name == "llama" else "gpt2"
    vocabulary = MANY_WORDS if name == "wordy" else VOCABULARY
    config = AutoConfig.for_model(kind, vocab_size=vocabulary, bos_token_id=1, eos_token_id=2, **sizes)
    config.use_cache = False
    built = AutoModelForCausalLM.from_config(config)
    if name in ("frozen", "wordy"):
        built.get_input_embeddings().requires_grad_(False)
        built.transformer.wpe.requires_grad_(False)
    return built


def predictor(name: str) -> Predictor:
    """Return what predicts updates of the model on a CPU."""

    def build(dtype: str, recompute: bool) -> torch.nn.Module:
        with torch.device("meta"):
            built = model(name)
        built.tie_weights()
        if recompute:
            recompute_activations(built, name)
        return built

    return Predictor(
        Subject(build=build, config=model(name).config, task="causal-lm", can_recompute=True), target("cpu")
    )


def choice(name: str = "adamw") -> Choice:
    """Return an optimizer with its defaults."""
    entry, asked = registry.find(name), OptimSpec(name=name)
    return Choice.of(entry, registry.resolve_hyper(entry, asked), asked)


def settings(shard: str, world_size: int, accum: int = 1, *, recompute: bool = False, tokens: int = TOKENS) -> Settings:
    """Return a batch of one process."""
    sharding = Sharding(shard=shard, world_size=world_size)
    return Settings(
        batch_size=ROWS, max_length=tokens, accum=accum, gradient_checkpointing=recompute, sharding=sharding
    )


def warm_peak(played: Replay) -> int:
    """Return the highest moment of a later update."""
    return max(moment.total_bytes for moment in played.moments if moment.update == LATER)


def without_copies(name: str, asked: Settings, optimizer: Choice) -> int:
    """Return the peak that is planned where the backend copies nothing."""
    found = predictor(name)
    whole = model(name)
    parameters, buffers = parameter_infos(whole), buffer_bytes(whole)
    share = shares(parameters, asked.sharding)[0]
    steps = found.steps(asked, optimizer)
    program = updates(
        held(parameters, buffers, share, asked.sharding),
        exchanging(found.micro(asked), share, asked.sharding, device="cuda"),
        (steps.first, steps.later),
        built=steps.built,
        accum=asked.accum,
        held_batches=asked.accum,
        hands_over=asked.sharding.is_replicated,
    )
    return warm_peak(replay(list(program), PlainAllocator()))


def measured_peak(name: str, shard: str, accum: int, *, recompute: bool = False, tokens: int = TOKENS) -> int:
    """Return the most that torch's allocator hands out during a warm update, in a group that is there already."""
    torch.manual_seed(0)
    built = model(name).train()
    if recompute:
        recompute_activations(built, name)
    run: torch.nn.Module = built
    if shard == "fsdp":
        for layer in [module for module in built.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer)
        fully_shard(built)
    else:
        run = DistributedDataParallel(built, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(built.parameters())
    profiler = UpdateProfiler(built, optimizer)
    for update in range(WARM):
        if update == WARM - 1:
            profiler.start()
        batches = [torch.randint(VOCABULARY, (3, ROWS, tokens)) for _ in range(accum)]
        for place, batch in enumerate(batches):
            last = place == accum - 1
            with nullcontext() if last or shard == "fsdp" else run.no_sync():  # type: ignore[operator]
                _micro_step(run, batch)
        gradients = [parameter.grad for parameter in built.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(built.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del gradients, norm
    peak = profiler.stop().peak_allocated_bytes
    profiler.detach()
    return peak


def _micro_step(run: torch.nn.Module, batch: torch.Tensor) -> None:
    logits = run(input_ids=batch[0], attention_mask=torch.ones_like(batch[1])).logits
    labels = torch.nn.functional.pad(batch[2], (0, 1), value=-100)[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / 100
    del logits
    loss.backward()


@contextmanager
def pretended(world_size: int) -> Iterator[None]:
    """Let this process be rank 0 of a group whose exchanges do nothing and take nothing, as NCCL's in torch's eyes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "world_size", "accum", "recompute"),
    [
        ("gpt2", 2, 1, False),
        ("gpt2", 4, 2, False),
        ("llama", 3, 1, False),
        ("llama", 2, 2, True),
        ("frozen", 2, 2, False),
        ("wordy", 4, 1, False),
    ],
)
def test_the_peak_of_a_shard_is_what_torch_allocates_beside_the_backend(
    name: str, world_size: int, accum: int, recompute: bool
) -> None:
    tokens = FEW_TOKENS if name == "wordy" else TOKENS
    asked = settings("fsdp", world_size, accum, recompute=recompute, tokens=tokens)
    with pretended(world_size):
        measured = measured_peak(name, "fsdp", accum, recompute=recompute, tokens=tokens)
    assert without_copies(name, asked, choice()) == pytest.approx(measured, abs=SMALL)


@pytest.mark.parametrize(
    ("shard", "precision", "measured"),
    [("zero1", "fp32", 3_855_276), ("zero1", "bf16", 3_080_968), ("zero2", "fp32", 3_086_244)],
)
def test_a_step_of_deepspeed_takes_32_bit_gradients_of_a_partition_as_well(
    shard: str, precision: str, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch's profiler saw beside weights and state in a warm step of DeepSpeed 0.19.8, two processes on a CPU."""
    monkeypatch.setattr(zero, "REDUCE_BUCKET_ELEMENTS", 200_000)
    asked = replace(settings(shard, 2, 2), precision=precision)
    step = plan_memory(predictor("gpt2"), asked, choice(), Limits(budget_bytes=None, context_bytes=0)).phases["step"]
    assert step.total_bytes is not None
    beside = step.total_bytes - step.weights_bytes - step.optimizer_state_bytes
    assert measured <= beside <= 1.01 * measured


def test_under_deepspeed_16_bit_is_the_model_s_and_nothing_is_cast_for_a_while() -> None:
    limits = Limits(budget_bytes=None, context_bytes=0)
    found = predictor("gpt2")
    replica, share = (
        {part.name for part in plan_memory(found, replace(asked, precision="bf16"), choice(), limits).parts}
        for asked in (settings("ddp", 2), settings("zero2", 2))
    )
    assert "autocast copies of weights" in replica - share


def test_the_plan_of_stage_2_is_that_of_the_rank_with_most_gradients() -> None:
    asked = settings("zero2", 5)
    held = shares(parameter_infos(model("gpt2")), asked.sharding)
    planned = plan_memory(predictor("gpt2"), asked, choice(), Limits(budget_bytes=None, context_bytes=0))
    most = max(share.gradients_bytes for share in held)
    assert planned.phases["step"].gradients_bytes == most > held[0].gradients_bytes


@pytest.mark.parametrize("accum", [1, 2])
def test_the_peak_of_a_replica_is_what_torch_allocates(accum: int) -> None:
    """One of one takes what one of many does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        measured = measured_peak("gpt2", "ddp", accum)
    finally:
        dist.destroy_process_group()
    planned = warm_peak(predictor("gpt2").replay(settings("ddp", 2, accum), choice()))
    assert planned == pytest.approx(measured, abs=SMALL)


def test_gradients_that_are_held_back_lie_beside_the_buckets() -> None:
    found, whole = predictor("gpt2"), sum(info.num_bytes for info in parameter_infos(model("gpt2")))
    one, two = (warm_peak(found.replay(settings("ddp", 2, accum), choice())) for accum in (1, 2))
    assert two - one == pytest.approx(whole, rel=0.1)


def test_a_run_of_one_process_exchanges_nothing_whatever_the_mode() -> None:
    found = predictor("gpt2")
    alone = Settings(batch_size=ROWS, max_length=TOKENS)
    plans = [
        plan_memory(found, asked, choice(), Limits(budget_bytes=None, context_bytes=0))
        for asked in (alone, settings("ddp", 1), settings("fsdp", 1), settings("fsdp", 2))
    ]
    assert plans[0] == plans[1] == plans[2]
    assert "communication" not in plans[0].basis
    assert all(phase.communication_bytes == 0 for phase in plans[0].phases.values())
    assert plans[3].basis["communication"] == "assumed"
    assert plans[3].phases["backward"].communication_bytes > 0
    assert plans[3].phases["step"].communication_bytes == 0


def test_a_step_on_shards_takes_its_temporaries_one_tensor_after_another() -> None:
    found = Predictor(predictor("gpt2")._subject, target("cuda"))
    whole, shard = (
        plan_memory(found, asked, choice(), Limits(budget_bytes=None, context_bytes=0)).phases["step"]
        for asked in (settings("ddp", 2), settings("fsdp", 2))
    )
    saved = (whole.temporaries_bytes or 0) - (shard.temporaries_bytes or 0)
    assert saved > whole.weights_bytes / 2, "foreach takes them for all tensors at once"


def test_no_change_is_offered_that_does_not_run_on_shards() -> None:
    found = Predictor(predictor("gpt2")._subject, target("cuda"))
    limits = Limits(budget_bytes=None, context_bytes=0)
    replica, shard, flat = (
        {change.flags for change in with_changes(plan_memory(found, *asked, limits), found, *asked).changes}
        for asked in ((settings(way, 2), choice()) for way in ("ddp", "fsdp", "zero1"))
    )
    assert {"--optim adamw8bit", "--optim-arg implementation=fused"} <= replica
    assert shard == {flags for flags in replica if not flags.startswith("--optim")}
    assert flat == replica - {"--optim adamw8bit"}, "of which no checkpoint could be made"


def peaks_with_gloo() -> int:
    """Return the peak of this process."""
    return measured_peak("gpt2", "fsdp", 1)


@pytest.mark.slow
def test_two_processes_take_what_is_planned_and_what_gloo_gives_back_late() -> None:
    planned = warm_peak(predictor("gpt2").replay(settings("fsdp", 2), choice()))
    largest = 2 * 4 * 66 * VOCABULARY
    for measured in called_in(2, "tests.test_peak_ranks:peaks_with_gloo"):
        assert planned - SMALL <= measured <= planned + largest, "copies of what was exchanged, let go by a thread"
