"""Describes privacy mods, filters and strategies of somebody's app by class and settings.

Live objects are read, since a mod's name in the source says neither its class nor its settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

LONGEST, MOST = 200, 200
"""Maximum characters of a text, and entries of a record, that are kept of what is not tensors."""

PlainValue = bool | int | Annotated[float, Field(allow_inf_nan=False)] | str | list[str]


class DeployedPart(BaseModel):
    """Describes a mod, a filter or a strategy that a tap found in an app."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(max_length=LONGEST)
    """Import name of its class or function."""
    settings: dict[str, PlainValue] = {}
    """Public attributes that are numbers, truth values, texts, or lists of texts. Texts are cut to
    200 characters; infinite numbers and NaN are texts."""

    def number(self, key: str) -> float | None:
        """Returns the setting `key` as a finite number; None if it is missing or anything else."""
        value = self.settings.get(key)
        # To Python a truth value is an integer.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number else None  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Names the part without its module, with its settings."""
        stated = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name.rpartition('.')[2]}({stated})"


def describe_part(live: Any, extra: Mapping[str, Any] | None = None) -> DeployedPart:
    """Returns the description of a live object; `extra` settings win over its attributes."""
    # A function has a name of its own, an object that of its class.
    named = live if hasattr(live, "__qualname__") else type(live)
    given = {**getattr(live, "__dict__", {}), **(extra or {})}
    settings = {
        str(key)[:LONGEST]: plain
        for key, value in list(given.items())[:MOST]
        if not str(key).startswith("_") and (plain := _plain_setting(value)) is not None
    }
    return DeployedPart(
        name=f"{named.__module__}.{named.__qualname__}"[:LONGEST], settings=settings
    )


def plain_value(value: object) -> bool | int | float | str | None:
    """Returns a number, truth value or text as JSON can hold it; None for anything else.

    Texts are cut to 200 characters (`LONGEST`). Infinite numbers and NaN become texts.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool | int | float):
        return value
    return value[:LONGEST] if isinstance(value, str) else None


def _plain_setting(value: object) -> PlainValue | None:
    if isinstance(value, re.Pattern):
        value = value.pattern
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [each[:LONGEST] for each in value[:MOST]]
    return plain_value(value)
