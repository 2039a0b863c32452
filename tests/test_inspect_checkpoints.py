"""`inspect` on real checkpoints of Trainer, accelerate and effcli: the live bytes, and never a wrong name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from effcli.measure.optimizer_size import OptimizerSize, inspect_optimizer
from tests.checkpoints import Trap
from tests.commands import effcli
from tests.tiny_models import set_gradients, tiny_distilbert, tiny_gpt2, tiny_mixtral, tiny_t5, tiny_vit

EMBEDDINGS_OF_WORDS = "distilbert.embeddings.word_embeddings.weight"
EMBEDDINGS = {EMBEDDINGS_OF_WORDS, "distilbert.embeddings.position_embeddings.weight"}


class Rows(torch.utils.data.Dataset):
    """Four rows of eight tokens with two labels."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(8) + index, "attention_mask": torch.ones(8).long(), "labels": index % 2}


def trained(model: torch.nn.Module, out: Path, optim: str = "adamw_torch") -> tuple[Path, torch.optim.Optimizer]:
    """Return the checkpoint that Trainer writes after two updates, and its optimizer."""
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=2, per_device_train_batch_size=2, save_steps=2, optim=optim, use_cpu=True,
        report_to=[], disable_tqdm=True, weight_decay=0.01,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    with torch.compiler.set_stance("force_eager"):  # compiling torchao's step takes tens of seconds
        trainer.train()
    return out / "checkpoint-2", trainer.optimizer


