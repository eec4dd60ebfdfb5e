"""The connector's own configuration: ``kv_connector_extra_config`` of the engine, validated whole.

Unknown keys, wrong types and impossible values are all reported at once, each with its field, value and fix.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from meshfusion.dpu.api.address import parse_address
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.tenant import DEFAULT_TENANT, check_name
from meshfusion.host.connector.config_security import FilePath, ServiceTls, client_security, security_problem
from meshfusion.host.path.path_kind import PathKind
from meshfusion.jbof.config_problems import (
    ConfigProblem,
    ConfigProblemsError,
    Document,
    FieldPath,
    Unlined,
    as_fix,
    describe_errors,
    misspelt,
)
from meshfusion.jbof.errors import ConfigError, FieldValueError
from meshfusion.jbof.nvme.key_scope import KeyScope
from meshfusion.jbof.sizes import parse_size_bytes

EXTRA_CONFIG = "kv_connector_extra_config"
_ONE_POOL = (
    "must name exactly one of pool and service",
    "give either `pool: {path: /dir}` (embedded) or `service: unix:///path` (shared service)",
)
_BLOCK_CACHED = ("block is O_DIRECT, which direct_io = false switches off", "remove direct_io, or use path: staged")
_KEYS_ELSEWHERE = (
    "of command is for targets over RDMA, and this path has none",
    "set path: rdma, or remove key_scope",
)
_TENANT_ALONE = ("is for a service, and an embedded pool is this engine's own", "remove it, or use service: instead")
_RDMA_ALONE = ("rdma needs a service that exports its pool", "use service: instead of pool:, or another path")


def _pool_path(value: Any) -> Any:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("must be the path of a directory")
    return Path(value)


def _service_address(value: str) -> str:
    try:
        parse_address(value)
    except ConfigError as error:
        raise FieldValueError(error.message, as_fix(error.next_step)) from error
    return value


def _weights_name(value: str) -> str:
    if not value.strip():
        raise FieldValueError("is empty, and names nothing", "write a name that you change whenever the weights change")
    return value


SizeBytes = Annotated[int, BeforeValidator(parse_size_bytes)]


class OnUnsupported(enum.Enum):
    """What to do when something is not known to be right (rule 6)."""

    REFUSE = "refuse"
    SERVE_WITHOUT_CACHE = "serve_without_cache"


class WantedPath(enum.Enum):
    """How bytes go between the medium and the engine's memory (:mod:`meshfusion.host.path.probe`)."""

    AUTO = "auto"
    RDMA = "rdma"
    BLOCK = "block"
    STAGED = "staged"

    @property
    def kind(self) -> PathKind | None:
        """None: the best that is possible where the data can be opened."""
        return None if self is WantedPath.AUTO else PathKind(self.value)


class WantedLayout(enum.Enum):
    """Who chooses how the engine's KV blocks lie in memory (:mod:`meshfusion.host.kv.layout_wish`)."""

    AUTO = "auto"
    ENGINE = "engine"


class _Model(BaseModel):
    # Strict: "yes" is no bool and true is no size, so that a slip shows instead of being guessed at.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EmbeddedPool(_Model):
    """A pool inside the engine process. Made when it does not exist."""

    path: Annotated[Path, BeforeValidator(_pool_path)] = Field(
        description="directory of the pool", examples=["/var/lib/meshfusion/pool"]
    )
    size: SizeBytes = Field(
        default=4 << 30, ge=32 << 20, description="bytes on disk when it is made, or a text; default 4GiB"
    )
    segment_size: SizeBytes = Field(
        default=64 << 20, ge=1 << 20, description="bytes of a segment, or a text; default 64MiB"
    )
    policy: Literal["learned", "everything"] = Field(
        default="learned",
        description="what is written and kept: learned, by the uses expected; or everything, and what was used longest "
        "ago goes first (docs/medium-policies.md)",
    )


class Audit(_Model):
    """Shadow audit (:mod:`meshfusion.host.connector.audits`). Off unless it is asked for: each audited hit is computed
    after all, and an alarm that is false would cost all hits."""

    share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        examples=[0.01],
        description="of hits, from 0 (none) to 1, that are computed all the same and compared with what is stored; one "
        "at a time, so that with 1 hits are loaded only while another one is audited",
    )
    alarms_max: int = Field(
        default=3,
        ge=1,
        description="after so many audits that found other KV than the engine computes, it serves no hits and saves "
        "nothing until it is started anew",
    )


