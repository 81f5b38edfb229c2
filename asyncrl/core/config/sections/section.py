"""Base class of every section of the tree, and the kinds of values with limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
NonNegativeNumber = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Section(BaseModel):
    """A part of the tree: frozen, and closed against unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


def refuse(wanted: str, hint: str) -> PydanticCustomError:
    """Return the error of a value that is not `wanted`, and what to write instead."""
    return PydanticCustomError("refused", "{wanted}", {"wanted": wanted, "hint": hint})
