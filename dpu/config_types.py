"""What the parts of the service's configuration are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from meshfusion.jbof.sizes import parse_size_bytes

MAX_SECONDS = 86_400


def _absolute_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("must be a path")
    if "\0" in str(value):
        raise ValueError("a path cannot hold a NUL character")
    path = Path(value)
    if not path.is_absolute():
        raise ValueError("must be an absolute path, since a service has no telling working directory")
    return path


SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]
AbsolutePath = Annotated[Path, BeforeValidator(_absolute_path)]
Fraction = Annotated[float, Field(gt=0, le=1)]
FreeFraction = Annotated[float, Field(ge=0, le=0.5)]
DriveWrites = Annotated[float, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class ConfigModel(BaseModel):
    # Strict: "yes" is not a bool and "5" is not a number, so that a slip shows instead of being guessed at.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
