"""`effcli estimate`: published and measured numbers, names, settings, units, and what it says when it cannot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from effcli.catalogue import lookup as catalogue
from effcli.measure.optimizer_size import inspect_optimizer
from effcli.memory.state import predict_state
from effcli.optim.groups import decay_groups
from effcli.optim.registry import default_hyper, entries, find
from tests.commands import TINY_DISTILBERT, TINY_GPT2, effcli, model_folder
from tests.tiny_models import set_gradients

TINY = {
    "distilbert": (AutoModelForSequenceClassification, TINY_DISTILBERT),
    "gpt2": (AutoModelForCausalLM, TINY_GPT2),
    "t5": (
        AutoModelForSeq2SeqLM,
        {"vocab_size": 200, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    "vit": (
        AutoModelForImageClassification,
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
         "image_size": 32, "patch_size": 8},
    ),
    "mixtral": (
        AutoModelForCausalLM,
        {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
}  # fmt: skip
"""Model type -> auto class of its default task, configuration."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCLI_CACHE", str(tmp_path / "cache"))


def states(*arguments: object) -> dict[str, int]:
    return {
        optimizer["name"]: optimizer["state_bytes"]
        for optimizer in effcli("estimate", *arguments, "--json").record["optimizers"]
    }


def test_the_published_table_comes_out_exactly() -> None:
    record = effcli(
        "estimate", "distilbert-base-cased", "--optim", "adamw", "--optim", "adafactor", "--optim", "adam8bit", "--json"
    ).record
    assert (record["schema_version"], record["command"]) == (1, "estimate")
    assert record["model"] == {
        "name": "distilbert-base-cased",
        "architecture": "DistilBertForSequenceClassification",
        "task": "classification",
        "num_parameters": 65_783_042,
        "num_trainable_parameters": 65_783_042,
        "num_parameter_tensors": 104,
        "weights_bytes": 263_132_168,
        "gradients_bytes": 263_132_168,
    }
    table = {o["name"]: (o["state_elements"], o["state_bytes"], o["rule_of_thumb_bytes"]) for o in record["optimizers"]}
    assert table == {
        "adamw": (131_566_188, 526_264_752, 8 * 65_783_042),
        "adafactor": (178_712, 714_432, None),
        "adam8bit": (131_566_188, 134_004_336, 2 * 65_783_042),
    }
    assert {o["basis"] for o in record["optimizers"]} == {"exact"}


@pytest.mark.parametrize(
    ("precision", "adamw", "adam8bit"),
    [("fp32", 1_115_824, 295_648), ("bf16", 1_115_824, 295_648), ("bf16-pure", 557_992, 295_648)],
)
def test_only_pure_bf16_changes_state_and_only_where_state_follows_the_weight(
    distilbert: Path, precision: str, adamw: int, adam8bit: int
) -> None:
    record = effcli(
        "estimate", distilbert, "--precision", precision, "--optim", "adamw", "--optim", "adam8bit", "--json"
    ).record
    assert [o["state_bytes"] for o in record["optimizers"]] == [adamw, adam8bit]
    assert record["model"]["weights_bytes"] == (278_916 if precision == "bf16-pure" else 557_832)


def test_settings_of_8_bit_optimizers_reach_those_that_know_them(distilbert: Path) -> None:
    both = ("--optim", "adamw", "--optim", "adam8bit")
    assert states(distilbert, *both, "--keep-32bit", "embed") == {"adamw": 1_115_824, "adam8bit": 702_096}
    assert states(distilbert, *both, "--optim-bits", "32") == {"adamw": 1_115_824, "adam8bit": 8 * 139_458}
    assert states(distilbert, *both, "--min-8bit-size", "1000000")["adam8bit"] == 8 * 139_458
    assert states(distilbert, *both, "--override", "embed:optim_bits=32")["adam8bit"] == 702_096
    assert states(distilbert, "--optim", "adamw", "--optim-arg", "amsgrad=true") == {"adamw": 1_673_656}
    refused = effcli("estimate", distilbert, "--optim", "adamw", "--optim-bits", "32")
    assert refused.code == 2
    assert "--optim-bits 32" in refused.error


def test_a_tied_head_counts_once_and_an_untied_one_twice(tmp_path: Path) -> None:
    tied = effcli("estimate", model_folder(tmp_path / "tied", TINY_GPT2), "--optim", "adamw", "--json").record
    assert (tied["model"]["num_parameters"], tied["optimizers"][0]["state_bytes"]) == (168_192, 1_345_648)
    assert tied["tied"] == ["lm_head.weight"]
    untied = effcli(
        "estimate",
        model_folder(tmp_path / "untied", TINY_GPT2, tie_word_embeddings=False),
        "--optim",
        "adamw",
        "--json",
    ).record
    assert untied["model"]["num_parameters"] == 232_192
    masked = effcli("estimate", "distilbert-base-cased", "--task", "masked-lm", "--optim", "sgd", "--json").record
    assert masked["model"]["num_parameters"] == 65_812_036


