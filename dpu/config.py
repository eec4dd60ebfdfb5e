"""The service's configuration file: its model, and reading it so that all problems are told at once."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from meshfusion.dpu.api.address import TcpAddress, UnixAddress, parse_address
from meshfusion.dpu.config_exports import ExportsConfig
from meshfusion.dpu.config_pool import opening_problem, pool_is_absent, room_problem, without_effect
from meshfusion.dpu.config_telemetry import TelemetryConfig
from meshfusion.dpu.config_types import (
    MAX_SECONDS,
    AbsolutePath,
    ConfigModel,
    DriveWrites,
    Fraction,
    FreeFraction,
    Seconds,
    SizeBytes,
)
from meshfusion.dpu.export.opening import check_target
from meshfusion.dpu.pool_sizes import size_problems, usual_segment_bytes
from meshfusion.dpu.yaml_document import FieldPath, YamlDocument, read_yaml
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError, as_fix, describe_errors, misspelt
from meshfusion.jbof.errors import ConfigError, FieldValueError, MeshFusionError
from meshfusion.jbof.sizes import parse_size_bytes

MAX_FILE_BYTES = 1 << 20


def _listen_address(value: str) -> str:
    try:
        address = parse_address(value)
    except ConfigError as e:
        raise FieldValueError(e.message, as_fix(e.next_step)) from e
    if isinstance(address, TcpAddress) and not address.is_loopback:
        raise ValueError("is not a loopback address, and the service has neither TLS nor authentication yet")
    return value


class PoolConfig(ConfigModel):
    """Which pool is served."""

    path: AbsolutePath = Field(description="Directory of the pool.", examples=["/var/lib/meshfusion/pool"])
    create: bool = Field(
        default=False, description="Create the pool when it does not exist; needs size.", examples=[True]
    )
    size: SizeBytes | None = Field(default=None, description="Size of a pool to be created.", examples=["4GiB"])
    segment_size: SizeBytes | None = Field(
        default=None,
        description="Unit of reclaim of a new pool; without it 64MiB, or 1/2048 of its size where that is more.",
        examples=["64MiB"],
    )
    data_path: AbsolutePath | None = Field(
        default=None,
        description="Block device or file for the data of a new pool, when it shall not lie in the pool's directory.",
        examples=["/dev/nvme1n1"],
    )


class LeaseConfig(ConfigModel):
    """How long readers and writers may be silent, and how much they may hold."""

    lease_ttl_s: Seconds = Field(default=30.0, description="A read lease lapses this long after its last renewal.")
    grant_ttl_s: Seconds = Field(default=60.0, description="A write grant expires after this time.")
    heartbeat_s: Seconds = Field(default=5.0, description="How often holders report.")
    holder_silence_s: Seconds = Field(default=15.0, description="A holder silent for longer is probed and fenced.")
    max_pinned_fraction: Fraction = Field(default=0.5, description="Most of the pool that read leases may pin.")
    quarantine_max_fraction: Fraction = Field(
        default=0.25, description="Most of the pool that writes of unknown fate may withhold before saves stop."
    )

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> LeaseConfig:
        for name in ("lease_ttl_s", "holder_silence_s"):
            value, least_s = getattr(self, name), 2 * self.heartbeat_s
            if value < least_s:
                raise FieldValueError(
                    f"{value:g} is less than twice heartbeat_s = {self.heartbeat_s:g}, and one late heartbeat would "
                    "cost a holder its leases",
                    (f"use {least_s:g} to {MAX_SECONDS}, or " if least_s <= MAX_SECONDS else "")
                    + f"lower heartbeat_s to at most {value / 2:g}",
                    field=name,
                )
        return self


class MediumConfig(ConfigModel):
    """What is written to flash, and how much."""

    policy: Literal["learned", "everything"] = Field(
        default="learned",
        description="What is written and what is kept: learned, by the uses expected for the room and the write; or "
        "everything, and what was used longest ago goes first.",
    )
    drive_writes_per_day: DriveWrites | None = Field(
        default=None,
        description="Most that is written to each drive in any 24 hours, as a multiple of its capacity (DWPD); without "
        "it there is no bound.",
        examples=[1.0],
    )
    free_fraction: FreeFraction = Field(
        default=0.05, description="Part of each drive's segments that is kept free ahead of need."
    )


class DrivesConfig(ConfigModel):
    """How the pool's drives are watched."""

    check_interval_s: Seconds = Field(default=5.0, description="How often each drive is looked at.")
    probation_s: Seconds = Field(
        default=30.0, description="A drive that came back is used after this time; with each return within a day twice."
    )
    drain_s: Seconds = Field(default=600.0, description="A drive that is drained is emptied in this time.")


