"""``python -m meshfusion.tools.lab.guest_setup up|down``: for shell scripts in the guest.

``up`` makes links, devices and one target that exports them on every link, and prints what it made as JSON.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_file_device, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.initiator import disconnect_all
from meshfusion.tools.lab.guest_setup.links import remove_links, soft_roce_on_dummy, soft_roce_paths
from meshfusion.tools.lab.guest_setup.nvmet import SERVICE, Port, Subsystem, export, remove_exports
from meshfusion.tools.lab.guest_setup.shaping import Shaping
from meshfusion.tools.mfctl.main import RootGroup
from meshfusion.tools.mfctl.output import print_json

DEFAULT_NQN = "nqn.2026-01.io.meshfusion:lab"


@click.group(cls=RootGroup)
def guest_setup() -> None:
    """Links, devices and targets in a lab guest."""


@guest_setup.command()
@click.option("--paths", default=0, help="This many veth pairs, each a subnet; 0: one link on a dummy interface.")
@click.option("--mtu", default=9000, show_default=True, help="Of the interfaces, in bytes.")
@click.option("--rate-mbit", default=0.0, help="Of each path and direction; 0 for no limit.")
@click.option("--delay-us", default=0, help="Added to every packet on a path.")
@click.option("--loss-percent", default=0.0, help="Of the packets on a path.")
@click.option("--memory-device", "memory", multiple=True, help="MIB or MIB,zone=MIB: a device in memory.")
@click.option("--file-device", "files", multiple=True, help="PATH:MIB: a loop device over a file.")
@click.option("--nqn", default=DEFAULT_NQN, show_default=True, help="Of the subsystem.")
@click.option("--host", "hosts", multiple=True, help="NQN that may connect; without any, everybody may.")
@click.option("--service", default=SERVICE, show_default=True, help="Port number.")
def up(
    paths: int,
    mtu: int,
    rate_mbit: float,
    delay_us: int,
    loss_percent: float,
    memory: tuple[str, ...],
    files: tuple[str, ...],
    nqn: str,
    hosts: tuple[str, ...],
    service: int,
) -> None:
    """Make links, devices and, with devices, a target. Prints them as JSON."""
    devices = [make_memory_device(memory_device(text, index)) for index, text in enumerate(memory)]
    devices += [make_file_device(*file_device(text)) for text in files]
    if paths:
        shaping = Shaping(rate_mbit=rate_mbit, delay_us=delay_us, loss_percent=loss_percent)
        made = soft_roce_paths(paths, mtu, shaping if shaping != Shaping() else None)
        addresses = [path.target.address for path in made]
        links: object = [{"host": path.host.address, "target": path.target.address} for path in made]
    else:
        link = soft_roce_on_dummy(mtu)
        addresses = [link.address]
        links = [{"host": link.address, "target": link.address}]
    if devices:
        subsystem = Subsystem(nqn, tuple(devices), hosts or None)
        ports = [Port(number, address, (nqn,), service=service) for number, address in enumerate(addresses, start=1)]
        export([subsystem], ports)
    print_json({"nqn": nqn if devices else None, "service": service, "links": links, "devices": [*map(str, devices)]})


@guest_setup.command()
def down() -> None:
    """Disconnect, then remove targets, devices and links. Exits 1 when something could not be removed."""
    disconnect_all()
    failures = [*remove_exports(), *remove_devices(), *remove_links()]
    if failures:
        raise click.ClickException("\n".join(failures))


def memory_device(text: str, index: int) -> MemoryDevice:
    match = re.fullmatch(r"(\d+)(?:,zone=(\d+))?", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not MIB or MIB,zone=MIB", param_hint="--memory-device")
    return MemoryDevice(f"mf{index}", int(match[1]), zone_mib=int(match[2] or 0))


def file_device(text: str) -> tuple[Path, int]:
    path, _, size = text.rpartition(":")
    if not path or not size.isdigit():
        raise click.BadParameter(f"{text!r} is not PATH:MIB", param_hint="--file-device")
    return Path(path), int(size)


if __name__ == "__main__":
    guest_setup(prog_name="guest_setup")