class ConnectorConfig(_Model):
    """Exactly one of ``pool`` (embedded) and ``service`` (a running meshfusion service)."""

    pool: EmbeddedPool | None = Field(default=None, description="embedded pool")
    service: Annotated[str, AfterValidator(_service_address)] | None = Field(
        default=None,
        description="address of the service: unix:///path or host:port",
        examples=["unix:///run/meshfusion/meshfusion.sock"],
    )
    service_tls: ServiceTls | None = Field(default=None, description="TLS, for a service on another machine")
    service_token_file: FilePath | None = Field(
        default=None,
        description="file with the token to show to the service (`mfctl token create`); nobody but its owner may read "
        "it, or the group root",
        examples=["/etc/meshfusion/engine-1.token"],
    )
    tenant: Annotated[str, AfterValidator(check_name)] = Field(
        default=DEFAULT_TENANT,
        description="whose engine this is, with service: one that the service's configuration names; its hits are what "
        "engines of tenants in the same pool have stored; default default",
        examples=["red"],
    )
    path: WantedPath = Field(
        default=WantedPath.AUTO,
        strict=False,
        description="staged, block (O_DIRECT into the engine's memory), rdma (needs a service with exports), or auto: "
        "staged or block, whichever this machine does better; nothing else is tried when one is named",
    )
    key_scope: KeyScope = Field(
        default=KeyScope.REGION,
        strict=False,
        description="what a target's key to the engine's memory opens on path rdma: region (all KV memory, until the "
        "path is closed) or command (one command's blocks, until it has ended; refused where a device cannot)",
    )
    kv_layout: WantedLayout = Field(
        default=WantedLayout.AUTO,
        strict=False,
        description="auto asks the engine to lay all layers of a block side by side, where its kernels take that with "
        "pages as they are: fewer descriptors, the same chunks; engine leaves the layout to it",
    )
    on_unsupported: OnUnsupported = Field(
        default=OnUnsupported.REFUSE, strict=False, description="refuse to start, or serve_without_cache, loudly"
    )
    weights_id: Annotated[str, AfterValidator(_weights_name)] | None = Field(
        default=None, description="a name you vouch for in place of the weights digest (dummy or remote weights)"
    )
    force_load_failure_policy: bool = Field(
        default=False, description="accept a kv_load_failure_policy other than recompute"
    )
    chunk_min_bytes: SizeBytes = Field(
        default=1 << 20,
        ge=4096,
        le=1 << 30,
        description="blocks are grouped into chunks of at least this size on each rank, in bytes or as a text such as "
        "1MiB; counted on full attention groups where there are any; models with states keep the shortest chunks",
    )
    lookup_deadline_ms: float = Field(
        default=20.0, gt=0, le=10_000, description="a lookup that takes longer counts as a miss"
    )
    save_queue: SizeBytes = Field(
        default=256 << 20,
        ge=1 << 20,
        description="memory of each rank that saves may keep pinned, in bytes or as a text such as 256MiB; more is "
        "dropped",
    )
    load_threads: int = Field(default=4, ge=1, le=64, description="threads that read, copy and prove units")
    direct_io: bool = Field(default=True, description="O_DIRECT where it works")
    load_always: bool = Field(
        default=False, description="load even when recomputing is estimated to be faster (for measurements)"
    )
    audit: Audit = Field(default=Audit(), description="compare a share of hits with what is computed anew")

    @model_validator(mode="after")
    def _one_pool(self) -> ConnectorConfig:
        if (self.pool is None) == (self.service is None):
            raise FieldValueError(*_ONE_POOL)
        self._check_security()
        if self.tenant != DEFAULT_TENANT and self.service is None:
            raise FieldValueError(*_TENANT_ALONE, field="tenant")
        if self.path is WantedPath.RDMA and self.service is None:
            raise FieldValueError(*_RDMA_ALONE, field="path")
        if self.path is WantedPath.BLOCK and not self.direct_io:
            raise FieldValueError(*_BLOCK_CACHED, field="path")
        if self.key_scope is KeyScope.COMMAND and self.path is not WantedPath.RDMA:
            raise FieldValueError(*_KEYS_ELSEWHERE, field="key_scope")
        return self

    def _check_security(self) -> None:
        if self.service is None:
            for field in ("service_tls", "service_token_file"):
                if getattr(self, field) is not None:
                    raise FieldValueError("is for a service, and this is an embedded pool", "remove it", field=field)
            return
        problem = security_problem(self.security, parse_address(self.service))
        if problem is not None:
            raise problem

    @property
    def security(self) -> ClientSecurity:
        """How the service is called."""
        return client_security(self.service_tls, self.service_token_file)


