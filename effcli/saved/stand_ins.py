"""What stands in for an instance of a class that is not imported."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


class SavedObject:
    """An instance of a class that was not imported: what it stored, as attributes; the class's name as its type's."""

    def take(self, state: Any) -> None:
        """Take the pickled state: a mapping, a pair of mappings (of the dict and the slots), or anything else whole."""
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                vars(self).update({name: value for name, value in (part or {}).items() if isinstance(name, str)})
        else:
            vars(self)["state"] = state


def held(name: str, attributes: dict[Any, Any]) -> Any:
    """Return a `SavedObject` of a class that is named as a pickle names it, with these attributes."""
    instance = stand_in(name, SavedObject)()
    vars(instance).update({name: value for name, value in attributes.items() if isinstance(name, str)})
    return instance


@lru_cache(maxsize=1000)
def stand_in(name: str, base: Any) -> type[Any]:
    """Return a subclass of `base` that is named as a pickle names a class, such as `torchao.optim.OptimState8bit`."""
    module, _, short = name.rpartition(".")
    return type(short or name, (base,), {"__module__": module, "__qualname__": short or name})
