"""Data sets of the Hugging Face Hub, each failure told apart and told in one line."""

from __future__ import annotations

import re

from effcli.data.cache import cache_folder
from effcli.data.files import Splits, Table
from effcli.errors import DataError, UnreachableError, first_line
from effcli.hub import go_offline_if_unreachable

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*){0,2}")
FAMILIES = {
    "glue": "nyu-mll/glue",
    "super_glue": "aps/super_glue",
    "tweet_eval": "cardiffnlp/tweet_eval",
    "paws": "google-research-datasets/paws",
    "wikitext": "Salesforce/wikitext",
}
"""Data sets known by one word and a configuration, such as `glue/mrpc`, with the owner they have on the Hub now."""


def hub_names(name: str) -> tuple[tuple[str, str | None], ...]:
    """Return the (data set, configuration) pairs that `name` may mean, the likeliest first.

    The old one-word name comes second because data downloaded under it lies in the cache under it.

    Raises:
        DataError: `name` cannot be a name on the Hub.
    """
    if not HUB_NAME.fullmatch(name):
        raise DataError(
            f"'{name}' is neither a local file or folder nor a data set of the Hub; "
            "use a file such as train.csv, or a name such as glue/mrpc or owner/name"
        )
    first, *rest = name.split("/")
    if first in FAMILIES and len(rest) <= 1:
        config = rest[0] if rest else None
        return (FAMILIES[first], config), (first, config)
    if len(rest) == 2:
        return ((f"{first}/{rest[0]}", rest[1]),)
    return ((name, None),)


def load_hub(name: str) -> Splits:
    """Return all splits of a data set of the Hub, or of its copy in the local cache.

    Raises:
        UnreachableError: no network, no such data set, or one that asks for a login.
        DataError: the configuration is missing or unknown.
    """
    go_offline_if_unreachable()
    first_error: Exception | None = None
    for dataset_name, config in hub_names(name):
        try:
            return _load(name, dataset_name, config)
        except UnreachableError as error:
            first_error = first_error or error
    raise first_error or UnreachableError(f"the data set '{name}' could not be loaded")


def _load(name: str, dataset_name: str, config: str | None) -> Splits:
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        loaded = datasets.load_dataset(dataset_name, config, cache_dir=str(cache_folder()))
    except ConnectionError as error:
        raise _offline(name) from error
    except DatasetNotFoundError as error:
        raise _refused(name, str(error)) from error
    except ValueError as error:
        reason = str(error)
        if "onfig" not in reason:
            raise UnreachableError(f"the data set '{name}' could not be loaded: {first_line(error)}") from error
        listed = re.search(r"\[(.*?)\]", reason, re.DOTALL)
        known = listed.group(1).replace("'", "").replace("\n", " ") if listed else ""
        allowed = f"; it has: {known}" if known else ""
        example = known.split(",")[0].strip() or "CONFIG"
        fault = f"no configuration '{config}'" if config else "several configurations"
        base = name.removesuffix(f"/{config}")
        raise DataError(f"the data set '{base}' has {fault}{allowed}; use --data {base}/{example}") from error
    except (DatasetsError, OSError, RuntimeError) as error:
        raise UnreachableError(f"the data set '{name}' could not be loaded: {first_line(error)}") from error
    tables = {split: Table(rows=rows, name=f"{name}, split {split}") for split, rows in loaded.items()}
    return Splits(tables=tables, name=name)


def _offline(name: str) -> UnreachableError:
    return UnreachableError(
        f"'{name}' is no local path, and the Hub cannot be reached (no network, or HF_HUB_OFFLINE is set); "
        "connect, or use a local file: --data train.csv"
    )


def _refused(name: str, reason: str) -> UnreachableError:
    if "gated" in reason:
        return UnreachableError(
            f"the data set '{name}' is gated: accept its terms on its page on the Hugging Face Hub, "
            "then log in with 'hf auth login'"
        )
    return UnreachableError(
        f"the data set '{name}' was not found: there is no such file or folder here, and no such public data set on "
        "the Hugging Face Hub; check the name, or log in with 'hf auth login' if it is private"
    )
