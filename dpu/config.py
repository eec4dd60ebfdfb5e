"""The service's configuration file: its model, and reading it so that all problems are told at once."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from meshfusion.dpu.api.address import is_same_place, parse_address
from meshfusion.dpu.api.doors import Address
from meshfusion.dpu.api.tenant import DEFAULT_TENANT
from meshfusion.dpu.config_access import AccessList, AuditConfig, TlsConfig
from meshfusion.dpu.config_encryption import EncryptionConfig
from meshfusion.dpu.config_exports import HEARTBEATS_OF_A_KEY, ExportsConfig, exports_of
from meshfusion.dpu.config_listen import ListenAddresses
from meshfusion.dpu.config_pool import without_effect
from meshfusion.dpu.config_surroundings import Surroundings
from meshfusion.dpu.config_telemetry import TelemetryConfig
from meshfusion.dpu.config_tenants import MAX_TENANTS, TenantName, pools_problems
from meshfusion.dpu.config_types import (
    MAX_SECONDS,
    AbsolutePath,
    AbsolutePaths,
    ConfigModel,
    DriveWrites,
    Fraction,
    FreeFraction,
    RateBytes,
    Seconds,
    SizeBytes,
)
from meshfusion.dpu.encryption.note import KeyPlace
from meshfusion.dpu.yaml_document import FieldPath, YamlDocument, read_yaml
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError, describe_errors, misspelt
from meshfusion.jbof.errors import ConfigError, FieldValueError
from meshfusion.jbof.pool_addresses import MAX_DRIVE_NUMBER

MAX_FILE_BYTES = 1 << 20


class PoolConfig(ConfigModel):
    """Which pool is served."""

    path: AbsolutePath = Field(description="Directory of the pool.", examples=["/var/lib/meshfusion/pool"])
    create: bool = Field(
        default=False, description="Create the pool when it does not exist; needs size.", examples=[True]
    )
    size: SizeBytes | None = Field(
        default=None,
        description="Size of a pool to be created; with several drives, of the data on each.",
        examples=["4GiB"],
    )
    segment_size: SizeBytes | None = Field(
        default=None,
        description="Unit of reclaim of a new pool; without it 64MiB, or 1/2048 of its size where that is more.",
        examples=["64MiB"],
    )
    data_path: AbsolutePaths | None = Field(
        default=None,
        description="Block device or file for the data of a new pool, when it shall not lie in the pool's directory. "
        "For several drives a list, [/dev/nvme1n1, /dev/nvme2n1]; later ones: mfctl jbof add.",
        examples=["/dev/nvme1n1"],
    )
    encryption: EncryptionConfig | None = None

    @model_validator(mode="after")
    def _only_devices_are_encrypted(self) -> PoolConfig:
        if self.encryption is not None and self.create and self.data_path is None:
            raise FieldValueError(
                "is needed with encryption: a file in the pool's directory cannot be encrypted",
                "name a block device for each drive, or remove encryption",
                field="data_path",
            )
        return self


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


class LimitsConfig(ConfigModel):
    """How much hosts read and write; only with target: spdk."""

    read_bytes_per_s: RateBytes | None = Field(
        default=None,
        description="Most that all hosts together read from each drive of the pool in a second, in whole MiB.",
        examples=["2GiB"],
    )
    write_bytes_per_s: RateBytes | None = Field(
        default=None, description="The same of what they write.", examples=["500MiB"]
    )


def _bdevs_in_the_clear(field: str) -> FieldValueError:
    return FieldValueError(
        "names what SPDK has already, beside encryption, which is the kernel's and which SPDK would pass by",
        "remove it, so that an aio bdev is made of each encrypted drive; or remove encryption and name a crypto bdev",
        field=field,
    )


class TenantPoolConfig(ConfigModel):
    """One of several pools, and whose it is."""

    tenants: list[TenantName] = Field(
        min_length=1,
        max_length=MAX_TENANTS,
        description="Whose engines use this pool; who is named here can read what the others named here have stored.",
        examples=["[red]"],
    )
    pool: PoolConfig
    medium: MediumConfig = MediumConfig()
    limits: LimitsConfig = LimitsConfig()
    bdevs: dict[Annotated[int, Field(ge=0, le=MAX_DRIVE_NUMBER)], str] = Field(
        default_factory=dict,
        description="With target: spdk, the bdevs that are there already, by the numbers of this pool's drives.",
        examples=["{0: lvs/red}"],
    )

    @model_validator(mode="after")
    def _named_bdevs_are_not_encrypted(self) -> TenantPoolConfig:
        if self.bdevs and self.pool.encryption is not None:
            raise _bdevs_in_the_clear("bdevs")
        return self


class DrivesConfig(ConfigModel):
    """How the pool's drives are watched."""

    check_interval_s: Seconds = Field(default=5.0, description="How often each drive is looked at.")
    probation_s: Seconds = Field(
        default=30.0, description="A drive that came back is used after this time; with each return within a day twice."
    )
    drain_s: Seconds = Field(default=600.0, description="A drive that is drained is emptied in this time.")


