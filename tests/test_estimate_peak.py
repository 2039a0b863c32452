"""`effcli estimate` with a peak: which flags ask for it, what the JSON holds, budgets as checks, and wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from effcli.cli.flags import given_fields
from effcli.pipeline import resolve_estimate
from tests.commands import TINY_DISTILBERT, TINY_GPT2, Result, effcli, model_folder

TINY_VIT = {
    "model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
PHASE_KEYS = {
    "weights_bytes", "gradients_bytes", "optimizer_state_bytes", "activations_bytes", "temporaries_bytes",
    "communication_bytes", "total_bytes",
}  # fmt: skip
BASES = {"exact", "traced", "assumed", "probed"}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFFCLI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def distilbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), TINY_DISTILBERT)


@pytest.fixture(scope="module")
def estimate(distilbert: Path) -> Callable[..., Result]:
    """Return what runs `effcli estimate` on the tiny model; the same question is asked once."""

    @cache
    def run(*flags: object) -> Result:
        return effcli("estimate", distilbert, *(flags if "--optim" in flags else ("--optim", "adamw", *flags)))

    return run


SMALL = ("--batch-size", 4, "--max-length", 16)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("batch_size", "2"), ("max_length", "16"), ("accum", "2"), ("gradient_checkpointing", True), ("attn", "eager"),
        ("device", "cpu"), ("gpu", "16GiB"), ("budget", "16GiB"), ("max_grad_norm", "0"), ("timeline", "live.svg"),
    ],
)  # fmt: skip
def test_any_setting_that_matters_to_the_peak_alone_asks_for_it(parameter: str, value: object) -> None:
    spec, _ = resolve_estimate(given_fields({"model": "gpt2", parameter: value}))
    assert spec.asks_for_peak
    assert not resolve_estimate(given_fields({"model": "gpt2", "precision": "bf16", "lora_r": "8"}))[0].asks_for_peak


def test_without_such_a_setting_there_is_no_plan_and_no_torch(distilbert: Path) -> None:
    record = effcli("estimate", distilbert, "--optim", "sgd", "--precision", "bf16", "--per-layer", "--json").record
    assert record["peak"] is None
    assert {optimizer["plan"] for optimizer in record["optimizers"]} == {None}
    code = (
        "import sys\nfrom effcli import pipeline\n"
        "spec, notes = pipeline.resolve_estimate({'model': {'name': 'gpt2'}, 'optim': {'name': ['adamw']}})\n"
        "pipeline.estimate(spec)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_the_json_has_the_keys_that_others_rely_on(estimate: Callable[..., Result]) -> None:
    record = estimate("--gpu", "rtx-4090", *SMALL, "--json").record
    plan = record["optimizers"][0]["plan"]
    for phases in (plan["phases"], plan["first_phases"]):
        assert set(phases) == {"forward", "backward", "step"}
        for phase in phases.values():
            assert set(phase) == PHASE_KEYS
            assert all(isinstance(amount, int) for amount in phase.values())
            assert phase["total_bytes"] == sum(phase[key] for key in PHASE_KEYS - {"total_bytes"})
    assert set(plan["basis"].values()) <= BASES
    assert {"weights", "gradients", "optimizer_state", "activations", "temporaries", "context"} <= set(plan["basis"])
    highest = max(
        phase["total_bytes"] for phases in (plan["phases"], plan["first_phases"]) for phase in phases.values()
    )
    assert plan["peak_allocated_bytes"] == highest
    assert plan["phases"][plan["peak_phase"]]["total_bytes"] == highest or plan["peak_update"] == "first"
    assert plan["peak_reserved_bytes"] >= plan["peak_allocated_bytes"]
    assert plan["device_total_bytes"] == plan["peak_reserved_bytes"] + plan["context_bytes"]
    assert plan["fits"] == "fits"
    assert plan["largest_batch_size"] > 4
    assert plan["budget_bytes"] == record["peak"]["gpu"]["usable_bytes"]
    assert record["peak"]["batch"] == {"micro": 4, "accum": 1, "world_size": 1, "effective": 4}
    assert (record["peak"]["max_length"], record["peak"]["device"]) == (16, "cuda")
    assert set(record["peak"]["versions"]) == {"torch", "transformers"}


BOTH = ("--optim", "adamw", "--optim", "sgd", *SMALL)


def test_what_is_live_at_the_peak_adds_up_and_only_the_first_optimizer_is_tried_with_changes(
    estimate: Callable[..., Result],
) -> None:
    record = estimate(*BOTH, "--json").record
    first, second = (optimizer["plan"] for optimizer in record["optimizers"])
    for plan in (first, second):
        assert sum(part["num_bytes"] for part in plan["parts"]) == plan["peak_allocated_bytes"]
        assert plan["timeline"]
    assert first["changes"]
    assert not second["changes"]
    for change in first["changes"]:
        assert change["peak_allocated_bytes"] + change["saved_bytes"] == first["peak_allocated_bytes"]


def test_the_longest_rows_that_the_model_reads_are_the_default(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TINY_GPT2)
    assert effcli("estimate", folder, "--optim", "sgd", "--batch-size", 1, "--json").record["peak"]["max_length"] == 64


def test_the_same_question_has_the_same_answer(estimate: Callable[..., Result], distilbert: Path) -> None:
    assert estimate(*BOTH, "--json").stdout == effcli("estimate", distilbert, *BOTH, "--json").stdout


def test_a_plan_over_budget_is_printed_whole_and_ends_with_code_6(estimate: Callable[..., Result]) -> None:
    result = estimate("--budget", "100MiB", *SMALL, "--json")
    assert result.code == 6
    plan = json.loads(result.stdout)["optimizers"][0]["plan"]
    assert plan["device_total_bytes"] > plan["budget_bytes"] == 100 * 2**20
    assert plan["fits"] == "no"
    assert result.error.startswith("over the budget of 100.00 MiB: adamw needs ")


def test_a_budget_is_compared_with_all_that_the_device_must_have_to_the_byte(estimate: Callable[..., Result]) -> None:
    needs = {o["name"]: o["plan"]["device_total_bytes"] for o in estimate(*BOTH, "--json").record["optimizers"]}
    assert estimate(*BOTH, "--budget", f"{max(needs.values())}B").code == 0
    over = estimate(*BOTH, "--budget", f"{max(needs.values()) - 1}B")
    assert over.code == 6
    assert over.stdout.startswith("effcli estimate")
    assert {name for name in needs if f"{name} needs" in over.error} == {
        name for name, need in needs.items() if need == max(needs.values())
    }


def test_a_card_alone_is_no_check(estimate: Callable[..., Result]) -> None:
    result = estimate("--optim", "sgd", "--gpu", "100MiB", *SMALL)
    assert result.code == 0
    assert "verdict     no: " in result.stdout


def test_a_card_decides_with_which_kernels_a_budget_in_bytes_is_checked(estimate: Callable[..., Result]) -> None:
    record = estimate("--optim", "sgd", "--gpu", "h100-80gb", "--budget", "2GiB", *SMALL, "--json").record
    assert record["peak"]["gpu"]["name"].startswith("H100")
    assert record["optimizers"][0]["plan"]["budget_bytes"] == 2 * 2**30


def test_attention_that_runs_on_a_gpu_alone_is_predicted_as_the_flash_kernel_of_torch(
    estimate: Callable[..., Result],
) -> None:
    half = ("--optim", "sgd", "--precision", "bf16", *SMALL, "--json")
    flash, sdpa = (
        estimate("--attn", attn, *half).record["optimizers"][0]["plan"] for attn in ("flash_attention_2", "sdpa")
    )
    assert flash["phases"] == sdpa["phases"]


def test_an_old_card_without_bfloat16_is_said_to_refuse_it(estimate: Callable[..., Result]) -> None:
    result = estimate("--optim", "sgd", "--gpu", "t4", "--precision", "bf16", *SMALL)
    assert "Tesla T4 has no bfloat16" in " ".join(result.stdout.split())


def test_a_timeline_is_drawn_into_a_file_and_asks_for_the_peak(estimate: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    result = estimate("--optim", "sgd", "--timeline", path, "--max-length", 16, "--json")
    assert result.record["optimizers"][0]["plan"]["timeline"]
    assert "later updates" in path.read_text()


@pytest.mark.parametrize(
    ("flags", "code", "wording"),
    [
        (("--batch-size", "0"), 2, "--batch-size (loop.batch_size): 0 is below the smallest allowed value 1"),
        (("--accum", "two"), 2, "--accum (loop.accum): 'two' is not a whole number"),
        (("--device", "cuda:0"), 2, "--device (loop.device): 'cuda:0' is not one of cuda, cpu"),
        (("--max-length", "65"), 2, "reads at most 64 tokens"),
        (("--gpu", "rtx-4091"), 2, "--gpu: no card 'rtx-4091' is known. Did you mean rtx-4090"),
        (("--budget", "16"), 2, "--budget: memory '16'"),
        (("--budget", "0GiB"), 2, "--budget: memory '0GiB'"),
        (("--device", "cpu", "--gpu", "t4"), 2, "--device cpu with the card 't4'"),
        (("--attn", "flash_attention_2"), 2, "computes in 16 bit only"),
        (("--timeline", "live.pdf"), 2, "--timeline (output.timeline): 'live.pdf' does not end in .html, .png or .svg"),
        (("--max-grad-norm", "-1"), 2, "--max-grad-norm (loop.max_grad_norm): -1 is below"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    flags: tuple[str, ...], code: int, wording: str, estimate: Callable[..., Result]
) -> None:
    refused = estimate(*flags)
    assert refused.code == code
    assert wording in refused.error


def test_tokens_of_a_model_that_reads_none_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TINY_VIT)
    refused = effcli("estimate", folder, "--optim", "sgd", "--max-length", 16)
    assert refused.code == 2
    assert refused.error == f"--max-length 16: '{folder}' reads no text; leave it out"
    record = effcli("estimate", folder, "--optim", "sgd", "--batch-size", 2, "--json").record
    assert record["peak"]["max_length"] is None
    assert record["optimizers"][0]["plan"]["peak_allocated_bytes"] > 0


def test_the_cards_are_listed_with_their_usable_bytes_and_sources() -> None:
    text = effcli("gpus", "4090").stdout
    assert "rtx-4090" in text
    listed = effcli("gpus", "--json").record["gpus"]
    assert len(listed) > 20
    assert all(card["usable_bytes"] <= card["nominal_bytes"] for card in listed)
    refused = effcli("gpus", "voodoo")
    assert refused.code == 2
    assert "no card 'voodoo' is known" in refused.error
