"""What a service with a given configuration needs of its pod and node; refused is what a pod could not give it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Final

from meshfusion.dpu.api.address import TcpAddress, UnixAddress, parse_address
from meshfusion.dpu.config import ServiceConfig
from meshfusion.dpu.config_exports import SpdkConfig
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError
from meshfusion.tools.k8s.names import CONFIG_DIR, CONFIG_FILE
from meshfusion.tools.mfctl.config_model import asks_who_calls, security_files

_DEV: Final = PurePosixPath("/dev")
# To mount one of these would give the pod what is the node's or other programs'.
_SHARED: Final = frozenset(
    PurePosixPath("/") / path
    for path in ("", "etc", "home", "opt", "root", "run", "tmp", "var", "var/lib", "var/log", "var/run", "var/tmp")
)
_OF_SYSTEM: Final = tuple(
    PurePosixPath("/") / path for path in ("bin", "boot", "dev", "lib", "proc", "sbin", "sys", "usr")
)
_SPDK_USUAL: Final = PurePosixPath("/var/tmp")
"""SPDK's own default for its socket."""
_NEXT: Final = "Correct the file; docs/deployment.md has one for each form of deployment."


@dataclass(frozen=True, slots=True)
class ServiceNeeds:
    """``folders``: directories of the node, made where they are missing. ``secret_files``: certificates, keys and
    tokens, below ``CONFIG_DIR``. ``api``, ``telemetry``: where it listens over TCP. ``has_devices``: drives are block
    devices. ``transport``: of its exports. ``can_be_drained``: from inside the pod, with nothing to show."""

    folders: tuple[PurePosixPath, ...]
    secret_files: tuple[PurePosixPath, ...]
    api: TcpAddress | None
    telemetry: TcpAddress
    has_devices: bool
    is_encrypted: bool
    exports_by_kernel: bool
    transport: str | None
    spdk: SpdkConfig | None
    can_be_drained: bool
    stop_grace_s: float

    @property
    def is_privileged(self) -> bool:
        """The kernel keeps containers from devices that nobody gave them; a node's drives come and go."""
        return self.has_devices


def needs_of(
    config: ServiceConfig, *, source: str, node: str | None, may_have_devices: bool, has_own_target: bool
) -> ServiceNeeds:
    """``node``: whose configuration it is; None: that of many nodes. ``may_have_devices``: also where it names none.
    ``has_own_target``: an nvmf_tgt runs in the pod, not on its node.

    Raises :class:`~meshfusion.jbof.config_problems.ConfigProblemsError` with all that stands against it; ``source``:
    what it calls the file.
    """
    problems = [*_problems(config, has_own_target), *(() if node is not None else _problems_of_many(config))]
    if problems:
        raise ConfigProblemsError(source, tuple(problems), next_step=_NEXT)
    assert config.telemetry.listen is not None, "else it was a problem"
    telemetry = parse_address(config.telemetry.listen)
    assert isinstance(telemetry, TcpAddress), "else it was a problem"
    exports = config.exports
    spdk = None if exports is None else exports.spdk
    of_target = () if spdk is None or has_own_target else (PurePosixPath(spdk.socket.parent),)
    pools = [served.pool for served in config.served]
    return ServiceNeeds(
        folders=tuple(sorted({*(folder for _, folder in _folders(config)), *of_target})),
        secret_files=tuple(map(PurePosixPath, security_files(config))),
        api=next((address for address in config.addresses if isinstance(address, TcpAddress)), None),
        telemetry=telemetry,
        has_devices=may_have_devices or any(is_device(path) for pool in pools for path in pool.data_path or ()),
        is_encrypted=any(pool.encryption is not None for pool in pools),
        exports_by_kernel=exports is not None and exports.target == "nvmet",
        transport=None if exports is None else exports.portals[0].partition("://")[0],
        spdk=spdk,
        can_be_drained=not asks_who_calls(config),
        stop_grace_s=config.stop_grace_s,
    )


def file_problems(files: tuple[tuple[str, PurePosixPath], ...]) -> Iterator[ConfigProblem]:
    """Of files that a Secret shall hold: ``(field, path)``."""
    seen: dict[str, PurePosixPath] = {}
    for field, path in files:
        if CONFIG_DIR not in path.parents or ".." in path.parts:
            yield ConfigProblem(
                field, "comes from a Secret, which is mounted there", f"use {CONFIG_DIR}/...", str(path)
            )
        elif path == CONFIG_FILE:
            yield ConfigProblem(field, "is the configuration's own place", "use another name", str(path))
        elif seen.setdefault(path.name, path) != path:
            problem = f"has the name of {seen[path.name]}, and a Secret has one file of a name"
            yield ConfigProblem(field, problem, "use another name", str(path))


def is_device(path: PurePath) -> bool:
    """By its place: the node's devices are not here to look at."""
    return _DEV in PurePosixPath(path).parents and ".." not in path.parts


# ---- inside ------------------------------------------------------------------------------------------------------


