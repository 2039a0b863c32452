"""Models known offline: published counts, generated shapes against the installed transformers, names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import transformers

from effcli.catalogue import lookup as catalogue
from effcli.errors import UsageError
from effcli.models.shapes import meta_shapes
from effcli.models.tasks import default_task, own_task
from effcli.shapes import to_json
from tests.catalogue.generate import FOLDER, config_of, lines

FAMILIES = ("distilbert-base-cased", "gpt2", "google/flan-t5-small", "openai/whisper-tiny", "google/gemma-3-270m")
"""One small model each of a few families, for the tests of every day; the slow one takes all."""


def test_every_published_count_is_the_counted_one_or_the_difference_is_explained() -> None:
    models = catalogue.models()
    assert len(models) == 117
    published = [model for model in models if model.published_parameters is not None]
    assert len(published) == 89
    different = [model for model in published if model.published_parameters != model.num_parameters]
    assert [model.name for model in different if model.count_note is None] == []
    assert {model.config["model_type"] for model in different} == {"t5"}


def test_the_explained_difference_of_t5_is_exactly_one_more_head() -> None:
    for model in catalogue.matching("flan-t5"):
        head = model.config["vocab_size"] * model.config["d_model"]
        assert model.published_parameters == model.num_parameters + head


@pytest.mark.parametrize("name", FAMILIES)
def test_generated_shapes_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    config, model = config_of(name), catalogue.find(name)
    assert model is not None
    assert (model.default_task, model.own_task) == (default_task(config), own_task(config))
    for task in dict.fromkeys((model.default_task, model.own_task)):
        labels = config.num_labels
        assert catalogue.shapes(model, task, labels) == meta_shapes(config, task, name=name, num_labels=labels)


@pytest.mark.slow
def test_the_generated_file_is_what_the_installed_transformers_would_write() -> None:
    assert catalogue.transformers_version() == transformers.__version__
    assert list(lines()) == (FOLDER / catalogue.SHAPES).read_text(encoding="utf-8").splitlines()


def test_the_default_head_is_the_one_people_fine_tune() -> None:
    tasks = {name: catalogue.find(name).default_task for name in FAMILIES}  # type: ignore[union-attr]
    assert tasks == {
        "distilbert-base-cased": "classification",
        "gpt2": "causal-lm",
        "google/flan-t5-small": "seq2seq",
        "openai/whisper-tiny": "speech-seq2seq",
        "google/gemma-3-270m": "causal-lm",
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("distilbert-base-cased", "distilbert-base-cased"),
        ("distilbert/distilbert-base-cased", "distilbert-base-cased"),
        ("openai-community/GPT2", "gpt2"),
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("google-bert/bert-base-uncased", "bert-base-uncased"),
        ("t5-small", "t5-small"),
    ],
)
def test_short_and_full_names_find_a_model_in_any_case(given: str, name: str) -> None:
    found = catalogue.find(given)
    assert found is not None
    assert found.name == name


def test_names_of_nobody_find_nothing_and_a_typo_gets_a_suggestion() -> None:
    assert catalogue.find("someone/gpt2") is None
    assert catalogue.find("") is None
    assert catalogue.suggestion("distilbert-base-casd") == " Did you mean 'distilbert-base-cased'?"
    with pytest.raises(UsageError, match="no model known offline has 'zebra'"):
        catalogue.matching("zebra")


def test_a_task_that_is_not_kept_is_none_and_the_number_of_labels_sets_the_head() -> None:
    model = catalogue.find("bert-base-cased")
    assert model is not None
    assert catalogue.shapes(model, "multiple-choice", 2) is None
    shapes = catalogue.shapes(model, "token-classification", 9)
    assert shapes is not None
    assert [info.shape for info in shapes.parameters[-2:]] == [(9, 768), (9,)]


def test_the_catalogue_loads_neither_torch_nor_transformers_nor_pydantic() -> None:
    code = (
        "import sys; from effcli.catalogue import lookup as c\n"
        "c.shapes(c.find('Llama-3.1-405B'), 'causal-lm', 2)\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_folded_shapes_stay_small() -> None:
    for line in (FOLDER / catalogue.SHAPES).read_text(encoding="utf-8").splitlines()[1:]:
        values = json.loads(line)
        assert len(line) < 6_000, values["model"]
    model = catalogue.find("Llama-3.1-405B")
    assert model is not None
    shapes = catalogue.shapes(model, "causal-lm", 2)
    assert shapes is not None
    assert (len(shapes.parameters), len(to_json(shapes)["parameters"])) == (1137, 4)