def accelerated(
    model: torch.nn.Module, make: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer], out: Path, **how: Any
) -> tuple[Path, torch.optim.Optimizer]:
    """Return the folder that accelerate writes after two updates, and the optimizer."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            set_gradients(model)
            optimizer.step()
    accelerator.save_state(str(out), **how)
    accelerator.free_memory()
    return out, optimizer


def live_size(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerSize:
    return inspect_optimizer(optimizer, names={param: name for name, param in model.named_parameters()})


def check_amounts(record: dict[str, Any], live: OptimizerSize) -> None:
    """Check bytes and elements of all, by state name, and their number."""
    assert record["state_bytes"] == live.state_bytes > 0
    assert record["state_elements"] == live.state_elements
    assert record["num_tensors"] == live.num_tensors
    assert {key: (amount["elements"], amount["bytes"]) for key, amount in record["tensors"].items()} == {
        key: (amount.elements, amount.bytes) for key, amount in live.tensors.items()
    }


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.filterwarnings("ignore:.*does not implement _stable_hash_for_caching")
@pytest.mark.parametrize(
    ("optim", "name", "state_bytes"),
    [
        ("adamw_torch", "adamw", 1_115_824),
        ("adafactor", "adafactor", 19_280),
        ("adamw_bnb_8bit", "adamw8bit", 702_096),
        ("paged_adamw_8bit", "paged-adamw8bit", 702_096),
        ("adamw_torch_8bit", "adamw8bit-ao", 324_480),
        ("adamw_torch_4bit", "adamw4bit", None),
    ],
)
def test_a_checkpoint_of_trainer(optim: str, name: str, state_bytes: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_distilbert()
    folder, optimizer = trained(model, tmp_path / "out", optim)
    live = live_size(model, optimizer)
    for path in (folder, folder / "optimizer.pt", tmp_path / "out"):
        record = effcli("inspect", path, "--json").record
        check_amounts(record, live)
        assert record["by_parameter"] == live.by_parameter
        assert record["optimizer"] == name, record["resemblance"]
        assert state_bytes in (None, record["state_bytes"])
        assert record["alternatives"][0] == {"name": name, "state_bytes": live.state_bytes}
    shapes = {name: list(param.shape) for name, param in model.named_parameters()}
    assert {each["name"]: each["shape"] for each in record["parameters"]} == shapes
    whole = {each["name"] for each in record["parameters"] if "Trainer's rule for embeddings" in str(each["reason"])}
    assert whole == (EMBEDDINGS if "bnb" in optim or "paged" in optim else set())


def bitsandbytes_adam(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from bitsandbytes.optim import Adam8bit, GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()  # one for the process: Trainer leaves its overrides there
    return Adam8bit(params)


def torchao_adam(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params)


def transformers_adafactor(params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params)


@pytest.mark.filterwarnings("ignore:.*does not implement _stable_hash_for_caching")
@pytest.mark.parametrize(
    ("make", "name", "state_bytes"),
    [
        (torch.optim.AdamW, "adamw", 1_115_824),
        (transformers_adafactor, "adafactor", 19_280),
        (bitsandbytes_adam, "adam8bit", 295_648),
        (torchao_adam, "adamw8bit-ao", 324_480),
    ],
)
def test_a_state_that_accelerate_saved(
    make: Callable[..., torch.optim.Optimizer], name: str, state_bytes: int, distilbert: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = tiny_distilbert()
    folder, optimizer = accelerated(model, make, tmp_path / "state")
    live = live_size(model, optimizer)
    assert live.state_bytes == state_bytes
    names = [name for name, _ in model.named_parameters()]

    record = effcli("inspect", folder, "--json").record
    check_amounts(record, live)
    assert name in (record["optimizer"], *record["also_fits"])
    labelled = [each["name"] for each in record["parameters"]]
    by_position = {names[int(label)] if label.isdecimal() else label for label in labelled}
    assert by_position == set(names)
    assert {label for label in labelled if not label.isdecimal()} == {
        EMBEDDINGS_OF_WORDS, "classifier.weight", "classifier.bias",
    }  # fmt: skip
    assert any("--model names a model" in note for note in record["notes"])

    record = effcli("inspect", folder / "optimizer.bin", "--model", distilbert, "--json").record
    check_amounts(record, live)
    assert record["by_parameter"] == live.by_parameter


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_t5, tiny_vit, tiny_mixtral])
@pytest.mark.parametrize("safe", [True, False])
def test_names_of_other_architectures_are_right(make: Callable[[], Any], safe: bool, tmp_path: Path) -> None:
    model = make()
    folder, optimizer = accelerated(model, torch.optim.Adagrad, tmp_path / "state", safe_serialization=safe)
    model.config.save_pretrained(folder)
    record = effcli("inspect", folder, "--json").record
    assert record["by_parameter"] == live_size(model, optimizer).by_parameter


def test_names_come_from_a_model_in_several_files(tmp_path: Path) -> None:
    model = tiny_distilbert()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    set_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    torch.save({"epoch": 1, "optimizer_state_dict": optimizer.state_dict()}, tmp_path / "training.ckpt")
    record = effcli("inspect", tmp_path / "training.ckpt", "--json").record
    assert record["by_parameter"] == live_size(model, optimizer).by_parameter


def test_a_head_for_other_labels_than_the_model_was_made_for_keeps_its_names(distilbert: Path, tmp_path: Path) -> None:
    model = tiny_distilbert()
    model.classifier = torch.nn.Linear(64, 7)
    folder, optimizer = accelerated(model, torch.optim.Adagrad, tmp_path / "state")
    record = effcli("inspect", folder, "--model", distilbert, "--json").record
    assert record["by_parameter"] == live_size(model, optimizer).by_parameter


def test_of_any_parameters_that_were_trained_none_gets_a_wrong_name(tmp_path: Path) -> None:
    rng = random.Random(0)
    num_named = 0
    for number in range(12):
        model = tiny_distilbert()
        share = rng.choice((0.1, 0.5, 0.9))
        chosen = {name: param for name, param in model.named_parameters() if rng.random() < share}
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        optimizer = torch.optim.Adagrad(chosen.values())
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        record = effcli("inspect", folder, "--json").record
        names = list(chosen)
        for label, num_bytes in record["by_parameter"].items():
            if not label.isdecimal():
                position = names.index(label)
                assert num_bytes == 4 * chosen[label].numel() + 4
                assert str(position) not in record["by_parameter"]
                num_named += 1
        assert len(record["by_parameter"]) == len(chosen)
    assert num_named > 20


def save(folder: Path, *models: torch.nn.Module, trained: Iterable[torch.nn.Parameter]) -> dict[str, Any]:
    """Return the inspection of an optimizer's state beside models as accelerate saves them."""
    from safetensors.torch import save_file

    folder.mkdir()
    for index, model in enumerate(models):
        save_file(model.state_dict(), folder / f"model{f'_{index}' if index else ''}.safetensors")
    optimizer = torch.optim.AdamW(trained)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return effcli("inspect", folder, "--json").record


def names_in(record: dict[str, Any]) -> set[str]:
    return {each["name"] for each in record["parameters"]}


def test_of_several_models_only_the_one_with_the_shapes_of_the_state_gives_names(tmp_path: Path) -> None:
    actor = torch.nn.ModuleDict({"a": torch.nn.Linear(7, 5), "b": torch.nn.Linear(5, 3)})
    critic = torch.nn.ModuleDict({"c": torch.nn.Linear(7, 5), "d": torch.nn.Linear(5, 1)})
    twin = torch.nn.ModuleDict({"e": torch.nn.Linear(7, 5), "f": torch.nn.Linear(5, 3)})
    both = save(tmp_path / "both", actor, critic, trained=critic.parameters())
    assert names_in(both) == {"c.weight", "c.bias", "d.weight", "d.bias"}
    twins = save(tmp_path / "twins", actor, twin, trained=twin.parameters())
    assert names_in(twins) == set("0123")
    assert "which of them it belongs to is not known" in twins["notes"][0]
    part = save(tmp_path / "part", actor, critic, trained=critic["d"].parameters())
    assert names_in(part) == set("01")


