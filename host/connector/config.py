"""The connector's own configuration: ``kv_connector_extra_config`` of the engine, validated whole.

Unknown keys, wrong types and impossible values are all reported at once, each with its field, value and fix.
"""

from __future__ import annotations

import difflib
import enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from meshfusion.dpu.api.address import parse_address
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.sizes import parse_size_bytes

_EXACTLY_ONE = "give exactly one of `pool: {path: /dir}` (embedded) and `service: unix:///path` (shared service)"


def _pool_path(value: Any) -> Any:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("must be the path of a directory")
    return Path(value)


def _service_address(value: str) -> str:
    try:
        parse_address(value)
    except ConfigError as error:
        raise ValueError(f"{error.message}. {error.next_step}") from error
    return value


SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]


class OnUnsupported(enum.Enum):
    """What to do when something is not known to be right (rule 6)."""

    REFUSE = "refuse"
    SERVE_WITHOUT_CACHE = "serve_without_cache"


class _Model(BaseModel):
    # Strict: "yes" is no bool and true is no size, so that a slip shows instead of being guessed at.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EmbeddedPool(_Model):
    """A pool inside the engine process. Made when it does not exist."""

    path: Annotated[Path, BeforeValidator(_pool_path)] = Field(description="directory of the pool")
    size: SizeBytes = Field(default=4 << 30, ge=32 << 20, description="bytes on disk when it is made; default 4GiB")
    segment_size: SizeBytes = Field(default=64 << 20, ge=1 << 20, description="bytes of a segment; default 64MiB")


class ConnectorConfig(_Model):
    """Exactly one of ``pool`` (embedded) and ``service`` (a running meshfusion service)."""

    pool: EmbeddedPool | None = Field(default=None, description="embedded pool")
    service: Annotated[str, AfterValidator(_service_address)] | None = Field(
        default=None, description="address of the service: unix:///path or host:port"
    )
    on_unsupported: OnUnsupported = Field(
        default=OnUnsupported.REFUSE, strict=False, description="refuse to start, or serve_without_cache, loudly"
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
    load_threads: int = Field(default=4, ge=1, le=64, description="threads that read, copy and prove units")
    direct_io: bool = Field(default=True, description="O_DIRECT where it works")
    load_always: bool = Field(
        default=False, description="load even when recomputing is estimated to be faster (for measurements)"
    )

    @model_validator(mode="after")
    def _one_pool(self) -> ConnectorConfig:
        if (self.pool is None) == (self.service is None):
            raise ValueError(_EXACTLY_ONE)
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
        problems = error.errors()
        lines = [_explain(problem, extra_config) for problem in problems]
        # The model's own check runs only once every field is right; all problems are to be told at once.
        is_told = any(not problem["loc"] for problem in problems)
        if not is_told and (extra_config.get("pool") is None) == (extra_config.get("service") is None):
            lines.append(f"(top level): {_EXACTLY_ONE}")
        raise ConfigError(
            "kv_connector_extra_config cannot be used:\n" + "\n".join(f"  - {line}" for line in lines),
            next_step="correct these fields; `mfctl config check --connector FILE` tries a configuration",
        ) from None


def _explain(problem: Any, extra_config: dict[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path) or "(top level)"
    if problem["type"] == "extra_forbidden":
        model: type[BaseModel] = EmbeddedPool if path[0] == "pool" and len(path) > 1 else ConnectorConfig
        near = difflib.get_close_matches(path[-1], list(model.model_fields), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known keys: " + ", ".join(model.model_fields)
        return f"{name}: unknown key; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    value = "" if problem["type"] == "missing" or not path else f" (got {_given(problem, extra_config)!r})"
    return f"{name}: {message}{value}"


def _given(problem: Any, extra_config: dict[str, Any]) -> Any:
    """The value as the user wrote it: a size is turned into a number before it is judged."""
    value: Any = extra_config
    for part in problem["loc"]:
        if not isinstance(value, dict) or part not in value:
            return problem["input"]
        value = value[part]
    return value
