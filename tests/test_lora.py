"""LoRA: what trains, what it takes, what is saved, and how it loads again."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from effcli.models.build import parameter_infos
from effcli.optim.groups import decay_groups, hidden_names
from tests.commands import data_flags, effcli, saved_weights
from tests.jobs import ENGINES, ONE_FAST_ENGINE
from tests.stopped_runs import check_that_a_stop_changes_nothing
from tests.tiny_models import tiny_distilbert, tiny_gpt2

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

STATE_BYTES = {"adamw": 67_136, "adam8bit": 8 * 4_290 + 2 * 4_096 + 8 * 16 + 2_048}
LORA = ("--lora-r", 8, "--lora-targets", "q_lin,v_lin")


def adapted(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """Return a model that peft itself has wrapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(r=8, **settings))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors in the state."""
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("everything", [False, True])
def test_adapters_alone_have_state_even_if_all_parameters_are_passed(everything: bool) -> None:
    model = adapted(tiny_distilbert(), target_modules=["q_lin", "v_lin"])
    groups = [{"params": list(model.parameters())}] if everything else decay_groups(model, 0.01)
    optimizer = torch.optim.AdamW([{"params": group["params"]} for group in groups])
    model(input_ids=torch.arange(8)[None], labels=torch.tensor([1])).loss.backward()
    optimizer.step()
    assert state_bytes(optimizer) == 32_800
    trained = [info for info in parameter_infos(model) if info.trainable]
    assert (len(trained), sum(info.num_elements for info in trained)) == (8, 4_096)


@pytest.mark.parametrize(("optim", "engine"), [("adamw", "pytorch"), *(("adam8bit", engine) for engine in ENGINES)])
def test_adapters_and_head_train_and_the_rest_counts_as_weights(
    optim: str, engine: str, distilbert: Path, data: Path, tmp_path: Path
) -> None:
    common = ("train", distilbert, "--data", data, *LORA)
    arguments = (*common, "--optim", optim, "--engine", engine, "--max-steps", 2, "--json")
    record = effcli(*arguments, "--out", tmp_path / "o").record
    model, measured = record["model"], record["measured"]
    assert model["architecture"] == "DistilBertForSequenceClassification"
    assert model["num_trainable_parameters"] == 8_386
    assert model["num_parameters"] == 147_844
    assert model["weights_bytes"] == measured["weights_bytes"] == 4 * 147_844
    assert model["gradients_bytes"] == measured["gradients_bytes"] == 4 * 8_386
    assert record["optimizer"]["state_bytes"] == measured["optimizer_state_bytes"] == STATE_BYTES[optim]
    assert record["optimizer"]["tensors"] == measured["tensors"]
    assert sum(group["num_tensors"] for group in record["groups"]) == 12
    estimated = effcli("estimate", distilbert, *LORA, "--optim", optim, "--json").record
    assert estimated["model"] == model
    assert estimated["optimizers"][0]["tensors"] == measured["tensors"]
    planned = effcli(*arguments, "--dry-run").record
    for key in ("model", "optimizer", "groups"):
        assert planned[key] == record[key]


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("family", ["classification", "causal-lm"])
def test_the_engines_make_the_same_updates(
    family: str, distilbert: Path, gpt2: Path, data: Path, tmp_path: Path
) -> None:
    model = (distilbert, *LORA) if family == "classification" else (gpt2, "--lora-r", 4)
    histories = []
    for engine in ENGINES:
        record = effcli(
            "train", *model, *data_flags(family, data), "--optim", "sgd", "--lr", 0.1, "--lora-dropout", 0.1,
            "--engine", engine, "--batch-size", 2, "--accum", 2, "--max-steps", 3, "--out", tmp_path / engine, "--json",
        ).record  # fmt: skip
        histories.append(record["history"])
        assert all(line["grad_norm"] > 0 for line in record["history"])
    for history in histories[1:]:
        for key in ("loss", "grad_norm", "lr"):
            assert [x[key] for x in history] == pytest.approx([x[key] for x in histories[0]], rel=1e-6)


@pytest.mark.usefixtures("without_plan")
def test_a_language_model_keeps_its_tied_head_frozen_and_nobody_warns(gpt2: Path, data: Path, tmp_path: Path) -> None:
    arguments = (*data_flags("causal-lm", data), "--lora-r", 8, "--max-steps", 1)
    done = effcli("train", gpt2, *arguments, "--out", tmp_path / "o", "--json")
    alone = adapted(tiny_gpt2(), target_modules=["c_attn"])
    trainable = sum(param.numel() for param in alone.parameters() if param.requires_grad)
    assert done.record["model"]["num_trainable_parameters"] == trainable == 4_096
    assert done.record["model"]["num_parameters"] == 168_192 + 4_096
    assert done.record["measured"]["optimizer_state_bytes"] == 8 * 4_096 + 4 * 4
    assert "fan_in_fan_out" not in done.stderr
    assert "arn" not in done.stderr.replace("learn", "")


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("engine", ENGINES)
def test_recomputed_activations_change_no_gradient_of_the_adapters(
    engine: str, distilbert: Path, data: Path, tmp_path: Path
) -> None:
    common = ("train", distilbert, "--data", data, *LORA, "--engine", engine, "--max-steps", 1, "--json")
    plain = effcli(*common, "--out", tmp_path / "a").record["history"]
    saving = effcli(*common, "--gradient-checkpointing", "--out", tmp_path / "b").record["history"]
    assert all(line["grad_norm"] > 0 for line in saving)
    for key in ("loss", "grad_norm"):
        assert [x[key] for x in saving] == pytest.approx([x[key] for x in plain], rel=1e-6)


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_decoder_that_recomputes_trains_its_adapters_and_may_cache_again(
    engine: str, gpt2: Path, data: Path, tmp_path: Path
) -> None:
    common = ("train", gpt2, *data_flags("causal-lm", data), "--lora-r", 4, "--engine", engine, "--max-steps", 2)
    plain = effcli(*common, "--out", tmp_path / "a", "--json").record["history"]
    saving = effcli(*common, "--gradient-checkpointing", "--out", tmp_path / "b", "--json").record["history"]
    assert all(line["grad_norm"] > 0 for line in saving)
    for key in ("loss", "grad_norm"):
        assert [x[key] for x in saving] == pytest.approx([x[key] for x in plain], rel=1e-6)
    assert json.loads((tmp_path / "b" / "model" / "base" / "config.json").read_text())["use_cache"] is True


def test_weights_below_an_embedding_and_the_head_are_no_hidden_ones() -> None:
    model = adapted(tiny_gpt2(), target_modules=["c_attn", "wte", "lm_head"])
    hidden = {name for name in hidden_names(model) if "lora_" in name}
    assert len(hidden) == 4
    assert all("c_attn" in name for name in hidden)


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_a_resumed_run_ends_with_the_same_adapters(engine: str, tmp_path: Path) -> None:
    lora = {"lora_r": 4, "lora_targets": ["all-linear"], "lora_dropout": 0.1}
    rest = check_that_a_stop_changes_nothing(
        tmp_path, {"name": "adamw"}, model=lora, engine=engine, batch_size=4, accum=1
    )
    assert any("lora_B" in name for name in saved_weights(tmp_path / "parts"))
    assert any(note.startswith("LoRA of rank 4, alpha 8") for note in rest.notes)


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("engine", ENGINES)
def test_pure_bf16_keeps_adapters_in_fp32(engine: str, distilbert: Path, data: Path, tmp_path: Path) -> None:
    record = effcli(
        "train", distilbert, "--data", data, *LORA, "--precision", "bf16-pure", "--engine", engine, "--max-steps", 2,
        "--out", tmp_path / "o", "--json",
    ).record  # fmt: skip
    model, measured = record["model"], record["measured"]
    assert model["weights_bytes"] == measured["weights_bytes"] == 2 * (139_458 + 4_290) + 4 * 4_096
    assert model["gradients_bytes"] == measured["gradients_bytes"] == 2 * 4_290 + 4 * 4_096
    assert effcli("estimate", distilbert, *LORA, "--precision", "bf16-pure", "--json").record["model"] == model
    state = 2 * model["gradients_bytes"] + 4 * 12
    assert record["optimizer"]["state_bytes"] == measured["optimizer_state_bytes"] == state
    saved = saved_weights(tmp_path / "o")
    assert {str(value.dtype) for name, value in saved.items() if "lora_" in name} == {"torch.float32"}


def test_a_model_stored_in_fp16_gets_fp32_adapters_and_a_scaler(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_distilbert().half().save_pretrained(tmp_path / "half")
    monkeypatch.setattr("effcli.pipeline.settling.check_precision", lambda *_: None)
    record = effcli(
        "train", tmp_path / "half", "--data", data, *LORA, "--precision", "fp16", "--max-steps", 2,
        "--out", tmp_path / "o", "--json",
    ).record  # fmt: skip
    assert record["measured"]["weights_bytes"] == 4 * 147_844
    assert record["measured"]["optimizer_state_bytes"] == 67_136


WRONG = [
    (("--lora-r", 8), ["--lora-r 8", "distilbert", "--lora-targets", "all-linear", "q_lin, k_lin, v_lin, out_lin"]),
    (("--lora-r", 8, "--lora-targets", "q_lin,v_lim"), ["'v_lim'", "Did you mean 'v_lin'?", "q_lin, k_lin"]),
    (("--lora-r", 8, "--lora-targets", "ffn"), ["'ffn'", "takes an adapter"]),
    (("--lora-r", 8, "--lora-targets", "pre_classifier"), ["pre_classifier", "head"]),
    (("--lora-r", 8, "--lora-targets", "all-linear", "--lora-targets", "q_lin"), ["all-linear", "alone"]),
    (("--lora-r", 0, "--lora-targets", "q_lin"), ["--lora-r", "0", "1"]),
    (("--lora-r", "x"), ["--lora-r", "x"]),
    ((*LORA, "--lora-dropout", 1), ["--lora-dropout", "1"]),
    ((*LORA, "--freeze", "embed"), ["--freeze embed", "--lora-r 8", "one of the two"]),
    ((*LORA, "--stable-embedding"), ["--stable-embedding", "--lora-r 8", "one of the two"]),
    (("--lora-targets", "q_lin"), ["--lora-targets q_lin", "--lora-r"]),
    (("--lora-alpha", 16), ["--lora-alpha", "--lora-r"]),
    (("--lora-dropout", 0.1), ["--lora-dropout", "--lora-r"]),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda value: " ".join(map(str, value)))
def test_a_wrong_setting_is_one_line(
    arguments: tuple[object, ...], words: list[str], distilbert: Path, data: Path
) -> None:
    done = effcli("train", distilbert, "--data", data, *arguments, "--dry-run")
    assert done.code == 2, done.stderr
    assert all(word in done.error for word in words), done.error


def test_a_missing_peft_is_one_line_with_the_pip_command(
    distilbert: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    done = effcli("train", distilbert, "--data", data, *LORA)
    assert done.code == 3
    assert "pip install peft" in done.error
    assert effcli("train", distilbert, "--data", data, "--dry-run").code == 0