def test_frozen_parameters_have_weights_alone(distilbert: Path) -> None:
    record = effcli("estimate", distilbert, "--freeze", "distilbert.*", "--optim", "adamw", "--json").record
    trainable = 64 * 64 + 64 + 2 * 64 + 2
    assert record["model"]["num_trainable_parameters"] == trainable
    assert record["model"]["gradients_bytes"] == 4 * trainable
    assert record["model"]["weights_bytes"] == 557_832
    assert record["optimizers"][0]["state_bytes"] == 8 * trainable + 4 * 4
    refused = effcli("estimate", distilbert, "--freeze", "lm_head")
    assert (refused.code, "--freeze 'lm_head' fits no parameter" in refused.error) == (2, True)


def test_adapters_train_with_the_head_and_every_weight_counts(distilbert: Path) -> None:
    lora = ("--lora-r", 8, "--lora-targets", "q_lin,v_lin")
    record = effcli("estimate", distilbert, *lora, "--optim", "adamw", "--json").record
    model = record["model"]
    assert (model["num_trainable_parameters"], model["num_parameters"]) == (8_386, 147_844)
    assert (model["gradients_bytes"], model["weights_bytes"]) == (4 * 8_386, 4 * 147_844)
    assert record["optimizers"][0]["state_bytes"] == 67_136


def test_stable_embeddings_count_their_norms_and_keep_their_state_in_32_bit(distilbert: Path) -> None:
    record = effcli("estimate", distilbert, "--stable-embedding", "--optim", "adam8bit", "--json").record
    assert (record["model"]["num_parameters"], record["optimizers"][0]["state_bytes"]) == (139_714, 704_144)


def test_the_total_is_the_sum_of_its_rows_and_says_that_it_is_a_lower_bound(distilbert: Path) -> None:
    record = effcli("estimate", distilbert, "--optim", "adamw", "--json").record
    model, optimizer = record["model"], record["optimizers"][0]
    parts = model["weights_bytes"] + model["gradients_bytes"] + optimizer["state_bytes"]
    assert optimizer["total_before_activations_bytes"] == parts == 2_231_488
    assert re.search(r"activations +not included: every total is a lower bound", effcli("estimate", distilbert).stdout)


def test_units_are_binary_and_never_mixed() -> None:
    text = effcli("estimate", "distilbert-base-cased", "--optim", "adamw").stdout
    assert "501.89 MiB" in text
    assert not re.search(r"\d (kB|KB|MB|GB)\b", text)


@pytest.mark.parametrize("kind", TINY)
def test_the_estimate_is_what_a_stepped_optimizer_holds_in_every_family(kind: str, tmp_path: Path) -> None:
    auto, config = TINY[kind]
    folder = model_folder(tmp_path / kind, {"model_type": kind, **config})
    record = effcli(
        "estimate", folder, "--optim", "adamw", "--optim", "adafactor", "--optim", "adam8bit", "--json"
    ).record
    torch.manual_seed(0)
    model = auto.from_config(CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k != "model_type"}))
    set_gradients(model)
    assert record["model"]["architecture"] == type(model).__name__
    assert record["model"]["num_parameters"] == sum(p.numel() for p in model.parameters())
    for optimizer in record["optimizers"]:
        entry = find(optimizer["name"])
        real = entry.build(decay_groups(model, 0.01), default_hyper(entry))
        real.step()
        size = inspect_optimizer(real)
        assert (optimizer["state_bytes"], optimizer["state_elements"]) == (size.state_bytes, size.state_elements)
        assert {key: amount["bytes"] for key, amount in optimizer["tensors"].items()} == {
            key: amount.bytes for key, amount in size.tensors.items()
        }


@pytest.mark.slow
def test_every_optimizer_of_every_catalogue_model_adds_up() -> None:
    for model in catalogue.models():
        shapes = catalogue.shapes(model, model.default_task, 2)
        assert shapes is not None, model.name
        for entry in entries():
            state = predict_state(entry, shapes.parameters, default_hyper(entry))
            assert state.state_bytes >= 0
            assert sum(state.by_parameter.values()) + state.shared_bytes == state.state_bytes, (model.name, entry.name)
            assert sum(amount.bytes for amount in state.tensors.values()) == state.state_bytes
            assert sum(amount.elements for amount in state.tensors.values()) == state.state_elements
            assert min(state.by_parameter.values(), default=0) >= 0


