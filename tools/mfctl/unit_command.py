"""``mfctl service unit``."""

from __future__ import annotations

import os
import pwd
import sys
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.output import format_option, print_document

if TYPE_CHECKING:
    from meshfusion.tools.mfctl.unit_file import UnitFacts


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, readable=False),
    required=True,
    metavar="FILE",
    help="Configuration of the service (YAML).",
)
@click.option("--user", metavar="NAME", help="Whom the service runs as, and its engines.  [default: you]")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it there instead, such as /etc/systemd/system/meshfusion.service.",
)
@click.option("--force", is_flag=True, help="Also where another unit is already.")
@format_option
def unit(config_path: Path, user: str | None, output: Path | None, force: bool, output_format: str) -> None:
    """Print a systemd unit for the service, filled in for its configuration and this machine.

    It opens to the service what the configuration needs, and nothing else: directories, drives, the kernel's target.
    """
    from meshfusion.tools.mfctl.unit_file import unit_text

    template = files("meshfusion.tools").joinpath("data/systemd/meshfusion.service").read_text()
    text = unit_text(template, _facts(config_path.absolute(), user or pwd.getpwuid(os.getuid()).pw_name))
    if output is not None:
        _install(text, output, force=force)
    if output_format != "table":
        print_document({"unit": text, "output": None if output is None else str(output)}, output_format)
    elif output is None:
        click.echo(text, nl=False)
    else:
        start = f"systemctl daemon-reload && systemctl enable --now {output.stem}"
        click.echo(f"wrote {output}; start the service: {start}")


def _facts(config_path: Path, user: str) -> UnitFacts:
    from meshfusion.dpu.api.address import UnixAddress, parse_address
    from meshfusion.tools.mfctl.config_model import asks_who_calls, config_alone, security_files
    from meshfusion.tools.mfctl.unit_file import UnitFacts

    try:
        pwd.getpwnam(user)
    except KeyError:
        raise ConfigError(
            f"--user: there is no user {user}", next_step=f"Make it: useradd --system --shell /usr/sbin/nologin {user}"
        ) from None
    config = config_alone(config_path)
    monitors = config.telemetry.listen
    listens = (*config.addresses, *(() if monitors is None else (parse_address(monitors),)))
    sockets = (address.path.parent for address in listens if isinstance(address, UnixAddress))
    pools = [served.pool for served in config.served]
    data_paths = [path for pool in pools for path in pool.data_path or ()]
    devices = tuple(path for path in data_paths if path.is_block_device())
    files_of_data = tuple(path for path in data_paths if path not in devices)
    # New ones are made where one was moved away.
    audit_path = None if config.audit is None else config.audit.path
    logs = (path.parent for path in (config.log.file, audit_path) if path is not None)
    is_nvmet = config.exports is not None and config.exports.target == "nvmet"
    if is_nvmet and user != "root":
        raise ConfigError(
            f"--user: {user} may not set up the kernel's target, which exports.target: nvmet needs",
            next_step="Use --user root, or exports over SPDK.",
        )
    encryptions = [pool.encryption for pool in pools if pool.encryption is not None]
    if encryptions and user != "root":
        raise ConfigError(
            f"--user: {user} may not open encrypted drives, which pool.encryption needs", next_step="Use --user root."
        )
    programs = Path(sys.executable).parent
    own = programs / "mfctl"
    mfctl = (str(own),) if own.exists() else (sys.executable, "-m", "meshfusion.tools.mfctl.main")
    return UnitFacts(
        user=user,
        serve=(*mfctl, "service", "run", "--config", str(config_path)),
        # Where callers must say who they are, systemd has nothing to show.
        reload=None if asks_who_calls(config) else (*mfctl, "service", "reload", "--config", str(config_path)),
        mounts=(*(pool.path for pool in pools), config_path),
        writes=(
            *sockets,
            *(pool.path if pool.path.exists() else pool.path.parent for pool in pools),
            *files_of_data,
            *(encryption.header_dir for encryption in encryptions),
            *logs,
        ),
        reads=(
            programs,
            Path(sys.prefix),
            Path(__file__),
            config_path,
            *security_files(config),
            *(e.key_file for e in encryptions),
        ),
        stop_grace_s=config.stop_grace_s,
        devices=(*devices, *(device for pool in pools for device in _listed_devices(pool.path))),
        exports_by_kernel=is_nvmet,
        is_encrypted=bool(encryptions),
    )


def _listed_devices(pool: Path) -> tuple[Path, ...]:
    """Of a pool that exists, the drives that are no files."""
    from meshfusion.dpu.drive_list import read_drive_list
    from meshfusion.jbof.errors import MeshFusionError

    try:
        listed = read_drive_list(pool)
    except (MeshFusionError, OSError):
        return ()  # there is none yet, or the service will say what is wrong
    return tuple(drive.path for drive in listed.drives if drive.path.is_block_device()) if listed is not None else ()


def _install(text: str, path: Path, *, force: bool) -> None:
    """Whole or not at all."""
    if path.exists() and not force and path.read_text() != text:
        raise ConfigError(f"--output: {path} exists and is another unit", next_step="Look at it; --force replaces it.")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
