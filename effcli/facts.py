"""Base of the values that make up plan and record."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Fact(BaseModel):
    """A frozen value; unknown keys of newer versions are ignored when a saved record is read."""

    model_config = ConfigDict(frozen=True, extra="ignore")