def test_a_second_estimate_of_a_folder_needs_neither_torch_nor_transformers(distilbert: Path) -> None:
    first = effcli("estimate", distilbert, "--json").record
    code = (
        "import sys, json; from effcli.cli.app import app\n"
        f"app(['estimate', {str(distilbert)!r}, '--json'], standalone_mode=False)\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == first
    assert done.stderr.strip() == "[]"


def test_a_changed_configuration_is_not_answered_from_the_cache(tmp_path: Path) -> None:
    before = effcli("estimate", model_folder(tmp_path / "m", TINY_DISTILBERT), "--json").record["model"][
        "num_parameters"
    ]
    after = effcli("estimate", model_folder(tmp_path / "m", TINY_DISTILBERT, n_layers=3), "--json").record["model"][
        "num_parameters"
    ]
    assert (before, after > before) == (139_458, True)


def test_a_cache_that_cannot_be_written_changes_nothing(distilbert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFCLI_CACHE", "/proc/nowhere")
    assert effcli("estimate", distilbert, "--json").record["model"]["num_parameters"] == 139_458


def test_a_damaged_cache_entry_is_read_anew(distilbert: Path, tmp_path: Path) -> None:
    effcli("estimate", distilbert, "--json")
    (entry,) = (tmp_path / "cache").rglob("*.json")
    entry.write_text('{"parameters": 3}')
    assert effcli("estimate", distilbert, "--json").record["model"]["num_parameters"] == 139_458


def test_a_quantised_checkpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "q", TINY_DISTILBERT, quantization_config={"quant_method": "gptq", "bits": 4})
    refused = effcli("estimate", folder)
    assert refused.code == 2
    assert "quantised checkpoint (gptq)" in refused.error


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("distilbert-base-casd",), 8, ["Did you mean 'distilbert-base-cased'?"]),
        (("./no/such/dir",), 2, ["no such folder"]),
        (("someone/nothing",), 8, ["hub cannot be reached"]),
        (("gpt2", "--task", "masked-lm"), 2, ["no head for --task masked-lm", "causal-lm"]),
        (("gpt2", "--task", "chatting"), 2, ["--task 'chatting'", "choose one of"]),
        (("gpt2", "--optim", "adam9"), 2, ["unknown optimizer 'adam9'"]),
        (("gpt2", "--num-labels", "0"), 2, ["num_labels"]),
        (("gpt2", "--precision", "fp8"), 2, ["precision"]),
        ((), 2, ["name a model"]),
        (("gpt2", "--model", "bert-base-cased"), 2, ["given twice"]),
    ],
)
def test_what_cannot_be_estimated_is_one_line_with_the_right_code(
    arguments: tuple[str, ...], code: int, words: list[str]
) -> None:
    result = effcli("estimate", *arguments)
    assert result.code == code
    assert all(word in result.error for word in words), result.error


def test_config_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    for config, words in (({"vocab_size": 3}, "names no model_type"), ({"model_type": "brt"}, "Did you mean 'bert'?")):
        refused = effcli("estimate", model_folder(tmp_path / words[:3], config))
        assert refused.code == 2
        assert words in refused.error


def test_classification_heads_take_the_number_of_labels_and_other_models_their_own() -> None:
    two, nine = (
        effcli("estimate", "bert-base-cased", "--num-labels", n, "--optim", "sgd", "--json").record["model"]
        for n in (2, 9)
    )
    assert nine["num_parameters"] - two["num_parameters"] == 7 * 769
    image = effcli("estimate", "google/vit-base-patch16-224", "--optim", "sgd", "--json").record["model"]
    assert (image["task"], image["num_parameters"]) == ("image-classification", 86_567_656)


def test_layers_and_tensors_show_where_the_bytes_are() -> None:
    record = effcli("estimate", "Llama-3.1-405B", "--optim", "adamw", "--per-layer", "--top", "2", "--json").record
    by_parameter = record["optimizers"][0]["by_parameter"]
    assert sum(by_parameter.values()) == record["optimizers"][0]["state_bytes"]
    assert [part["name"] for part in record["layers"]] == [
        "model.embed_tokens", "model.layers.0-125", "model.norm", "lm_head",
    ]  # fmt: skip
    assert sum(part["weights_bytes"] for part in record["layers"]) == record["model"]["weights_bytes"]
    assert sum(part["state_bytes"][0] for part in record["layers"]) == record["optimizers"][0]["state_bytes"]
    assert [part["name"] for part in record["largest"]] == ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("distilbert-base-cased",),
        ("Llama-3.1-405B", "--optim", "all", "--per-layer", "--top", "5"),
        ("google/flan-t5-xxl",),
    ],
)
def test_tables_fit_80_columns_and_cut_nothing_off(arguments: tuple[str, ...]) -> None:
    text = effcli("estimate", *arguments).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "\x1b" not in text


def test_an_estimate_equals_the_plan_of_a_run_with_the_same_model(distilbert: Path, tmp_path: Path) -> None:
    from tests.commands import csv_file

    data = csv_file(tmp_path / "d.csv")
    run = effcli("train", distilbert, "--data", data, "--optim", "adam8bit", "--dry-run", "--json").record
    estimated = effcli("estimate", distilbert, "--optim", "adam8bit", "--json").record
    assert estimated["model"] == run["model"]
    wanted = ("state_bytes", "state_elements", "rule_of_thumb_bytes", "tensors", "total_before_activations_bytes")
    assert {key: estimated["optimizers"][0][key] for key in wanted} == {key: run["optimizer"][key] for key in wanted}