def test_a_shape_is_no_name_where_it_may_be_that_of_a_buffer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    model.register_buffer("scale", torch.ones(9))
    extra = torch.nn.Parameter(torch.ones(9))
    assert names_in(save(tmp_path / "a", model, trained=[*model.parameters(), extra])) == set("0123456")


def test_a_parameter_of_something_else_gets_no_name_of_the_model(tmp_path: Path) -> None:
    model = tiny_distilbert()
    model.save_pretrained(tmp_path)
    extra = torch.nn.Parameter(torch.zeros_like(model.classifier.weight))
    optimizer = torch.optim.AdamW([extra, *model.distilbert.transformer.layer[0].parameters()])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert "classifier.weight" not in names_in(effcli("inspect", tmp_path, "--json").record)


def test_of_heads_with_as_many_parameters_none_is_guessed(tmp_path: Path) -> None:
    from transformers import DistilBertForQuestionAnswering

    model = DistilBertForQuestionAnswering(tiny_distilbert().config)
    (tmp_path / "model").mkdir()
    model.config.save_pretrained(tmp_path / "model")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    known = names_in(effcli("inspect", tmp_path / "optimizer.pt", "--model", tmp_path / "model", "--json").record)
    true = {name for name, _ in model.named_parameters()}
    assert known - true == {"36", "37"}
    assert true - known == {"qa_outputs.weight", "qa_outputs.bias"}


def test_the_same_shapes_in_another_order_get_no_names(tmp_path: Path) -> None:
    model = tiny_distilbert()
    model.save_pretrained(tmp_path)
    backwards = list(model.parameters())[::-1]
    torch.save(torch.optim.Adagrad(backwards).state_dict(), tmp_path / "optimizer.pt")
    record = effcli("inspect", tmp_path, "--json").record
    named = {each["name"]: tuple(each["shape"]) for each in record["parameters"] if not each["name"].isdecimal()}
    assert named == {
        name: tuple(param.shape)
        for name, param in model.named_parameters()
        if name in (EMBEDDINGS_OF_WORDS, "classifier.weight", "classifier.bias")
    }


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_have_the_names_that_they_train_under(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_distilbert()
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    targets = ["q_lin", "lin1", "word_embeddings"]
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=targets))
    folder, optimizer = trained(model, tmp_path / "out")
    record = effcli("inspect", folder, "--json").record
    assert record["by_parameter"] == live_size(model, optimizer).by_parameter
    assert len(record["by_parameter"]) == 2 * 5 + 4
    assert record["optimizer"] == "adamw"


@pytest.mark.usefixtures("without_plan")
def test_a_run_of_effcli_has_names_and_says_its_optimizer(distilbert: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = effcli(
        "train", distilbert, "--data", data, "--optim", "adamw8bit", "--keep-32bit", "embed", "--max-steps", 2,
        "--save-every", 1, "--out", out, "--json",
    ).record  # fmt: skip
    record = effcli("inspect", out, "--json").record
    assert record["format"] == "effcli checkpoint"
    assert record["state_bytes"] == run["measured"]["optimizer_state_bytes"] == 702_096
    assert record["state_elements"] == run["measured"]["optimizer_state_elements"]
    assert record["optimizer"] == "adamw8bit"
    assert "progress.json names adamw8bit" in record["resemblance"]
    whole = {
        each["name"] for each in record["parameters"] if str(each["reason"]).startswith("kept in 32 bit by an override")
    }
    assert whole == EMBEDDINGS


def test_the_settings_of_trainer_are_read_without_running_them(tmp_path: Path) -> None:
    folder, _ = trained(tiny_distilbert(), tmp_path / "out")
    marker = tmp_path / "marker"
    settings = torch.load(folder / "training_args.bin", weights_only=False)
    settings.optim, settings.trap = "adam", Trap(marker)
    torch.save(settings, folder / "training_args.bin")
    record = effcli("inspect", folder, "--json").record
    assert record["optimizer"] == "adamw"
    assert record["resemblance"].endswith("but training_args.bin names adam")
    settings.optim = "some_other"
    torch.save(settings, folder / "training_args.bin")
    record = effcli("inspect", folder, "--json").record
    assert record["resemblance"].endswith("but training_args.bin names some_other, which is not listed")
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_recognised(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = tiny_distilbert()
    optimizer = torch.optim.AdamW(model.parameters())
    set_gradients(model)
    optimizer.step()
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    record = effcli("inspect", tmp_path / "dcp", "--json").record
    check_amounts(record, live_size(model, optimizer))
    assert record["by_parameter"] == live_size(model, optimizer).by_parameter
    assert record["optimizer"] == "adamw"
