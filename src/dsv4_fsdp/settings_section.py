"""The base of every section of a configuration: frozen, and nothing in it is ever ignored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    """One section: an unknown key is an error, and so are inf and nan, which are never meant."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
