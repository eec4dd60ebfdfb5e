"""What this release reads and writes, as a document that travels with its image, so that another release can be
compared with it without running either (docs/upgrades.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshfusion.dpu.api.types import API_VERSION
from meshfusion.dpu.store.records import INDEX_VERSION
from meshfusion.jbof.format import FORMAT_VERSION

IMAGE_LABEL: Final = "io.meshfusion.formats"
"""Of the image's configuration (OCI); its value is :func:`own_formats_text`."""

READS_MEDIUM: Final = (FORMAT_VERSION,)
READS_INDEX: Final = (INDEX_VERSION,)
_Version = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class Formats(_Strict):
    """Of one release. ``medium``, ``index``, ``api``: what it writes and speaks; ``reads_*``: what it opens."""

    format: Literal[1] = 1
    version: str = Field(min_length=1, max_length=100)
    medium: _Version
    index: _Version
    api: _Version
    reads_medium: list[_Version] = Field(min_length=1)
    reads_index: list[_Version] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Difference:
    """``what``: of the formats in the table of docs/upgrades.md. ``blocks_forward``: the new release cannot open the
    pool; ``blocks_back``: the former one could not open it afterwards."""

    what: str
    former: int
    new: int
    blocks_forward: bool
    blocks_back: bool


def own_formats_text(version: str) -> str:
    """The value of IMAGE_LABEL. ``version``: of the service, as it tells it itself."""
    own = Formats(
        version=version,
        medium=FORMAT_VERSION,
        index=INDEX_VERSION,
        api=API_VERSION,
        reads_medium=list(READS_MEDIUM),
        reads_index=list(READS_INDEX),
    )
    return json.dumps(own.model_dump(), sort_keys=True)


def parse_formats(text: str) -> Formats | None:
    """None for what is no such document: what is unknown is not taken for compatible."""
    try:
        return Formats.model_validate_json(text)
    except ValidationError:
        return None


def differences(former: Formats, new: Formats) -> tuple[Difference, ...]:
    """Of the pool that ``former`` has served and ``new`` is to serve. The API is none of it: engines attach anew."""
    named = (
        Difference(
            "medium", former.medium, new.medium,
            former.medium not in new.reads_medium, new.medium not in former.reads_medium,
        ),
        Difference(
            "index", former.index, new.index, former.index not in new.reads_index, new.index not in former.reads_index
        ),
    )  # fmt: skip
    return tuple(found for found in named if found.blocks_forward or found.blocks_back)
