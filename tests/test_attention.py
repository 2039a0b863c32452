"""`--attn`: which attention a model computes with, and what is refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.distilbert.modeling_distilbert import DistilBertModel

from effcli.errors import DeviceError, MissingExtraError
from effcli.models.attention import check_attention_runs
from tests.commands import TINY_DISTILBERT, TINY_GPT2, csv_file, effcli, model_folder

TINY_BLOOM = {"model_type": "bloom", "vocab_size": 1000, "hidden_size": 64, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_training_builds_the_model_with_the_attention_that_was_asked_for(
    attn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()
    forward = DistilBertModel.forward

    def noting(model: DistilBertModel, *args: Any, **kwargs: Any) -> Any:
        used.add(model.config._attn_implementation)
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(DistilBertModel, "forward", noting)
    data, model = csv_file(tmp_path / "rows.csv"), model_folder(tmp_path / "model", TINY_DISTILBERT)
    result = effcli("train", model, "--data", data, "--attn", attn, "--max-steps", 1, "--out", tmp_path / "out")
    assert result.code == 0, result.stderr
    assert used == {attn}
    assert f"attn: {attn}" in (tmp_path / "out" / "recipe.yaml").read_text()


def test_a_model_without_that_attention_names_the_one_it_has(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", TINY_BLOOM)
    data = csv_file(tmp_path / "rows.csv")
    refused = effcli("train", model, "--data", data, "--attn", "sdpa", "--max-steps", 1, "--dry-run")
    assert refused.code == 2
    assert refused.error == f"--attn sdpa: '{model}' (bloom) has no such attention; use --attn eager"


@pytest.mark.parametrize(
    ("flags", "code", "wording"),
    [
        (("--attn", "flash_attention_2"), 2, "--attn flash_attention_2 computes in 16 bit only; add --precision bf16"),
        (("--attn", "flash_attention_2", "--precision", "bf16"), 4, "needs a CUDA device; use --attn sdpa"),
        (("--attn", "spda"), 2, "'spda' is not one of sdpa, eager, flash_attention_2. Did you mean 'sdpa'?"),
    ],
)
def test_an_attention_that_cannot_run_is_refused_before_anything_is_read(
    flags: tuple[str, ...], code: int, wording: str, tmp_path: Path
) -> None:
    refused = effcli("train", model_folder(tmp_path, TINY_GPT2), "--data", "nowhere.csv", *flags, "--device", "cpu")
    assert refused.code == code
    assert wording in refused.error


def test_a_missing_flash_attention_package_says_what_to_install() -> None:
    with pytest.raises(MissingExtraError, match=r"--attn flash_attention_2 .* pip install flash-attn"):
        check_attention_runs("flash_attention_2", "cuda:0")
    with pytest.raises(DeviceError):
        check_attention_runs("flash_attention_2", "cpu")
    check_attention_runs("sdpa", "cpu")
