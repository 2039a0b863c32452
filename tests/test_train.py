"""`effcli train` from the command line to the record, the saved model and the resumed run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from effcli import pipeline
from effcli.errors import UsageError
from effcli.optim import registry
from effcli.report.progress import QuietProgress
from tests.commands import csv_file, data_flags, effcli, model_folder, saved_weights, untimed
from tests.jobs import ENGINES
from tests.stopped_runs import check_that_a_stop_changes_nothing, train_and_stop

STATE_BYTES = {
    "adamw": 1_115_824,
    "adafactor": 19_280,
    "adafactor-torch": 19_280,
    "adam8bit": 295_648,
    "adamw8bit": 295_648,
    "paged-adamw8bit": 295_648,
    "sgd": 0,
}
# The engines hand the same optimizer through; one of each package is measured in all of them.
MEASURED = [
    *((optim, "pytorch") for optim in STATE_BYTES),
    *((optim, engine) for optim in ("adamw", "adafactor", "adam8bit") for engine in ENGINES if engine != "pytorch"),
]
# The optimizer decides what a checkpoint holds, the engine when it is taken and by whom it is loaded.
RESUMED = [
    ("adamw", "fp32", "pytorch"),
    ("adafactor", "fp32", "pytorch"),
    ("sgd", "bf16", "pytorch"),
    *(("adam8bit", "fp32", engine) for engine in ENGINES),
    ("adafactor", "bf16-pure", "pytorch"),
]
FAMILIES = (
    "adamw", "sgd", "adafactor", "adam8bit", "adamw4bit", "galore-adamw", "schedulefree-adamw", "lion",
)  # fmt: skip
# Every entry's law is checked against upstream's class elsewhere. Here each package is run from the command line once;
# the other forty and more take a second each and go the same way.
DEMONSTRATIONS = [
    pytest.param(entry.name, marks=() if entry.name in FAMILIES else pytest.mark.slow) for entry in registry.entries()
]


def run_flags(folder: Path, data: Path, out: Path, **loop: Any) -> dict[str, Any]:
    """Return the settings of a run with all else left at its default."""
    return {
        "model": {"name": str(folder)}, "data": {"train": str(data)}, "loop": loop, "output": {"out": str(out)},
    }  # fmt: skip


def test_a_run_leaves_a_record_a_recipe_and_a_model_that_loads(distilbert: Path, tmp_path: Path) -> None:
    data, out = csv_file(tmp_path / "d.csv"), tmp_path / "runs" / "[v2]" / "[/some]"
    done = effcli("train", distilbert, "--data", data, "--eval-data", data, "--epochs", 2, "--out", out, "--json")
    record = done.record
    assert record == json.loads((out / "record.json").read_text())
    assert record["status"] == "completed"
    assert record["total_updates"] == len(record["history"]) == 4
    assert [line["epoch"] for line in record["eval"]] == [1.0, 2.0]
    assert {"eval_loss", "eval_accuracy", "eval_f1"} <= set(record["eval"][0])
    assert record["batch"] == {"micro": 8, "accum": 1, "world_size": 1, "effective": 8}
    rows = {"train_rows": 12, "eval_rows": 12, "skipped_rows": 0, "truncated_rows": 0, "truncated_targets": 0}
    assert record["data"] == rows
    assert record["measured"]["nvml"]["reason"]
    assert record["measured"]["peak_allocated_bytes"] is None
    assert record["measured"]["peak_rss_bytes"] > 2**27

    model = AutoModelForSequenceClassification.from_pretrained(out / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert model.config.id2label == {0: "0", 1: "1"}
    assert "Classes: 0 = 0, 1 = 1. F1 is that of 1." in done.stderr
    texts, labels = zip(*(line.split(",") for line in data.read_text().splitlines()[1:]), strict=True)
    with torch.no_grad():
        logits = model(**tokenizer(list(texts), padding=True, return_tensors="pt")).logits
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([int(label) for label in labels]))
    assert loss.item() == pytest.approx(record["eval"][-1]["eval_loss"], abs=1e-5)

    again = effcli("train", "--recipe", out / "recipe.yaml", "--out", tmp_path / "again", "--json").record
    assert [line["loss"] for line in again["history"]] == [line["loss"] for line in record["history"]]


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize(("optim", "engine"), MEASURED)
def test_predicted_state_is_measured_state_to_the_byte(
    optim: str, engine: str, distilbert: Path, tmp_path: Path
) -> None:
    data = csv_file(tmp_path / "d.csv")
    arguments = ("train", distilbert, "--data", data, "--optim", optim, "--engine", engine, "--max-steps", 1)
    record = effcli(*arguments, "--out", tmp_path / "o", "--json").record
    assert record["optimizer"]["state_bytes"] == STATE_BYTES[optim]
    assert record["measured"]["optimizer_state_bytes"] == STATE_BYTES[optim]
    assert record["measured"]["tensors"] == record["optimizer"]["tensors"]
    assert record["measured"]["optimizer_state_elements"] == record["optimizer"]["state_elements"]
    assert record["measured"]["weights_bytes"] == record["model"]["weights_bytes"] == 557_832
    assert record["measured"]["gradients_bytes"] == record["model"]["gradients_bytes"] == 557_832
    assert [(g["num_tensors"], g["num_elements"]) for g in record["groups"]] == [(16, 137_856), (24, 1_602)]


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize(
    ("precision", "optim", "weights", "state"),
    [
        ("fp32", "adamw", 557_832, 1_115_824),
        ("bf16", "adamw", 557_832, 1_115_824),
        ("bf16-pure", "adamw", 278_916, 557_992),
        ("bf16-pure", "adam8bit", 278_916, 295_648),
        ("bf16-pure", "adafactor-torch", 278_916, 9_720),
        ("bf16-pure", "adafactor", 278_916, 19_280),
    ],
)
def test_precision_decides_the_width_of_weights_and_state(
    precision: str, optim: str, weights: int, state: int, distilbert: Path, tmp_path: Path
) -> None:
    record = effcli(
        "train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--precision", precision, "--optim", optim,
        "--max-steps", 1, "--out", tmp_path / "o", "--json",
    ).record  # fmt: skip
    for bytes_of in (record["model"], record["measured"]):
        assert (bytes_of["weights_bytes"], bytes_of["gradients_bytes"]) == (weights, weights)
    assert record["optimizer"]["state_bytes"] == record["measured"]["optimizer_state_bytes"] == state


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["classification", "causal-lm"])
def test_accumulation_equals_the_big_batch_from_file_to_record(
    family: str, engine: str, distilbert: Path, gpt2: Path, tmp_path: Path
) -> None:
    data = csv_file(tmp_path / "d.csv", 11)
    model = distilbert if family == "classification" else gpt2
    common = ("train", model, *data_flags(family, data), "--optim", "sgd", "--lr", 0.1, "--engine", engine, "--json")
    small = effcli(*common, "--batch-size", 2, "--accum", 2, "--epochs", 2, "--out", tmp_path / "a").record
    big = effcli(*common, "--batch-size", 4, "--accum", 1, "--epochs", 2, "--out", tmp_path / "b").record
    for key in ("loss", "grad_norm", "lr"):
        assert [x[key] for x in small["history"]] == pytest.approx([x[key] for x in big["history"]], rel=1e-6)
    one, other = (saved_weights(tmp_path / name) for name in "ab")
    assert max((one[name] - other[name]).abs().max().item() for name in one) < 1e-6


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("accum", [1, 2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_training_loss_is_the_evaluation_loss_whatever_the_accumulation(
    engine: str, accum: int, distilbert: Path, tmp_path: Path
) -> None:
    data = csv_file(tmp_path / "f.csv", 8)
    record = effcli(
        "train", distilbert, "--data", data, "--eval-data", data, "--lr", 0, "--accum", accum, "--batch-size", 2,
        "--epochs", 1, "--eval-batch-size", 3, "--engine", engine, "--out", tmp_path / "o", "--json",
    ).record  # fmt: skip
    losses = [line["loss"] for line in record["history"]]
    assert sum(losses) / len(losses) == pytest.approx(record["eval"][-1]["eval_loss"], abs=1e-5)


def test_a_language_model_trains_on_lines_of_text(gpt2: Path, tmp_path: Path) -> None:
    data = tmp_path / "t.jsonl"
    texts = ["a b", "a b c d e f g h", "a b c", "c d e f g h a"]
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    done = effcli("train", gpt2, "--data", data, "--eval-data", data, "--epochs", 1, "--out", tmp_path / "o", "--json")
    record = done.record
    assert record["model"]["num_parameters"] == 168_192
    assert record["model"]["num_parameter_tensors"] == 28
    assert record["optimizer"]["state_bytes"] == record["measured"]["optimizer_state_bytes"] == 1_345_648
    evaluation = record["eval"][0]
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(evaluation["eval_loss"]))
    assert evaluation["eval_accuracy"] is None
    assert "causal-lm" in done.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "o" / "model").config.use_cache is True


@pytest.mark.usefixtures("without_plan")
def test_a_decoder_classifies_without_a_new_row_for_padding(gpt2: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.csv"
    data.write_text(f"text,label\nshort one here,0\n{'word ' * 80},1\n")
    record = effcli(
        "train", gpt2, "--data", data, "--batch-size", 2, "--epochs", 1, "--out", tmp_path / "o", "--json"
    ).record
    assert record["model"]["num_parameters"] == 168_320
    assert record["data"]["truncated_rows"] == 1
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "o" / "model")
    assert model.config.pad_token_id == AutoTokenizer.from_pretrained(tmp_path / "o" / "model").pad_token_id


@pytest.mark.usefixtures("without_plan")
def test_frozen_parameters_have_no_state_and_do_not_move(distilbert: Path, tmp_path: Path) -> None:
    record = effcli(
        "train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--freeze", "distilbert.*", "--max-steps", 2,
        "--out", tmp_path / "o", "--json",
    ).record  # fmt: skip
    trainable = 64 * 64 + 64 + 2 * 64 + 2
    assert record["model"]["num_trainable_parameters"] == trainable
    assert record["model"]["num_parameters"] == 139_458
    assert record["optimizer"]["state_bytes"] == record["measured"]["optimizer_state_bytes"] == 8 * trainable + 4 * 4
    assert record["measured"]["gradients_bytes"] == record["model"]["gradients_bytes"] == 4 * trainable


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("engine", ENGINES)
def test_gradient_checkpointing_changes_no_number(engine: str, gpt2: Path, data: Path, tmp_path: Path) -> None:
    common = ("train", gpt2, *data_flags("causal-lm", data), "--engine", engine, "--max-steps", 2, "--json")
    plain = effcli(*common, "--out", tmp_path / "a").record
    saving = effcli(*common, "--gradient-checkpointing", "--out", tmp_path / "b").record
    for key in ("loss", "grad_norm"):
        assert [x[key] for x in saving["history"]] == pytest.approx([x[key] for x in plain["history"]], rel=1e-6)
    assert saving["history"][0]["grad_norm"] > 0


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("arguments", [(), ("--lr", "1e-3"), ("--optim-arg", "relative_step=true")])
@pytest.mark.parametrize("engine", ENGINES)
def test_adafactor_logs_a_real_learning_rate(
    engine: str, arguments: tuple[str, ...], distilbert: Path, tmp_path: Path
) -> None:
    record = effcli(
        "train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--optim", "adafactor", *arguments,
        "--engine", engine, "--max-steps", 2, "--out", tmp_path / "o", "--json",
    ).record  # fmt: skip
    assert all(line["lr"] > 0 for line in record["history"])
    assert record["optimizer"]["state_bytes"] == record["measured"]["optimizer_state_bytes"] == 19_280


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize(("optim", "precision", "engine"), RESUMED)
def test_a_resumed_run_ends_as_the_uninterrupted_one(optim: str, precision: str, engine: str, tmp_path: Path) -> None:
    check_that_a_stop_changes_nothing(tmp_path, {"name": optim}, engine=engine, precision=precision)


@pytest.mark.usefixtures("without_plan")
def test_a_damaged_checkpoint_is_passed_over_and_said(distilbert: Path, tmp_path: Path) -> None:
    data, out = csv_file(tmp_path / "d.csv", 16), tmp_path / "o"
    flags = run_flags(distilbert, data, out, batch_size=4, epochs=1)
    flags["output"]["save_every"] = 1
    train_and_stop(flags, after=3)
    newest = out / "checkpoints" / "update-00000003" / "training.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    newest.write_bytes(content)
    done = effcli("train", "--out", out, "--resume", "--json")
    assert "update-00000003' is damaged" in done.stderr
    assert "Resumed after update 2 of 4." in done.stderr
    assert [line["update"] for line in done.record["history"]] == [1, 2, 3, 4]


@pytest.mark.usefixtures("without_plan")
def test_resume_refuses_what_would_change_what_is_learnt(distilbert: Path, tmp_path: Path) -> None:
    data, out = csv_file(tmp_path / "d.csv"), tmp_path / "o"
    train_and_stop(run_flags(distilbert, data, out, batch_size=4), after=2)
    error = effcli("train", "--out", out, "--resume", "--lr", 0.5).error
    assert "--lr" in error
    done = effcli("train", "--out", out, "--resume", "--epochs", 4, "--json")
    assert done.record["total_updates"] == 12
    assert "Resumed after update 2 of 12." in done.record["notes"]
    assert any("was to end at update 9" in note for note in done.record["notes"])
    assert not any("random" in note for note in done.record["notes"])
    assert "complete" in effcli("train", "--out", out, "--resume").error


@pytest.mark.usefixtures("without_plan")
@pytest.mark.parametrize("broken", ["missing", "[]", "{}"])
def test_checkpoints_without_a_sound_manifest_are_damaged_ones(broken: str, distilbert: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    train_and_stop(run_flags(distilbert, csv_file(tmp_path / "d.csv", 16), out), after=1)
    manifest = next((out / "checkpoints").glob("*/manifest.json"))
    manifest.unlink() if broken == "missing" else manifest.write_text(broken)
    done = effcli("train", "--out", out, "--resume")
    assert done.code == 7
    assert "damaged" in done.error


@pytest.mark.usefixtures("without_plan")
def test_resume_notices_that_the_data_changed(distilbert: Path, tmp_path: Path) -> None:
    data, out = csv_file(tmp_path / "d.csv", 16), tmp_path / "o"
    train_and_stop(run_flags(distilbert, data, out), after=1)
    csv_file(data, 20)
    done = effcli("train", "--out", out, "--resume")
    assert done.code == 2
    assert "16 rows" in done.error
    assert "20" in done.error


@pytest.mark.usefixtures("without_plan")
def test_a_run_killed_before_its_model_was_saved_is_completed(distilbert: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    common = ("train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--max-steps", 2, "--out", out)
    first = effcli(*common, "--json").record
    shutil.rmtree(out / "model")
    (out / "record.json").unlink()
    again = effcli("train", "--out", out, "--resume", "--json").record
    assert untimed(again["history"]) == untimed(first["history"])
    assert again["status"] == "completed"
    assert (out / "model" / "model.safetensors").is_file()


@pytest.mark.usefixtures("without_plan")
def test_scores_are_learnt_by_regression(distilbert: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.csv"
    data.write_text("text,label\na b c,3.5\nd e f,1.25\ng h i,0.1\nj k l,2.2\n")
    done = effcli(
        "train", distilbert, "--data", data, "--eval-data", data, "--epochs", 2, "--out", tmp_path / "o", "--json"
    )
    assert done.record["eval"][-1]["eval_loss"] > 0
    assert done.record["eval"][-1]["eval_accuracy"] is None
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "o" / "model").config.num_labels == 1


def test_a_parameter_that_gets_no_gradient_is_named(tmp_path: Path) -> None:
    model = model_folder(
        tmp_path / "bart",
        {
            "model_type": "bart", "vocab_size": 200, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
            "max_position_embeddings": 32, "is_encoder_decoder": False, "is_decoder": True,
        },
    )  # fmt: skip
    data = tmp_path / "t.jsonl"
    data.write_text('{"text": "a b c"}\n{"text": "d e f g"}\n')
    done = effcli(
        "train", model, "--task", "causal-lm", "--data", data, "--max-steps", 1, "--out", tmp_path / "o", "--json"
    )
    missing = done.record["model"]["gradients_bytes"] - done.record["measured"]["gradients_bytes"]
    assert (missing > 0) == any("never got a gradient" in note for note in done.record["notes"])


def test_flags_that_are_not_given_leave_the_recipe_alone(distilbert: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name: {distilbert}, freeze: [embeddings]}}\ndata: {{text_columns: [b]}}\n"
        "optim: {name: sgd, args: {momentum: 0.5}}\nloop: {gradient_checkpointing: true, accum: 3}\n"
    )
    data = tmp_path / "d.csv"
    data.write_text("a,b,label\none two,three four,0\nfive six,seven,1\n")
    spec = effcli("train", "--recipe", recipe, "--data", data, "--accum", 2, "--dry-run", "--json").record["spec"]
    assert spec["model"]["freeze"] == ["embeddings"]
    assert spec["data"]["text_columns"] == ["b"]
    assert spec["optim"]["args"] == {"momentum": 0.5}
    assert spec["loop"]["gradient_checkpointing"] is True
    assert spec["loop"]["accum"] == 2


@pytest.mark.parametrize("optim", DEMONSTRATIONS)
def test_the_demonstration_runs_with_every_optimizer(optim: str, tmp_path: Path) -> None:
    done = effcli("train", "--optim", optim, "--limit-rows", 40, "--max-steps", 1, "--out", tmp_path / "o", "--json")
    assert done.record["measured"]["tensors"] == done.record["optimizer"]["tensors"]
    assert done.record["baselines"]["majority_accuracy"] == pytest.approx(0.6)


def test_the_demonstration_runs_with_relative_steps() -> None:
    assert effcli("train", "--optim", "adafactor", "--optim-arg", "relative_step=true", "--dry-run").code == 0


@pytest.mark.usefixtures("without_plan")
def test_the_same_seed_gives_the_same_run_and_another_one_another(distilbert: Path, tmp_path: Path) -> None:
    common = ("train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--max-steps", 2, "--json")
    losses = [
        [line["loss"] for line in effcli(*common, "--seed", seed, "--out", tmp_path / name).record["history"]]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert losses[0] == losses[1] != losses[2]


def test_piped_output_is_plain_and_fits(distilbert: Path, data: Path, tmp_path: Path) -> None:
    common = ("train", distilbert, "--data", data, "--max-steps", 2, "--logging-steps", 1)
    done = effcli(*common, "--out", tmp_path / "o")
    assert done.code == 0
    assert not {"\x1b", "\r"} & set(done.stdout + done.stderr)
    assert [line[:10] for line in done.stderr.splitlines()][-2:] == ["update 1/2", "update 2/2"]
    assert "NVML" in done.stdout


def test_more_than_one_process_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = effcli("train", "--out", tmp_path / "o")
    assert done.code == 2
    assert "WORLD_SIZE" in done.error


def test_relative_steps_and_a_schedule_exclude_each_other(distilbert: Path) -> None:
    spec = pipeline.resolve_spec(
        {
            "optim": {"name": "adafactor", "args": {"relative_step": True}},
            "loop": {"scheduler": "linear"},
            "model": {"name": str(distilbert)},
        }
    )
    with pytest.raises(UsageError, match="sets its own learning rate"):
        pipeline.plan(spec, progress=QuietProgress())