class LogConfig(ConfigModel):
    """What the service logs to its standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error."
    )
    format: Literal["text", "json"] = Field(default="text", description="text, or json: one object a line.")


class ServiceConfig(ConfigModel):
    """The whole file."""

    listen: Annotated[str, AfterValidator(_listen_address)] = Field(
        description="Where engines connect: unix:///path (only this user can connect) or a loopback host:port "
        "(every user of the machine can).",
        examples=["unix:///run/meshfusion/meshfusion.sock"],
    )
    pool: PoolConfig
    exports: ExportsConfig | None = None
    medium: MediumConfig = MediumConfig()
    leases: LeaseConfig = LeaseConfig()
    drives: DrivesConfig = DrivesConfig()
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _engines_and_monitors_have_places_of_their_own(self) -> ServiceConfig:
        address = parse_address(self.listen)
        is_any_port = isinstance(address, TcpAddress) and address.port == 0
        if self.telemetry.listen is not None and parse_address(self.telemetry.listen) == address and not is_any_port:
            raise FieldValueError(
                f"{self.telemetry.listen} is where engines connect, too", "use another", field="telemetry.listen"
            )
        return self


def load_service_config(path: Path) -> ServiceConfig:
    """Read and check the file at ``path``, and that the directories it names exist.

    Raises :class:`~meshfusion.jbof.config_problems.ConfigProblemsError` that lists every problem, or
    :class:`~meshfusion.jbof.errors.ConfigError` when the file is no readable YAML at all.
    """
    return check_service_config(read_config_file(path), str(path))


def notes_on_pool(pool: PoolConfig) -> tuple[str, ...]:
    """What is configured for a pool that exists already, and so has no effect."""
    segment_bytes = pool.segment_size if "segment_size" in pool.model_fields_set else None
    return without_effect(pool.path, size_bytes=pool.size, segment_bytes=segment_bytes)


def read_config_file(path: Path) -> YamlDocument:
    """As :func:`~meshfusion.dpu.yaml_document.read_yaml`, but never waits for a pipe nor reads without end."""
    try:
        found = path.stat()
    except OSError:
        return read_yaml(path)  # which says what is wrong
    if stat.S_ISDIR(found.st_mode):
        return read_yaml(path)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path}: is not a regular file", next_step="Name a file that holds the configuration.")
    if found.st_size > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path}: has {found.st_size} bytes, more than the {MAX_FILE_BYTES} of any configuration",
            next_step="Name a file that holds the configuration.",
        )
    return read_yaml(path)


def check_service_config(document: YamlDocument, name: str, *, closely: bool = False) -> ServiceConfig:
    """Check a parsed file; ``name`` is what messages call it.

    ``closely``: as far as can be told without starting the service, will its pool open, or find room to be made, and is
    its target here?
    """
    if not isinstance(document.data, dict):
        found = "empty" if document.data is None else f"a {type(document.data).__name__}"
        raise ConfigError(
            f"{name}: must be a mapping of keys to values, but it is {found}",
            next_step="Start from the output of `mfctl config example`.",
        )
    problems = [
        ConfigProblem(
            ".".join(map(str, at)), "stands twice in the file", "remove one of them", line=document.line_of(at)
        )
        for at in document.duplicates
    ]
    config: ServiceConfig | None = None
    meant: frozenset[FieldPath] = frozenset()
    try:
        config = ServiceConfig.model_validate(document.data)
    except ValidationError as e:
        problems += describe_errors(e, ServiceConfig, document)
        meant = misspelt(e, ServiceConfig)
    problems += _surroundings(document, meant, closely=closely)
    if problems or config is None:
        raise ConfigProblemsError(name, tuple(problems))
    return config


def _surroundings(document: YamlDocument, meant: frozenset[FieldPath], *, closely: bool) -> list[ConfigProblem]:
    """What the machine lacks. Read from the raw data, so that it is told along with the model's problems; nothing is
    told to be missing that a misspelt key stands for, see ``meant``."""
    problems: list[ConfigProblem] = []

    def add(field: tuple[str, ...], value: object, problem: str, fix: str) -> None:
        problems.append(ConfigProblem(".".join(field), problem, fix, value, document.line_of(field)))

    for field in (("listen",), ("telemetry", "listen")):
        listen = _value_at(document.data, field)
        socket_dir = _socket_directory(listen)
        problem = directory_problem(socket_dir) if socket_dir is not None else None
        if problem:
            add(field, listen, f"the socket's directory {socket_dir} {problem[0]}", problem[1])
    exports = document.data.get("exports")
    if closely and isinstance(exports, dict) and exports.get("target") == "nvmet":
        try:
            check_target("nvmet")
        except MeshFusionError as error:
            add(("exports", "target"), "nvmet", error.message, as_fix(error.next_step))
    pool = document.data.get("pool")
    if not isinstance(pool, dict):
        return problems
    create, has_path = pool.get("create") is True, _is_absolute(pool.get("path"))
    if has_path and not pool_is_absent(Path(pool["path"])):
        found = opening_problem(Path(pool["path"])) if closely else None
        if found:
            add(("pool", "path"), pool["path"], found.problem, found.fix)
        return problems
    unfit = unfit_sizes(pool) if create else []
    for name, value, why, fix in unfit:
        add(("pool", name), value, why, fix)
    if not has_path:
        return problems
    path: Path = Path(pool["path"])
    data_path: Any = pool.get("data_path")
    if not create:
        if ("pool", "create") in meant or not isinstance(pool.get("create", False), bool):
            return problems  # what was meant is not known
        fix = f"set pool.create: true and pool.size, or run: mfctl pool create {path} --size 4GiB"
        add(("pool", "path"), pool["path"], "there is no pool", fix)
        return problems
    if pool.get("size") is None and ("pool", "size") not in meant:
        add(("pool", "size"), None, "is needed to create the pool", "add for example size: 4GiB")
    folder = path if path.is_dir() else path.parent
    problem = directory_problem(folder)
    if problem:
        add(("pool", "path"), pool["path"], f"the directory {folder} {problem[0]}", problem[1])
    if _is_absolute(data_path) and not _exists(Path(data_path)):
        add(("pool", "data_path"), data_path, "does not exist", "name an existing block device or file, or remove it")
    if closely and not unfit and not any(p.field in ("pool.path", "pool.data_path", "pool.size") for p in problems):
        size_bytes = size_or_none(pool.get("size"))
        data = Path(data_path) if _is_absolute(data_path) else None
        found = room_problem(path, size_bytes, data) if size_bytes is not None else None
        if found:
            add(("pool", found.field), pool.get(found.field), found.problem, found.fix)
    return problems


def size_or_none(value: object) -> int | None:
    """The size that ``value`` stands for; None when it is none, which the model tells."""
    try:
        return parse_size_bytes(value)
    except ValueError:
        return None


def unfit_sizes(pool: dict[Any, Any], *, default_size: int | None = None) -> list[tuple[str, object, str, str]]:
    """What creating the pool would refuse; ``(field, value, problem, fix)``. Sizes that are none are told elsewhere."""
    size = size_or_none(pool.get("size", default_size))
    asked = pool.get("segment_size")
    if size is None:
        return []
    segment_size = usual_segment_bytes(size) if asked is None else size_or_none(asked)
    if segment_size is None:
        return []
    return [(p.field, pool.get(p.field), p.problem, p.fix) for p in size_problems(size, segment_size)]


def directory_problem(path: Path) -> tuple[str, str] | None:
    """Why nothing can be created in ``path``, and the fix; None when it can."""
    if not _exists(path):
        return "does not exist", f"mkdir -p {path}"
    if not path.is_dir():
        return "is not a directory", "choose another path"
    if not os.access(path, os.W_OK | os.X_OK):
        return "is not writable for this user", f"sudo chown {os.getuid()} {path}, or choose another path"
    return None


def _value_at(data: Any, field: tuple[str, ...]) -> Any:
    """None where there is none."""
    for name in field:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _socket_directory(listen: object) -> Path | None:
    try:
        address = parse_address(listen) if isinstance(listen, str) else None
    except ConfigError:
        return None
    return address.path.parent if isinstance(address, UnixAddress) else None


def _is_absolute(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # the name is too long, or a parent may not be entered
