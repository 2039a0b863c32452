"""Write effcli/catalogue/shapes.jsonl: the parameter shapes of every catalogue model with the heads people fine-tune.

Run by `make catalogue` after models.json or the version of transformers changed; a test holds the file true.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig

from effcli.catalogue import lookup as catalogue
from effcli.models.shapes import meta_shapes
from effcli.models.tasks import default_task, head_for, own_task, tasks_of
from effcli.shapes import from_json, mark_num_labels, to_json

FOLDER = Path(catalogue.__file__).parent
USUAL = ("classification", "causal-lm", "masked-lm", "seq2seq", "token-classification", "question-answering")
FIRST, SECOND = 2, 3
"""Two numbers of labels; a dimension that follows them is the number of labels."""


def config_of(name: str) -> PretrainedConfig:
    """Return the configuration of a catalogue model."""
    facts = json.loads((FOLDER / catalogue.MODELS).read_text(encoding="utf-8"))[name]
    return AutoConfig.for_model(**copy.deepcopy(facts["config"]))


def tasks_kept(config: PretrainedConfig) -> list[str]:
    """Return the tasks whose shapes are kept: the default, the checkpoint's own, the usual ones that it has."""
    usual = [task for task in USUAL if task in tasks_of(config)]
    if default_task(config) != "causal-lm" and "causal-lm" in usual:
        usual.remove("causal-lm")  # encoders and encoder-decoders can be decoders, but nobody fine-tunes them so
    return list(dict.fromkeys([default_task(config), str(own_task(config)), *usual]))


def folded(name: str, config: PretrainedConfig, task: str) -> dict[str, Any]:
    """Return the folded shapes of one head, the number of labels as a word."""
    if not head_for(task).counts_labels:
        return to_json(meta_shapes(config, task, name=name))
    first, second = (to_json(meta_shapes(config, task, name=name, num_labels=n)) for n in (FIRST, SECOND))
    return mark_num_labels(first, second, FIRST)


def lines() -> Iterator[str]:
    """Yield the lines of the file: an index, then one line per model and task."""
    index: dict[str, Any] = {}
    rows: list[str] = []
    for name in json.loads((FOLDER / catalogue.MODELS).read_text(encoding="utf-8")):
        config = config_of(name)
        for task in tasks_kept(config):
            values = folded(name, config, task)
            rows.append(_compact({"model": name, "task": task, **values}))
            if task == own_task(config):
                count = from_json(values, num_labels=config.num_labels).num_parameters
                index[name] = {"own_task": task, "default_task": default_task(config), "num_parameters": count}
    yield _compact({"transformers": transformers.__version__, "models": index})
    yield from rows


def _compact(values: dict[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))


if __name__ == "__main__":
    (FOLDER / catalogue.SHAPES).write_text("\n".join(lines()) + "\n", encoding="utf-8")