class LogConfig(ConfigModel):
    """What the service logs, and where."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error."
    )
    format: Literal["text", "json"] = Field(default="text", description="text, or json: one object a line.")
    file: AbsolutePath | None = Field(
        default=None,
        description="File for the log, made with mode 0640; when it is moved away, a new one is made. Without it the "
        "log goes to standard error, and under systemd to the journal.",
        examples=["/var/log/meshfusion/meshfusion.log"],
    )


class ServiceConfig(ConfigModel):
    """The whole file."""

    listen: ListenAddresses = Field(
        description="Where engines connect: unix:///path (only this user can connect), a loopback host:port (every "
        "user of the machine can), or any other with tls and access or tokens_file. Or several: "
        "[unix:///run/meshfusion/meshfusion.sock, 10.0.0.1:7700], where callers on the socket need nothing to show.",
        examples=["unix:///run/meshfusion/meshfusion.sock"],
    )
    pool: PoolConfig | None = None
    pools: dict[str, TenantPoolConfig] | None = Field(
        default=None,
        description="Instead of pool and medium: a pool of its own for each tenant, by names of your choice.",
        examples=["red"],
    )
    tls: TlsConfig | None = None
    access: AccessList | None = Field(
        default=None,
        description="Who callers' certificates stand for: a common or alternative name, a role (engine, operator, "
        "read-only), and a tenant.",
        examples=["[{subject: engine-1, role: engine, tenant: default}]"],
    )
    tokens_file: AbsolutePath | None = Field(
        default=None,
        description="File of bearer tokens' digests, mode 0600, see mfctl token create; with it or access, callers "
        "must say who they are.",
        examples=["/etc/meshfusion/tokens.yaml"],
    )
    audit: AuditConfig | None = None
    exports: ExportsConfig | None = None
    medium: MediumConfig = MediumConfig()
    leases: LeaseConfig = LeaseConfig()
    drives: DrivesConfig = DrivesConfig()
    stop_grace_s: Seconds = Field(
        default=10.0,
        description="Asked to stop (SIGTERM), the service waits so long for engines to end what they have open; a "
        "second signal stops it at once. For longer: mfctl service drain.",
    )
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _engines_and_monitors_have_places_of_their_own(self) -> ServiceConfig:
        telemetry = self.telemetry.listen
        if telemetry is not None and any(is_same_place(parse_address(telemetry), each) for each in self.addresses):
            raise FieldValueError(
                f"{telemetry} is where engines connect, too", "use another port or socket", field="telemetry.listen"
            )
        return self

    @model_validator(mode="after")
    def _a_named_bdev_is_not_encrypted(self) -> ServiceConfig:
        spdk = None if self.exports is None else self.exports.spdk
        if self.pool is not None and self.pool.encryption is not None and spdk is not None and spdk.named_bdevs:
            raise _bdevs_in_the_clear("exports.spdk.bdev" if spdk.bdev is not None else "exports.spdk.bdevs")
        return self

    @model_validator(mode="after")
    def _keys_live_for_many_heartbeats(self) -> ServiceConfig:
        """A host learns of its new key with a heartbeat; until then it cannot connect anew."""
        lifetime_s = None if self.exports is None else self.exports.key_lifetime_s
        least_s = HEARTBEATS_OF_A_KEY * self.leases.heartbeat_s
        if lifetime_s is not None and lifetime_s < least_s:
            raise FieldValueError(
                f"{lifetime_s:g} is less than {HEARTBEATS_OF_A_KEY} times leases.heartbeat_s = "
                f"{self.leases.heartbeat_s:g}, and with each heartbeat only an engine learns of its new key",
                (f"use {least_s:g} to {MAX_SECONDS}, or " if least_s <= MAX_SECONDS else "")
                + f"lower leases.heartbeat_s to at most {lifetime_s / HEARTBEATS_OF_A_KEY:g}",
                field="exports.key_lifetime_s",
            )
        return self

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Of ``listen``."""
        return tuple(map(parse_address, self.listen))

    def medium_of(self, name: str) -> MediumConfig:
        """Of the pool that is served under that name, "" for the only one."""
        if self.pools is None:
            assert not name, f"there are no pools, and so none called {name}"
            return self.medium
        return self.pools[name].medium

    @property
    def served(self) -> tuple[ServedPool, ...]:
        """The pools, of which there is one or more."""
        if self.pools is None:
            assert self.pool is not None, "checked with the file"
            return (ServedPool("", frozenset({DEFAULT_TENANT}), self.pool, self.medium, self.exports, None),)
        return tuple(
            ServedPool(
                name, frozenset(one.tenants), one.pool, one.medium, exports_of(self.exports, one.bdevs), one.limits
            )
            for name, one in self.pools.items()
        )