def parse_connector_config(extra_config: Any) -> ConnectorConfig:
    """Validate ``kv_connector_extra_config``. Raises :class:`ConfigError` naming every problem."""
    if not isinstance(extra_config, dict):
        raise ConfigError(
            f"kv_connector_extra_config is {extra_config!r}, it must be a mapping",
            next_step='for example {"pool": {"path": "/var/lib/meshfusion/pool"}}',
        )
    config, problems = examine_connector_config(extra_config, Unlined(extra_config))
    if config is None:
        next_step = "correct these fields; `mfctl config check --connector FILE` tries a configuration"
        raise ConfigProblemsError(EXTRA_CONFIG, problems, next_step=next_step)
    return config


def examine_connector_config(
    extra_config: dict[Any, Any], document: Document, *, at: FieldPath = ()
) -> tuple[ConnectorConfig | None, tuple[ConfigProblem, ...]]:
    """``extra_config`` validated, or everything that is wrong with it; it stands in ``document`` at ``at``."""
    try:
        return ConnectorConfig.model_validate(extra_config), ()
    except ValidationError as error:
        problems = describe_errors(error, ConnectorConfig, document, at=at, root_name=EXTRA_CONFIG)
        # The model's own checks run only once every field is right; all problems are to be told at once.
        is_told = any(not entry["loc"] for entry in error.errors())
        is_meant = not misspelt(error, ConnectorConfig).isdisjoint({("pool",), ("service",)})
        if not is_told and not is_meant and (extra_config.get("pool") is None) == (extra_config.get("service") is None):
            problems.append(ConfigProblem(EXTRA_CONFIG, *_ONE_POOL, line=document.line_of(at)))
        is_alone = extra_config.get("pool") is not None and extra_config.get("service") is None
        if not is_told and not is_meant and is_alone and extra_config.get("path") == WantedPath.RDMA.value:
            field = ".".join(map(str, (*at, "path")))
            problems.append(ConfigProblem(field, *_RDMA_ALONE, "rdma", document.line_of((*at, "path"))))
        if not is_told and not is_meant:
            problems += _far_without_tls(extra_config, document, at, misspelt(error, ConnectorConfig))
        is_block = extra_config.get("path") == WantedPath.BLOCK.value
        if not is_told and is_block and extra_config.get("direct_io") is False:
            field = ".".join(map(str, (*at, "path")))
            problems.append(ConfigProblem(field, *_BLOCK_CACHED, "block", document.line_of((*at, "path"))))
        is_command = extra_config.get("key_scope") == KeyScope.COMMAND.value
        others = {way.value for way in WantedPath} - {WantedPath.RDMA.value}
        is_other = str(extra_config.get("path", WantedPath.AUTO.value)) in others
        if not is_told and is_command and is_other and ("path",) not in misspelt(error, ConnectorConfig):
            field = ".".join(map(str, (*at, "key_scope")))
            problems.append(ConfigProblem(field, *_KEYS_ELSEWHERE, "command", document.line_of((*at, "key_scope"))))
        return None, tuple(problems)


def _far_without_tls(
    extra_config: dict[Any, Any], document: Document, at: FieldPath, meant: frozenset[FieldPath]
) -> list[ConfigProblem]:
    """As the model's own check tells it; what is wrong inside ``service_tls`` it tells once its fields are right."""
    service = extra_config.get("service")
    if not isinstance(service, str) or extra_config.get("service_tls") is not None or ("service_tls",) in meant:
        return []
    try:
        problem = security_problem(client_security(None, None), parse_address(service))
    except ConfigError:
        return []
    if problem is None:
        return []
    field = ".".join(map(str, (*at, problem.field)))
    return [ConfigProblem(field, problem.problem, problem.fix, line=document.line_of((*at, "service")))]
