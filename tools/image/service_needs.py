"""What the service of a configuration needs of the machine that runs its image. Reads nothing but the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from meshfusion.dpu.api.address import TcpAddress, UnixAddress, parse_address
from meshfusion.dpu.config import ServiceConfig
from meshfusion.dpu.config_exports import SpdkConfig
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError
from meshfusion.tools.image.lock import Target
from meshfusion.tools.mfctl.config_model import config_alone

CONFIG_FOLDER: Final = PurePosixPath("/etc/meshfusion")
CONFIG_FILE: Final = CONFIG_FOLDER / "service.yaml"
_DEVICES: Final = PurePosixPath("/dev")
_OF_SYSTEM: Final = tuple(
    map(PurePosixPath, ("/bin", "/boot", "/dev", "/lib", "/proc", "/root", "/sbin", "/sys", "/tmp", "/usr", "/var/tmp"))
)


@dataclass(frozen=True, slots=True)
class ServiceNeeds:
    """``folders``: of the machine that the service writes to. ``devices``: drives that the configuration names.
    ``monitors``: where readiness is asked for."""

    text: str
    folders: tuple[PurePosixPath, ...]
    pools: tuple[PurePosixPath, ...]
    devices: tuple[PurePosixPath, ...]
    is_encrypted: bool
    monitors: TcpAddress
    spdk: SpdkConfig | None
    stop_grace_s: float


def service_needs(path: Path, target: Target) -> ServiceNeeds:
    """Raises ConfigProblemsError for mistakes, and for what does not go with an image; and OSError."""
    config = config_alone(path)
    problems = [*_problems(config, target), *_folder_problems(config)]
    if problems:
        raise ConfigProblemsError(str(path), tuple(problems), next_step="Correct the file; docs/images.md has one.")
    assert config.telemetry.listen is not None
    monitors = parse_address(config.telemetry.listen)
    assert isinstance(monitors, TcpAddress)
    pools = [served.pool for served in config.served]
    named = (PurePosixPath(path) for pool in pools for path in pool.data_path or ())
    return ServiceNeeds(
        text=path.read_text(),
        folders=tuple(sorted({folder for _, folder in _folders(config)})),
        pools=tuple(PurePosixPath(pool.path) for pool in pools),
        devices=tuple(path for path in named if _is_device(path)),
        is_encrypted=any(pool.encryption is not None for pool in pools),
        monitors=monitors,
        spdk=None if config.exports is None else config.exports.spdk,
        stop_grace_s=config.stop_grace_s,
    )


def _problems(config: ServiceConfig, target: Target) -> Iterator[ConfigProblem]:
    exported = None if config.exports is None else config.exports.target
    if exported is not None and exported != target:
        fix = f"build with --target {exported}, or change it"
        yield ConfigProblem("exports.target", f"is not the bundle's, {target}", fix, exported)
    if exported is None and target == "spdk":
        yield ConfigProblem("exports", "is missing, and with it what SPDK gets", "add exports with target: spdk")
    listen = None if config.telemetry.listen is None else parse_address(config.telemetry.listen)
    if not isinstance(listen, TcpAddress):
        problem = "is no TCP address, at which an upgrade and the kubelet ask whether the service is ready"
        yield ConfigProblem("telemetry.listen", problem, "add telemetry: {listen: 127.0.0.1:9477}", listen)
    if not config.telemetry.probe:
        yield ConfigProblem("telemetry.probe", "is off, so that nothing proves the service ready", "remove it", False)


def _folder_problems(config: ServiceConfig) -> Iterator[ConfigProblem]:
    for field, folder in _folders(config):
        if any(one == folder or one in folder.parents for one in _OF_SYSTEM) or len(folder.parts) < 3:
            problem = f"lies in {folder}, which is the system's or the image's own"
            yield ConfigProblem(field, problem, "use a directory of its own, such as /var/lib/meshfusion/...")


def _folders(config: ServiceConfig) -> Iterator[tuple[str, PurePosixPath]]:
    """And the fields that name them. A pool's directory is made in its parent."""
    for address in config.addresses:
        if isinstance(address, UnixAddress):
            yield "listen", PurePosixPath(address.path.parent)
    for served in config.served:
        at = f"pools.{served.name}.pool" if served.name else "pool"
        yield f"{at}.path", PurePosixPath(served.pool.path.parent)
        for path in map(PurePosixPath, served.pool.data_path or ()):
            if not _is_device(path):
                yield f"{at}.data_path", path.parent
        if served.pool.encryption is not None:
            yield f"{at}.encryption.header_dir", PurePosixPath(served.pool.encryption.header_dir)
    if config.log.file is not None:
        yield "log.file", PurePosixPath(config.log.file.parent)
    if config.audit is not None and config.audit.path is not None:
        yield "audit.path", PurePosixPath(config.audit.path.parent)
    if config.exports is not None and config.exports.spdk is not None:
        yield "exports.spdk.socket", PurePosixPath(config.exports.spdk.socket.parent)


def _is_device(path: PurePosixPath) -> bool:
    return _DEVICES in path.parents