def _problems(config: ServiceConfig, has_own_target: bool) -> Iterator[ConfigProblem]:
    yield from _telemetry_problems(config)
    for field, address in _tcp_addresses(config):
        if address.port == 0:
            yield ConfigProblem(field, "is any free port, which nobody would know", "name a port", str(address))
    yield from file_problems(tuple((_field_of(config, path), PurePosixPath(path)) for path in security_files(config)))
    for field, folder in _folders(config):
        yield from _folder_problems(field, folder)
    spdk = None if config.exports is None else config.exports.spdk
    if spdk is not None:
        folder = PurePosixPath(spdk.socket.parent)
        if not (has_own_target and folder == _SPDK_USUAL):  # else it is the pod's alone
            yield from _folder_problems("exports.spdk.socket", folder)


def _telemetry_problems(config: ServiceConfig) -> Iterator[ConfigProblem]:
    telemetry = config.telemetry
    if telemetry.listen is None:
        fix = "add telemetry: {listen: 127.0.0.1:9477}"
        yield ConfigProblem("telemetry.listen", "is not set, and Kubernetes asks there whether the pod is well", fix)
    elif isinstance(parse_address(telemetry.listen), UnixAddress):
        fix = "use 127.0.0.1:9477"
        yield ConfigProblem("telemetry.listen", "is a socket, and Kubernetes asks over TCP only", fix, telemetry.listen)
    if not telemetry.probe:
        fix = "remove it: true is the default"
        yield ConfigProblem("telemetry.probe", "is off, so that /readyz would never be good", fix, "false")


def _folder_problems(field: str, folder: PurePosixPath) -> Iterator[ConfigProblem]:
    """Of a directory that is to be mounted."""
    if ".." in folder.parts or ":" in str(folder) or str(folder).startswith("//"):
        problem = f"lies in {folder}, which Kubernetes does not mount: it has .., : or // in it"
        yield ConfigProblem(field, problem, "write the path out, without these")
    elif folder in _SHARED or any(one == folder or one in folder.parents for one in _OF_SYSTEM):
        problem = f"lies in {folder}, which is the node's: the pod would have all of it"
        yield ConfigProblem(field, problem, "use a directory of its own, such as /var/lib/meshfusion/...")
    elif folder == CONFIG_DIR or CONFIG_DIR in folder.parents:
        problem = f"lies in {folder}, where the pod has its configuration"
        yield ConfigProblem(field, problem, "use a directory of the node, such as /var/lib/meshfusion/...")


def _problems_of_many(config: ServiceConfig) -> Iterator[ConfigProblem]:
    """Of nodes with one configuration: no address may be that of one of them."""
    fix = "render it for that node: --node NAME"
    if config.exports is not None:
        yield ConfigProblem("exports.portals", "are addresses of one node", fix, ", ".join(config.exports.portals))
    for field, address in _tcp_addresses(config):
        if not (address.is_loopback or _is_everywhere(address)):
            yield ConfigProblem(field, "is an address of one node", fix, str(address))


def _tcp_addresses(config: ServiceConfig) -> Iterator[tuple[str, TcpAddress]]:
    listens = [("listen", address) for address in config.addresses]
    if config.telemetry.listen is not None:
        listens.append(("telemetry.listen", parse_address(config.telemetry.listen)))
    yield from ((field, address) for field, address in listens if isinstance(address, TcpAddress))


def _is_everywhere(address: TcpAddress) -> bool:
    try:
        return ipaddress.ip_address(address.host).is_unspecified
    except ValueError:
        return False


def _folders(config: ServiceConfig) -> Iterator[tuple[str, PurePosixPath]]:
    """Of the node, that the service writes to, and the fields that say so. A pool's directory is made in its parent."""
    for address in config.addresses:
        if isinstance(address, UnixAddress):
            yield "listen", PurePosixPath(address.path.parent)
    for served in config.served:
        before = f"pools.{served.name}.pool" if served.name else "pool"
        yield f"{before}.path", PurePosixPath(served.pool.path.parent)
        for path in served.pool.data_path or ():
            if not is_device(path):
                yield f"{before}.data_path", PurePosixPath(path.parent)
        if served.pool.encryption is not None:
            # Both are the node's: a Secret could not be destroyed by `mfctl pool erase-key`.
            yield f"{before}.encryption.header_dir", PurePosixPath(served.pool.encryption.header_dir)
            yield f"{before}.encryption.key_file", PurePosixPath(served.pool.encryption.key_file.parent)
    if config.log.file is not None:
        yield "log.file", PurePosixPath(config.log.file.parent)
    if config.audit is not None and config.audit.path is not None:
        yield "audit.path", PurePosixPath(config.audit.path.parent)


def _field_of(config: ServiceConfig, path: Path) -> str:
    if config.tls is not None:
        for name in ("certificate", "key", "client_ca"):
            if getattr(config.tls, name) == path:
                return f"tls.{name}"
    return "tokens_file"
