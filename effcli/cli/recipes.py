"""`effcli recipes`: list, show, copy and check recipes. Results go to stdout as plain text, or as one JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="List, show, copy and check recipes.", no_args_is_help=True, rich_markup_mode=None)

# The library is imported inside the commands: `effcli --help` must not wait for pydantic and YAML.


@app.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the name, the purpose and the memory before activations of every recipe."""
    import json
    import textwrap

    from effcli.recipes import list_recipes
    from effcli.units import format_bytes

    recipes = list_recipes()
    if as_json:
        rows = [
            {
                "name": info.name,
                "purpose": info.purpose,
                "command": info.command,
                "memory_bytes": dict(info.memory_bytes),
                "path": str(info.path),
            }
            for info in recipes
        ]
        typer.echo(json.dumps({"command": "recipes list", "recipes": rows}, indent=2))
        return
    for info in recipes:
        total = info.memory_bytes.get("total")
        memory = f"  {format_bytes(total)} before activations" if total is not None else ""
        typer.echo(f"{info.name}{memory}")
        typer.echo(textwrap.fill(info.purpose, width=78, initial_indent="  ", subsequent_indent="  "))


@app.command()
def show(name: Annotated[str, typer.Argument(help="Name that the list shows, or a YAML file.")]) -> None:
    """Print a recipe with its comments."""
    from effcli.recipes import recipe_text

    typer.echo(recipe_text(name), nl=False)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="Name that the list shows, or a YAML file.")],
    destination: Annotated[Path, typer.Argument(help="File to write, or a folder to write into.")] = Path(),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there already.")] = False,
) -> None:
    """Copy a recipe, to edit it."""
    from effcli.recipes import copy_recipe

    typer.echo(str(copy_recipe(name, destination, overwrite=overwrite)))


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Names or YAML files; without any, every recipe.")] = None,
) -> None:
    """Check keys and values of recipes, and that the command in the header runs the recipe."""
    from effcli.recipes import check_all

    for name in check_all(names or ()):
        typer.echo(f"{name}: ok")
