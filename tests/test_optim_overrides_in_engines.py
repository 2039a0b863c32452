"""8-bit settings and overrides from the command line to the measured state, alike in the three engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file

from effcli import pipeline
from effcli.errors import InterruptedRunError
from effcli.measure.optimizer_size import inspect_optimizer
from effcli.optim import registry
from effcli.report.progress import QuietProgress
from effcli.spec import OptimSpec
from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder, untimed
from tests.jobs import ENGINES, ONE_FAST_ENGINE, run_job, tiny_model

pytestmark = pytest.mark.usefixtures("without_plan")

BARE, EMBEDDINGS_KEPT, ALL_32_BIT = 295_648, 702_096, 1_115_664
CASES = {
    "bare": ({}, BARE),
    "embeddings in 32 bit": ({"keep_32bit": ["embed"]}, EMBEDDINGS_KEPT),
    "nothing is large enough": ({"min_8bit_size": 100_000}, ALL_32_BIT),
    "32 bits for all": ({"optim_bits": 32}, ALL_32_BIT),
    "overrides": ({"overrides": {"embed": {"optim_bits": 32, "lr": 1e-5, "beta2": 0.9}}}, EMBEDDINGS_KEPT),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "tiny_distilbert", TINY_DISTILBERT)


def flags(folder: Path, tmp_path: Path, out: str, engine: str, **optim: object) -> dict:
    data = csv_file(tmp_path / "d.csv", 8)
    return {
        "model": {"name": str(folder)},
        "data": {"train": str(data)},
        "optim": {"name": "adam8bit", "lr": 1e-3, **optim},
        "loop": {"batch_size": 4, "epochs": 1, "engine": engine},
        "output": {"out": str(tmp_path / out)},
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def upstreams_manager_is_empty() -> bool:
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    return not (manager.pid2config or manager.index2config or manager.module_weight_config_triple)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_estimated_state_is_the_measured_one_to_the_byte_in_any_order_of_runs(
    engine: str, folder: Path, tmp_path: Path
) -> None:
    ends: dict[str, list] = {case: [] for case in CASES}
    there_and_back = [*CASES, "embeddings in 32 bit", "bare"]
    for turn, case in enumerate(there_and_back):
        optim, num_bytes = CASES[case]
        spec = pipeline.resolve_spec(flags(folder, tmp_path, str(turn), engine, **optim))
        record = pipeline.train(spec, progress=QuietProgress())
        assert record.optimizer.state_bytes == record.measured.optimizer_state_bytes == num_bytes
        assert record.optimizer.tensors == record.measured.tensors
        ends[case].append(([line.loss for line in record.history], weights(tmp_path / str(turn))))
        assert upstreams_manager_is_empty()
    for case in there_and_back[-2:]:
        (losses, first), (again, second) = ends[case]
        assert losses == again
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_override_means_the_same_update_and_rate_in_every_engine(engine: str) -> None:
    entry = registry.find("adam8bit")
    outcomes = []
    for name in ("pytorch", engine):
        rates: list[dict[str, float]] = []
        kept = []

        def make(groups, kept=kept, rates=rates):
            spec = OptimSpec(
                name="adam8bit", lr=1e-3, min_8bit_size=256, keep_32bit=("classifier",),
                overrides={"embed": {"lr": 1e-5, "beta1": 0.5}},
            )  # fmt: skip
            kept.append(entry.build(groups, registry.resolve_hyper(entry, spec)))
            kept[0].register_step_pre_hook(
                lambda optimizer, *_: rates.append({n: g["lr"] for g in optimizer.param_groups for n in g["names"]})
            )
            return kept[0]

        outcome = run_job(
            name, "classification", num_rows=16, batch_size=4, accum=1, make_optimizer=make,
            model=tiny_model("classification"),
        )  # fmt: skip
        assert [step["distilbert.embeddings.word_embeddings.weight"] for step in rates] == pytest.approx(
            [1e-5, 0.75e-5, 0.5e-5, 0.25e-5]
        )
        assert [step["classifier.weight"] for step in rates] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
        assert outcome.rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
        outcomes.append((outcome.losses, inspect_optimizer(kept[0]).by_parameter))
    assert outcomes[1][0] == pytest.approx(outcomes[0][0], rel=1e-6)
    assert outcomes[1][1] == outcomes[0][1]


@pytest.mark.parametrize("engine", ONE_FAST_ENGINE)
def test_a_resumed_run_keeps_its_overrides(engine: str, folder: Path, tmp_path: Path) -> None:
    optim = {
        "keep_32bit": ["position"],
        "min_8bit_size": 5000,
        "overrides": {"word_embeddings": {"lr": 1e-5, "min_8bit_size": 100}, "q_lin": {"optim_bits": 32}},
    }
    progress = QuietProgress()
    whole = pipeline.train(pipeline.resolve_spec(flags(folder, tmp_path, "a", engine, **optim)), progress=progress)
    spec = pipeline.resolve_spec(flags(folder, tmp_path, "b", engine, **optim))
    with pytest.raises(InterruptedRunError):
        pipeline.train(spec, progress=progress, stop_after_updates=1)
    rest = pipeline.train(pipeline.resolve_spec({}, resume_from=str(tmp_path / "b")), progress=progress, resume=True)
    assert rest.spec["optim"] == whole.spec["optim"]
    assert untimed(rest.history) == untimed(whole.history)
    assert rest.measured.tensors == rest.optimizer.tensors == whole.measured.tensors
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_command_line_takes_them_all_and_says_what_is_in_8_bit(folder: Path, tmp_path: Path) -> None:
    done = effcli(
        "train", folder, "--data", csv_file(tmp_path / "d.csv"), "--optim", "adam8bit", "--max-steps", 2, "--json",
        "--min-8bit-size", 64, "--keep-32bit", "position", "--override", "word:lr=1e-5,beta2=0.98",
        "--override", "q_lin:is_sparse=true", "--out", tmp_path / "o",
    )  # fmt: skip
    record = done.record
    assert record["spec"]["optim"]["overrides"] == {"word": {"lr": 1e-5, "beta2": 0.98}, "q_lin": {"is_sparse": True}}
    assert record["measured"]["tensors"] == record["optimizer"]["tensors"]
    (eight_bit,) = (note for note in record["notes"] if "in 8 bit" in note)
    assert "the state of 38 of 40 tensors" in eight_bit
    assert "fewer than 64 elements (--min-8bit-size) or are kept in 32 bit by name" in eight_bit
    assert sum("is_sparse" in note and "no effect" in note for note in record["notes"]) == 1
    assert all(note in done.stderr for note in (eight_bit, "is_sparse"))


def test_a_model_of_small_layers_saves_nothing_and_is_told_why(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "small", TINY_DISTILBERT, vocab_size=64, dim=63, n_heads=1, hidden_dim=64)
    records = {
        optim: effcli(
            "train", folder, "--data", csv_file(tmp_path / "d.csv"), "--optim", optim, "--dry-run", "--json"
        ).record
        for optim in ("adamw", "adam8bit")
    }
    eight_bit, adamw = records["adam8bit"]["optimizer"], records["adamw"]["optimizer"]
    assert eight_bit["state_bytes"] == adamw["state_bytes"] - 4 * 40  # torch's step takes 4 bytes per tensor
    assert "qmap1" not in eight_bit["tensors"]
    (note,) = (note for note in records["adam8bit"]["notes"] if "in 8 bit" in note)
    assert "0 of 40 tensors (0.0 % of the elements)" in note
    assert "saves 0.0 % of its memory" in note
    assert "fewer than 4,096 elements" in note


def test_a_paged_optimizer_says_that_a_cpu_does_not_page(folder: Path, tmp_path: Path) -> None:
    done = effcli(
        "train", folder, "--data", csv_file(tmp_path / "d.csv"), "--optim", "paged-adamw8bit", "--max-steps", 2,
        "--out", tmp_path / "o", "--json",
    )  # fmt: skip
    assert done.record["measured"]["optimizer_state_bytes"] == done.record["optimizer"]["state_bytes"] == BARE
    assert sum("pages on CUDA only" in note for note in done.record["notes"]) == 1
    assert "pages on CUDA only" in done.stderr


def test_without_bitsandbytes_one_line_says_what_to_install_and_the_rest_works(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    data = csv_file(tmp_path / "d.csv")
    for optim in ("adam8bit", "paged-lion32bit"):
        done = effcli("train", folder, "--data", data, "--optim", optim, "--out", tmp_path / "o")
        assert done.code == 3
        assert "pip install bitsandbytes" in done.error
    assert not (tmp_path / "o").exists()
    assert effcli("train", "--help").code == 0
    assert effcli("recipes", "list").code == 0
    assert effcli("train", folder, "--data", data, "--optim", "adafactor", "--dry-run", "--json").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--optim-arg", "amsgrad=true"), ["'adam8bit' takes no 'amsgrad'"]),
        (("--optim-arg", "percentile_clipping=5"), ["takes no 'percentile_clipping'"]),
        (("--optim-arg", "optim_bits=32"), ["--optim-bits"]),
        (("--optim-bits", "16"), ["--optim-bits", "16"]),
        (("--keep-32bit", "lm_head"), ["--keep-32bit 'lm_head' fits no trainable parameter"]),
        (("--override", "lm_head:lr=1e-5"), ["--override 'lm_head' fits no trainable parameter"]),
        (("--override", "embed:lrr=1e-5"), ["--override 'embed'", "'lrr'", "Did you mean 'lr'?"]),
        (("--override", "embed"), ["write a pattern and settings"]),
        (
            ("--override", "embed:optim_bits=8", "--keep-32bit", "word"),
            ["--override 'embed' and --keep-32bit 'word' contradict each other"],
        ),
        (("--freeze", "embed", "--keep-32bit", "embed"), ["--keep-32bit 'embed' fits no trainable parameter"]),
    ],
    ids=" ".join,
)
def test_a_misleading_flag_is_refused_in_one_line_by_a_dry_run_too(
    arguments: tuple[str, ...], words: list[str], folder: Path, tmp_path: Path
) -> None:
    done = effcli(
        "train", folder, "--data", csv_file(tmp_path / "d.csv"), "--optim", "adam8bit", "--dry-run", *arguments
    )
    assert done.code == 2
    assert all(word in done.error for word in words), done.error


def test_the_saved_recipe_repeats_the_overrides(folder: Path, tmp_path: Path) -> None:
    optim = {"overrides": {"*.q_lin.*": {"lr": 1e-5, "optim_bits": 32}}, "keep_32bit": ["embed"]}
    spec = pipeline.resolve_spec(flags(folder, tmp_path, "o", "pytorch", **optim))
    first = pipeline.train(spec, progress=QuietProgress())
    again = effcli("train", "--recipe", next((tmp_path / "o").glob("*.yaml")), "--dry-run", "--json").record
    assert again["spec"]["optim"] == json.loads(json.dumps(first.spec["optim"]))
    assert again["optimizer"]["state_bytes"] == first.measured.optimizer_state_bytes
