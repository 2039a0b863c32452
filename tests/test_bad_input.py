"""Bad input gets one line that names the fault, the place and the way out; the exit code says what kind it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import TINY_DISTILBERT, csv_file, effcli, model_folder
from tests.forked_runs import ForkServer

CASES = [
    (("--optim", "adam9bit"), 2, ["adam9bit", "adamw", "Did you mean 'adam8bit'?"]),
    (("--engine", "torch"), 2, ["--engine", "torch", "pytorch, accelerate, trainer"]),
    (("--precision", "fp8"), 2, ["--precision", "fp8", "bf16"]),
    (("--scheduler", "linaer"), 2, ["--scheduler", "Did you mean 'linear'?"]),
    (("--accum", "0"), 2, ["--accum", "0", "1"]),
    (("--accum", "-2"), 2, ["--accum", "-2", "1"]),
    (("--accum", "two"), 2, ["--accum", "two"]),
    (("--batch-sizes", "2"), 2, ["--batch-sizes", "--batch-size"]),
    (("--lr", "nan"), 2, ["--lr"]),
    (("--optim-arg", "momentun=0.9", "--optim", "sgd"), 2, ["momentun", "Did you mean 'momentum'?"]),
    (("--optim-arg", "momentum"), 2, ["--optim-arg", "momentum"]),
    (("--optim", "sgd", "--beta1", "0.8"), 2, ["sgd", "--beta1", "momentum"]),
    (("--optim", "adamw", "--keep-32bit", "embed"), 2, ["--keep-32bit", "adam8bit"]),
    (("--optim", "adam8bit", "--keep-32bit", "no_such"), 2, ["--keep-32bit", "no_such"]),
    (("--freeze", "no_such.*"), 2, ["--freeze", "no_such"]),
    (("--freeze", "*"), 2, ["--freeze", "nothing"]),
    (("--max-length", "100"), 2, ["--max-length 100", "64"]),
    (("--label-column", "labl"), 2, ["labl", "sentence, label"]),
    (("--text-column", "txt"), 2, ["txt", "sentence, label"]),
    (("--task", "causal-lm"), 2, ["causal-lm"]),
    (("--set", "loop.acum=2"), 2, ["loop.acum", "Did you mean"]),
    (("--recipe", "no/such"), 2, ["no/such"]),
    (("--precision", "fp16"), 4, ["fp16", "CUDA", "bf16"]),
    (("--device", "cuda"), 4, ["--device cuda", "--device cpu"]),
    (("--device", "tpu"), 2, ["--device", "tpu"]),
    (("--resume",), 2, ["--resume", "--out"]),
    (("--accum", "99999999999999999999"), 2, ["--accum", "2147483647"]),
    (("--set", "optim.args=5"), 2, ["--optim-arg", "5"]),
    (("--encoding", "utf-16"), 2, ["d.csv", "utf-16", "--encoding utf-8"]),
    (("--model", "encoder/nothing"), 2, ["encoder/nothing", "no such folder"]),
    (("--data", "./none.csv"), 2, ["none.csv"]),
    (("--model", "./no/such/dir"), 2, ["no/such/dir"]),
    (("--model", "someone/no-such-model"), 8, ["someone/no-such-model", "--model"]),
    (("--data", "x" * 5000), 2, ["'xxx", "too long for the name of a file or folder"]),
    (("--model", "x" * 5000), 2, ["'xxx", "too long for the name of a file or folder"]),
    (("--out", "x" * 5000), 2, ["'xxx", "too long for the name of a file or folder"]),
    (("--data", "someone/no-such-data"), 8, ["someone/no-such-data", "--data"]),
]


@pytest.mark.parametrize(("arguments", "code", "words"), CASES, ids=[" ".join(case[0])[:80] for case in CASES])
def test_a_wrong_flag_is_one_line_that_says_what_to_do(
    arguments: tuple[str, ...],
    code: int,
    words: list[str],
    distilbert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [] if "--model" in arguments else ["--model", distilbert]
    given += [] if "--data" in arguments else ["--data", csv_file(tmp_path / "d.csv")]
    before = sorted(tmp_path.rglob("*"))
    done = effcli("train", *given, *arguments)
    assert done.code == code, done.stderr
    assert all(word in done.error for word in words), done.error
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


FILES = [
    ("", ["d.csv", "empty"]),
    ("sentence,label\n", ["d.csv"]),
    ("sentence,label\na b,1\nc d,1\n", ["'label'", "1"]),
    ("sentence,label\na b,1\nc d,\n", ["d.csv", "line 3"]),
    ("sentence,target\na b,1\nc d,0\n", ["no 'label' column", "sentence, target", "--label-column target"]),
    ("sentence,label\nhello, world,1\nc d,0\n", ["d.csv", "line 2"]),
    ("a,label\n1,1\n2,0\n", ["--text-column"]),
    ("sentence,label\n ,1\n,0\n", ["text"]),
]


@pytest.mark.parametrize(("content", "words"), FILES)
def test_bad_data_is_named_with_its_place(content: str, words: list[str], distilbert: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.csv"
    data.write_text(content)
    done = effcli("train", distilbert, "--data", data, "--out", tmp_path / "o")
    assert done.code == 2, done.stderr
    assert all(word in done.error for word in words), done.error
    assert not (tmp_path / "o").exists()


def test_an_unknown_label_in_the_evaluation_data_is_named(distilbert: Path, tmp_path: Path) -> None:
    train, evaluation = tmp_path / "t.csv", tmp_path / "e.csv"
    train.write_text("sentence,label\na b,pos\nc d,neg\n")
    evaluation.write_text("sentence,label\na b,pos\nc d,neutral\n")
    done = effcli("train", distilbert, "--data", train, "--eval-data", evaluation, "--out", tmp_path / "o")
    assert done.code == 2
    assert all(word in done.error for word in ("neutral", "e.csv", "line 3", "neg", "pos")), done.error


BROKEN = [
    ({"model.safetensors": b"garbage" * 9}, {}, (), ["weights"]),
    ({"pytorch_model.bin": b"garbage" * 9}, {}, (), ["weights"]),
    ({"tokenizer.json": b"{"}, {}, (), ["tokenizer"]),
    ({"vocab.txt": b""}, {}, (), ["tokenizer"]),
    ({}, {"dim": "x"}, (), ["config.json", "dim"]),
    ({}, {"dim": 65}, (), ["config.json", "65"]),
    ({}, {"quantization_config": {"load_in_4bit": True}}, (), ["quantised"]),
    ({}, {"model_type": "albert"}, ("--gradient-checkpointing",), ["--gradient-checkpointing", "albert"]),
    ({}, {"model_type": "bert"}, ("--task", "causal-lm", "--text-column", "sentence"), ["encoder", "gpt2"]),
]


@pytest.mark.parametrize(("files", "changes", "arguments", "words"), BROKEN)
def test_model_files_that_cannot_be_used_are_named(
    files: dict[str, bytes], changes: dict[str, object], arguments: tuple[str, ...], words: list[str], tmp_path: Path
) -> None:
    model = model_folder(tmp_path / "m", TINY_DISTILBERT, **changes)
    for name, content in files.items():
        (model / name).write_bytes(content)
    done = effcli("train", model, "--data", csv_file(tmp_path / "d.csv"), *arguments, "--out", tmp_path / "o")
    assert done.code == 2, done.stderr
    assert all(word in done.error for word in words), done.error
    assert "weights_only" not in done.error
    assert not (tmp_path / "o").exists()


def test_a_last_update_that_breaks_the_model_is_a_failure(distilbert: Path, tmp_path: Path) -> None:
    done = effcli(
        "train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--eval-data", tmp_path / "d.csv",
        "--optim", "sgd", "--lr", 1e38, "--max-grad-norm", 0, "--max-steps", 1, "--out", tmp_path / "o",
    )  # fmt: skip
    assert done.code == 7, done.stderr
    assert json.loads((tmp_path / "o" / "record.json").read_text())["status"] == "failed"
    assert not (tmp_path / "o" / "model").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", ["config.json"]), ("{}", ["config.json", "model_type"]), ('{"model_type": "no-such"}', ["no-such"])],
)
def test_a_broken_configuration_is_named(content: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(content)
    done = effcli("train", tmp_path / "m", "--data", csv_file(tmp_path / "d.csv"))
    assert done.code == 2
    assert all(word in done.error for word in words), done.error


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m", TINY_DISTILBERT, quantization_config={"quant_method": "gptq", "bits": 4})
    done = effcli("train", model, "--data", csv_file(tmp_path / "d.csv"))
    assert done.code == 2
    assert "quantised checkpoint (gptq)" in done.error


@pytest.mark.parametrize("engine", ["pytorch", "accelerate", "trainer"])
def test_a_loss_that_is_not_finite_stops_the_run_and_the_record_says_so(
    engine: str, distilbert: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    done = effcli(
        "train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--optim", "sgd", "--lr", 1e30,
        "--max-grad-norm", 0, "--epochs", 5, "--engine", engine, "--out", out,
    )  # fmt: skip
    assert done.code == 7, done.stderr
    assert "update 2" in done.error
    record = json.loads((out / "record.json").read_text())
    assert record["status"] == "failed"
    assert "update 2" in record["failure"]
    assert not (out / "model").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="the super-user may write everywhere")
def test_a_read_only_folder_is_refused_before_training(distilbert: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.mkdir(mode=0o500)
    assert effcli("train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--out", out).code == 9


def test_a_folder_that_cannot_be_made_is_a_write_error(distilbert: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = effcli(
        "train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--max-steps", 1, "--out", tmp_path / "file" / "o"
    )
    assert done.code == 9
    assert "cannot be written to" in done.error


def test_a_missing_bitsandbytes_is_one_line_with_the_pip_command(
    distilbert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    done = effcli("train", distilbert, "--data", csv_file(tmp_path / "d.csv"), "--optim", "adam8bit")
    assert done.code == 3
    assert "pip install" in done.error
    assert effcli("train", distilbert, "--data", tmp_path / "d.csv", "--optim", "adamw", "--dry-run").code == 0


def test_without_a_network_a_hub_name_is_given_up_at_once(
    fresh_process: ForkServer, distilbert: Path, data: Path
) -> None:
    for given in (("--model", distilbert, "--data", "someone/some-data"), ("someone/some-model", "--data", data)):
        assert fresh_process.run("train", *given).code == 8
        (error,) = [line for line in fresh_process.log.splitlines() if line.startswith("effcli: error: ")]
        assert next(name for name in map(str, given) if name.startswith("someone/")) in error
        assert "Retrying" not in fresh_process.log


@pytest.mark.parametrize("address", ["http://localhost:99999", "http://someone:passw0rd@host:port", "http://a..b"])
def test_an_address_of_the_hub_that_is_none_is_no_fault_of_ours(address: str) -> None:
    environment = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    done = subprocess.run(
        [sys.executable, "-m", "effcli", "train", "--model", "someone/some-model", "--max-steps", "1"],
        env={**environment, "HF_ENDPOINT": address}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "effcli: error: HF_ENDPOINT is 'http://" in done.stderr
    assert "passw0rd" not in done.stderr


@pytest.mark.slow
def test_the_hub_library_that_is_loaded_later_knows_that_there_is_no_network(distilbert: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing listens there
    data = csv_file(tmp_path / "d.csv")
    code = (
        "import sys, time; from effcli.hub import go_offline_if_unreachable as probe;"
        "start = time.monotonic(); assert probe() is False; assert time.monotonic() - start < 2.5;"
        "from tests.commands import effcli;"
        "ended = [effcli('train', '--model', model, '--data', data) for model, data in"
        " ((sys.argv[1], 'someone/some-data'), ('someone/some-model', sys.argv[2]))];"
        "sys.stderr.write(''.join(end.stderr for end in ended)); print(*(end.code for end in ended))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(distilbert), str(data)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["8", "8"], done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("effcli: error: ")]
    assert len(errors) == 2
    assert "someone/some-data" in errors[0]
    assert "someone/some-model" in errors[1]
    assert "Retrying" not in done.stderr
