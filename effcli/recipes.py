"""Recipes: find, read, overlay, write and check YAML files that hold the sections of a `RunSpec`. No torch.

A recipe starts with a comment that names its purpose, its command and the bytes it expects before activations. Scalars
stay texts when read (YAML would make `no` false and leave `1e-4` a text); the type that the field declares decides.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effcli.errors import UsageError, nearest
from effcli.faults import unknown_key
from effcli.files import at_home, write_text
from effcli.flags import nest
from effcli.spec import RunSpec, build_spec
from effcli.yaml_text import comment, dump, is_null, parse, read_text

_PACKAGE = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")
_PURPOSE = re.compile(r"^# Purpose: *(.*)$", re.MULTILINE)
_COMMAND = re.compile(r"^# Command: *(.*)$", re.MULTILINE)
_MEMORY = re.compile(r"^# +(weights|gradients|optimizer state|total) +([0-9,]+) B\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeInfo:
    """What the header of a recipe says. `memory_bytes` maps weights, gradients, ... to bytes; empty when not stated."""

    name: str
    purpose: str
    command: str
    memory_bytes: Mapping[str, int]
    path: Path


def recipe_folder() -> Path:
    """Return the folder of the recipes: inside the package when installed, at the top of a checkout otherwise."""
    packaged = _PACKAGE / "_recipes"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "recipes"


def list_recipes() -> tuple[RecipeInfo, ...]:
    """Return what comes with the program, sorted by name."""
    files = sorted(path for suffix in _SUFFIXES for path in recipe_folder().rglob(f"*{suffix}"))
    return tuple(read_header(path) for path in files)


def read_header(path: Path) -> RecipeInfo:
    """Return what the leading comment of a recipe says; parts that it does not have are empty."""
    folder = recipe_folder()
    name = path.relative_to(folder).with_suffix("").as_posix() if path.is_relative_to(folder) else str(path)
    lines = read_text(path).splitlines()
    head = "\n".join(lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))])
    purpose, command = _PURPOSE.search(head), _COMMAND.search(head)
    memory = {part.replace(" ", "_"): int(size.replace(",", "")) for part, size in _MEMORY.findall(head)}
    return RecipeInfo(
        name=name,
        purpose=purpose[1].strip() if purpose else "",
        command=command[1].strip() if command else "",
        memory_bytes=memory,
        path=path,
    )


def find_recipe(name_or_path: str) -> Path:
    """Return the file of a recipe that is given by its name, or by the path of a YAML file.

    Raises:
        UsageError: there is no such recipe or file.
    """
    names = {info.name: info.path for info in list_recipes()}
    if name_or_path in names:
        return names[name_or_path]
    path = at_home(name_or_path)
    if path.is_file():
        return path
    if path.suffix in _SUFFIXES:
        raise UsageError(f"no recipe file '{name_or_path}'; give a YAML file, or a name from 'effcli recipes list'")
    same_end = [name for name in names if name.endswith(f"/{name_or_path}")]
    hint = f" Did you mean {' or '.join(map(repr, same_end))}?" if same_end else nearest(name_or_path, names)
    raise UsageError(f"no recipe '{name_or_path}'; 'effcli recipes list' shows all.{hint}")


def recipe_text(name_or_path: str) -> str:
    """Return a recipe as it stands in its file, comments included."""
    return read_text(find_recipe(name_or_path))


def read_recipe(name_or_path: str) -> dict[str, Any]:
    """Return the sections of a recipe as written, with texts for scalars, after checking that they are a valid spec.

    Raises:
        UsageError: unknown recipe, unreadable YAML (with its line) or a key or value that no field takes.
    """
    path = find_recipe(name_or_path)
    values = parse(recipe_text(name_or_path), str(path))
    try:
        build_spec(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    return values


def overlay(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers merged key by key; a later layer wins, an empty section changes nothing.

    Order for a run: preset of the demonstration < recipe < `--set` < flags.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            if isinstance(below, Mapping) and (value is None or isinstance(value, Mapping)):
                merged[key] = overlay(below, value or {})
            else:
                merged[key] = overlay(value) if isinstance(value, Mapping) else value
    return merged


def parse_set(text: str) -> dict[str, Any]:
    """Return the nested sections that one `--set a.b=c` means; `[x, y]` is a list where the field holds several.

    Raises:
        UsageError: there is no `=`, or no such field.
    """
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    section, _, key = dotted.partition(".")
    if not (equals and key):
        raise UsageError(f"--set '{text}': write a section, a key and a value, as in --set loop.accum=2")
    name, _, argument = key.partition(".")
    owner = RunSpec.model_fields.get(section)
    fields = getattr(owner.annotation, "model_fields", {}) if owner else {}
    if name not in fields or (argument and dotted.split(".")[:2] != ["optim", "args"]):
        raise UsageError(f"--set {unknown_key(dotted)}")
    if section == "optim" and name == "args" and argument:
        return {section: {name: {argument: value}}}
    several = isinstance(fields[name].get_default(call_default_factory=True), tuple | dict)
    if several and value.lstrip().startswith(("[", "{")):
        return nest({dotted: parse(f"value: {value}", f"--set {dotted}")["value"]})
    return nest({dotted: None if is_null(value) else value})


def write_recipe(spec: RunSpec, path: Path, header: str) -> None:
    """Write a spec with every field below `header` as a comment; the file appears whole or not at all.

    Raises:
        WriteError: the file cannot be written.
    """
    write_text(path, comment(header) + dump(spec.model_dump(mode="json")))


def copy_recipe(name_or_path: str, destination: Path, *, overwrite: bool = False) -> Path:
    """Copy a recipe to a file, or into a folder, and return where it is.

    Its command names the copy; what launches it, such as torchrun for several processes, stays.

    Raises:
        UsageError: unknown recipe, or the file is there already.
        WriteError: the file cannot be written.
    """
    source = find_recipe(name_or_path)
    target = destination / source.name if destination.is_dir() else destination
    if target.exists() and not overwrite:
        raise UsageError(f"'{target}' is there already; give another place, or --overwrite")
    text = read_text(source)
    stated = _COMMAND.search(text)
    launched, names_recipe, _ = stated[1].partition(" --recipe ") if stated else ("", "", "")
    line = f"# Command: {launched if names_recipe else 'effcli train'} --recipe {shlex.quote(str(target))}"
    write_text(target, _COMMAND.sub(lambda match: line, text, count=1))
    return target


def check(name_or_path: str) -> RunSpec:
    """Return the spec of a recipe after checking its values, and that the command in its header runs this recipe.

    Raises:
        UsageError: see `read_recipe`; or the command names another recipe.
    """
    spec = build_spec(read_recipe(name_or_path))
    info = read_header(find_recipe(name_or_path))
    words = info.command.split()
    named = words[words.index("--recipe") + 1 :][:1] if "--recipe" in words else [info.name]
    if info.path.is_relative_to(recipe_folder()) and named != [info.name]:
        raise UsageError(f"{info.path}: its command is '{info.command}'; write --recipe {info.name}")
    return spec


def check_all(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names or paths whose recipes are right; without names, those of every recipe of the program.

    Raises:
        UsageError: what is wrong with each recipe that is not right.
    """
    right, faults = [], []
    for name in names or [info.name for info in list_recipes()]:
        try:
            check(name)
            right.append(name)
        except UsageError as error:
            faults.append(str(error))
    if faults:
        raise UsageError("; ".join(faults))
    return tuple(right)
