"""The part of the service's configuration that says how its pool's data is exported over NVMe-oF."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from meshfusion.dpu.config_types import MAX_SECONDS, AbsolutePath, ConfigModel, SizeBytes
from meshfusion.dpu.export.desired import Address
from meshfusion.dpu.export.spdk.sizing import Machine, size
from meshfusion.jbof.config_problems import as_fix
from meshfusion.jbof.errors import ConfigError, FieldValueError, MeshFusionError
from meshfusion.jbof.nvme.fabrics import check_nqn
from meshfusion.jbof.pool_addresses import MAX_DRIVE_NUMBER

MIN_KEY_LIFETIME_S = 60.0
HEARTBEATS_OF_A_KEY = 10  # at least, in its lifetime
SERVICE = 4420  # IANA's port of NVMe over Fabrics
MAX_PREFIX_CHARS = 100  # of an NQN's 223: what is behind it has its own length
_PORTAL = re.compile(r"(?P<transport>\w+)://(?P<address>\[[0-9A-Fa-f:]+\]|[^:/\[\]]+)(:(?P<service>[0-9]{1,5}))?")


def parse_portal(text: str) -> Address:
    """``rdma://10.0.0.1:4420``; an IPv6 address stands in brackets. Raises FieldValueError."""
    found = _PORTAL.fullmatch(text)
    if found is None:
        raise FieldValueError(f"{text!r} is no portal", "write for example rdma://10.0.0.1:4420")
    address = found["address"].strip("[]")
    try:
        address = str(ipaddress.ip_address(address))
        return Address(found["transport"], address, int(found["service"] or SERVICE))  # type: ignore[arg-type]
    except (ConfigError, ValueError) as error:
        problem = error.message if isinstance(error, ConfigError) else f"{address!r} is not an IP address"
        raise FieldValueError(f"{text!r}: {problem}", "write for example rdma://10.0.0.1:4420") from error


def _portal(text: str) -> str:
    address = parse_portal(text)
    if ipaddress.ip_address(address.ip).is_unspecified:
        raise FieldValueError(f"{text!r}: hosts cannot connect to this address", "name the address of a port")
    return text


def _prefix(text: str) -> str:
    try:
        check_nqn(text, what="nqn_prefix")
    except MeshFusionError as error:
        raise ValueError(error.message) from error
    if len(text) > MAX_PREFIX_CHARS or "/" in text:
        raise ValueError(f"must have at most {MAX_PREFIX_CHARS} characters and no slash")
    return text


class SpdkConfig(ConfigModel):
    """An SPDK nvmf_tgt on this machine."""

    socket: AbsolutePath = Field(description="Its JSON-RPC socket.", examples=["/var/tmp/spdk.sock"])
    memory: SizeBytes = Field(description="What nvmf_tgt was given (huge pages, or -s).", examples=["8GiB"])
    cores: int = Field(default=1, ge=1, le=1024, description="Cores in its core mask.")
    connections: int = Field(default=64, ge=1, le=65_535, description="Queues of all hosts together.")
    bdev: str | None = Field(
        default=None,
        description="The bdev that holds the pool's data, or of several drives that of drive 0; where no bdev is "
        "named, an aio bdev is made of each drive's file or device.",
        examples=["nvme0n1"],
    )
    bdevs: dict[Annotated[int, Field(ge=0, le=MAX_DRIVE_NUMBER)], str] = Field(
        default_factory=dict,
        description="Those of the pool's other drives, by their numbers.",
        examples=["{1: nvme1n1, 2: nvme2n1}"],
    )

    @model_validator(mode="after")
    def _names_bdevs_once(self) -> SpdkConfig:
        if self.bdev is not None and 0 in self.bdevs:
            raise FieldValueError("names that of drive 0 beside bdev", "name it once", field="bdevs")
        names = list(self.named_bdevs.values())
        if len(set(names)) < len(names):
            raise FieldValueError("names a bdev twice", "name one for each drive", field="bdevs")
        return self

    @property
    def named_bdevs(self) -> dict[int, str]:
        """By the drives' numbers; empty: bdevs are made of their files or devices."""
        return self.bdevs if self.bdev is None else {0: self.bdev, **self.bdevs}

    @model_validator(mode="after")
    def _memory_will_do(self) -> SpdkConfig:
        try:
            size(Machine(self.memory, self.cores, connections=self.connections))
        except ConfigError as error:
            raise FieldValueError(error.message, as_fix(error.next_step), field="memory") from error
        return self


