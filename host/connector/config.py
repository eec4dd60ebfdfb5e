"""The connector's own configuration: ``kv_connector_extra_config`` of the engine, validated whole.

Unknown keys, wrong types and impossible values are all reported at once, each with its field, value and fix.
"""

from __future__ import annotations

import difflib
import enum
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from meshfusion.jbof.errors import ConfigError

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)?\s*$", re.IGNORECASE)
_UNIT_BYTES = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def _size_bytes(value: Any) -> Any:
    if isinstance(value, str):
        found = _SIZE.match(value)
        if not found:
            raise ValueError("must be a size such as 4GiB, 512MiB or a number of bytes")
        return int(float(found[1]) * _UNIT_BYTES[(found[2] or "B").lower()])
    return value


SizeBytes = Annotated[int, BeforeValidator(_size_bytes)]


class OnUnsupported(enum.Enum):
    """What to do when something is not known to be right (rule 6)."""

    REFUSE = "refuse"
    SERVE_WITHOUT_CACHE = "serve_without_cache"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class EmbeddedPool(_Model):
    """A pool inside the engine process. Made when it does not exist."""

    path: Path = Field(description="directory of the pool")
    size: SizeBytes = Field(default=4 << 30, ge=32 << 20, description="bytes on disk when it is made; default 4GiB")
    segment_size: SizeBytes = Field(default=64 << 20, ge=1 << 20, description="bytes of a segment; default 64MiB")


class ConnectorConfig(_Model):
    """Exactly one of ``pool`` (embedded) and ``service`` (a running meshfusion service)."""

    pool: EmbeddedPool | None = Field(default=None, description="embedded pool")
    service: str | None = Field(default=None, description="address of the service: unix:///path or host:port")
    on_unsupported: OnUnsupported = Field(
        default=OnUnsupported.REFUSE, description="refuse to start, or serve_without_cache, loudly"
    )
    weights_id: str | None = Field(
        default=None, description="a name you vouch for in place of the weights digest (dummy or remote weights)"
    )
    force_load_failure_policy: bool = Field(
        default=False, description="accept a kv_load_failure_policy other than recompute"
    )
    chunk_min_bytes: SizeBytes = Field(
        default=1 << 20, ge=4096, le=1 << 30, description="blocks are grouped into chunks of at least this size"
    )
    lookup_deadline_ms: float = Field(
        default=20.0, gt=0, le=10_000, description="a lookup that takes longer counts as a miss"
    )
    save_queue: SizeBytes = Field(
        default=256 << 20, ge=1 << 20, description="engine memory that saves may keep pinned; more is dropped"
    )
    load_threads: int = Field(default=2, ge=1, le=64, description="threads that read, copy and prove units")
    direct_io: bool = Field(default=True, description="O_DIRECT where it works")
    load_always: bool = Field(
        default=False, description="load even when recomputing is estimated to be faster (for measurements)"
    )

    @model_validator(mode="after")
    def _one_pool(self) -> ConnectorConfig:
        if (self.pool is None) == (self.service is None):
            raise ValueError(
                "give exactly one of `pool: {path: /dir}` (embedded) and `service: unix:///path` (shared service)"
            )
        return self


def parse_connector_config(extra_config: Any) -> ConnectorConfig:
    """Validate ``kv_connector_extra_config``. Raises :class:`ConfigError` naming every problem."""
    if not isinstance(extra_config, dict):
        raise ConfigError(
            f"kv_connector_extra_config is {extra_config!r}, it must be a mapping",
            next_step='for example {"pool": {"path": "/var/lib/meshfusion/pool"}}',
        )
    try:
        return ConnectorConfig.model_validate(extra_config)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ConfigError(
            "kv_connector_extra_config cannot be used:\n" + "\n".join(f"  - {line}" for line in lines),
            next_step="correct these fields; `mfctl config check --connector FILE` tries a configuration",
        ) from None


def _explain(problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path) or "(top level)"
    if problem["type"] == "extra_forbidden":
        model: type[BaseModel] = EmbeddedPool if path[0] == "pool" and len(path) > 1 else ConnectorConfig
        near = difflib.get_close_matches(path[-1], list(model.model_fields), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known keys: " + ", ".join(model.model_fields)
        return f"{name}: unknown key; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    value = "" if problem["type"] == "missing" or not path else f" (got {problem['input']!r})"
    return f"{name}: {message}{value}"
