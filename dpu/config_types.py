"""What the parts of the service's configuration are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from meshfusion.jbof.errors import FieldValueError
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


def _absolute_paths(value: object) -> tuple[Path, ...]:
    if not isinstance(value, list | tuple):
        return (_absolute_path(value),)
    if not value:
        raise FieldValueError("names nothing", "name one path or more, or remove it")
    paths = []
    for each in value:
        try:
            paths.append(_absolute_path(each))
        except ValueError as error:
            raise ValueError(f"{str(each)!r}: {error}") from error
    twice = [str(path) for i, path in enumerate(paths) if path in paths[:i]]
    if twice:
        raise FieldValueError(f"names {twice[0]} twice", "name each drive once")
    return tuple(paths)


def _whole_mebibytes(value: int) -> int:
    if value < 1 << 20 or value % (1 << 20):
        raise FieldValueError("is not a whole number of MiB", "write for example 500MiB")
    return value


SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]
AbsolutePath = Annotated[Path, BeforeValidator(_absolute_path)]
# One path, or a list of different ones.
AbsolutePaths = Annotated[tuple[Path, ...], BeforeValidator(_absolute_paths)]
# As SPDK counts rates.
RateBytes = Annotated[int, BeforeValidator(parse_size_bytes), AfterValidator(_whole_mebibytes)]
Fraction = Annotated[float, Field(gt=0, le=1)]
FreeFraction = Annotated[float, Field(ge=0, le=0.5)]
DriveWrites = Annotated[float, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class ConfigModel(BaseModel):
    # Strict: "yes" is not a bool and "5" is not a number, so that a slip shows instead of being guessed at.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_below_means_the_defaults(cls, value: Any) -> Any:
        """``medium:`` with nothing but comments below it is null in YAML."""
        return {} if value is None else value