class ExportsConfig(ConfigModel):
    """How engines reach the pool's data over NVMe-oF; without this part only engines of this machine reach it."""

    target: Literal["nvmet", "spdk"] = Field(
        description="nvmet: this machine's kernel; spdk: an nvmf_tgt.", examples=["nvmet"]
    )
    portals: list[Annotated[str, AfterValidator(_portal)]] = Field(
        min_length=1,
        max_length=64,
        description="Where the target listens, an address of each port: transport://address:port.",
        examples=['["rdma://10.0.0.1:4420"]'],
    )
    nqn_prefix: Annotated[str, AfterValidator(_prefix)] | None = Field(
        default=None,
        description="NQNs of this service begin with it and the pool's UUID; others on the target are left alone.",
        examples=["nqn.2026-11.io.meshfusion:rack7"],
    )
    authenticate: bool = Field(
        default=True,
        description="Each engine has a key of its own, and the target asks for it (DH-HMAC-CHAP). The kernel's target "
        "must be built for that (CONFIG_NVME_TARGET_AUTH).",
    )
    tcp_tls: bool = Field(
        default=False,
        description="Hosts connect over TLS 1.3 only, each with a key of its own; for tcp:// portals of an SPDK.",
    )
    key_lifetime_s: Annotated[float, Field(ge=MIN_KEY_LIFETIME_S, le=MAX_SECONDS)] | None = Field(
        default=None,
        description="An engine's key is replaced by a new one after this time (at least ten times "
        "leases.heartbeat_s), without a connection being lost; by default it stays as long as the engine does.",
        examples=[86400],
    )
    spdk: SpdkConfig | None = Field(default=None, description="Only with target: spdk.")

    @model_validator(mode="after")
    def _fits(self) -> ExportsConfig:
        if (self.target == "spdk") != (self.spdk is not None):
            problem = "is needed with target: spdk" if self.target == "spdk" else "is only for target: spdk"
            fix = "add socket and memory" if self.target == "spdk" else "remove it, or use target: spdk"
            raise FieldValueError(problem, fix, field="spdk")
        self._check_tls()
        if self.key_lifetime_s is not None and not self.authenticate:
            raise FieldValueError(
                "is for hosts that have keys, and authenticate is off",
                "remove it, or set authenticate: true",
                field="key_lifetime_s",
            )
        addresses = self.addresses
        if len(set(addresses)) < len(addresses) or len({address.transport for address in addresses}) > 1:
            raise FieldValueError(
                "must be different addresses of one transport", "remove what is there twice", field="portals"
            )
        return self

    @property
    def addresses(self) -> list[Address]:
        return [parse_portal(portal) for portal in self.portals]

    def _check_tls(self) -> None:
        if not self.tcp_tls:
            return
        if any(address.transport != "tcp" for address in self.addresses):
            raise FieldValueError(
                "is for TCP, and NVMe/RDMA has no TLS", "use tcp:// portals, or remove it", field="tcp_tls"
            )
        if self.target != "spdk":
            raise FieldValueError(
                "is not supported with target: nvmet. The kernel's target needs Linux 6.7 or later with "
                "CONFIG_NVME_TARGET_TCP_TLS (addr_tsas of a port), tlshd, and each host's key in its keyring, which "
                "this version does not set up",
                "use target: spdk, or remove it",
                field="tcp_tls",
            )
        if not self.authenticate:
            raise FieldValueError(
                "needs authenticate: the key of TLS says that a host is one of this pool's, not which one",
                "set authenticate: true",
                field="tcp_tls",
            )


def exports_of(exports: ExportsConfig | None, bdevs: dict[int, str]) -> ExportsConfig | None:
    """Those of one of several pools. ``bdevs``: of its drives; none: they are made of its files and devices."""
    if exports is None or exports.spdk is None:
        return exports
    return exports.model_copy(update={"spdk": exports.spdk.model_copy(update={"bdev": None, "bdevs": bdevs})})