@dataclass(frozen=True, slots=True)
class ServedPool:
    """``name``: "" for the only one of a service without ``pools``. ``limits`` None: not this service's affair."""

    name: str
    tenants: frozenset[str]
    pool: PoolConfig
    medium: MediumConfig
    exports: ExportsConfig | None
    limits: LimitsConfig | None

    @property
    def place(self) -> KeyPlace | None:
        """Of its key and headers; None: it shall not be encrypted."""
        return None if self.pool.encryption is None else self.pool.encryption.place

    @property
    def notes(self) -> tuple[str, ...]:
        """What is configured for a pool that exists already, and so has no effect."""
        return tuple(f"pools.{self.name}.{note}" if self.name else note for note in notes_on_pool(self.pool))


def load_service_config(path: Path) -> ServiceConfig:
    """Read and check the file at ``path``, and that the directories it names exist.

    Raises :class:`~meshfusion.jbof.config_problems.ConfigProblemsError` that lists every problem, or
    :class:`~meshfusion.jbof.errors.ConfigError` when the file is no readable YAML at all.
    """
    return _checked(read_config_file(path), str(path), closely=False)[0]


def notes_on_pool(pool: PoolConfig) -> tuple[str, ...]:
    """What is configured for a pool that exists already, and so has no effect."""
    segment_bytes = pool.segment_size if "segment_size" in pool.model_fields_set else None
    return without_effect(pool.path, size_bytes=pool.size, segment_bytes=segment_bytes, data_paths=pool.data_path or ())


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


def examine_service_config(path: Path, document: YamlDocument) -> tuple[ServiceConfig, tuple[str, ...]]:
    """As :func:`load_service_config` on what :func:`read_config_file` read, and as far as can be told without starting
    the service: will its pool open, or find room to be made, and is its target here? With what the service would start
    with, but not be whole."""
    return _checked(document, str(path), closely=True)


def _checked(document: YamlDocument, name: str, *, closely: bool) -> tuple[ServiceConfig, tuple[str, ...]]:
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
    problems += [
        ConfigProblem(".".join(at), problem, fix, value, document.line_of(at))
        for at, value, problem, fix in pools_problems(document.data, meant, closely=closely)
    ]
    surroundings = Surroundings(document, meant, closely=closely)
    surroundings.look()
    problems += surroundings.problems
    if problems or config is None:
        raise ConfigProblemsError(name, tuple(problems))
    return config, surroundings.warnings
