"""The host's end of a virtual card's tmfifo: an interface with the name and the address that a real one has."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from meshfusion.tools.lab.errors import LabError

HOST_ADDRESS: Final = "192.168.100.1/30"
_ALIAS: Final = "virtual DPU of MeshFusion"
_INTERFACES: Final = Path("/sys/class/net")


def interface_of(index: int) -> str:
    """As the driver of ``/dev/rshim<index>`` calls it."""
    return f"tmfifo_net{index}"


@contextmanager
def host_end(index: int) -> Iterator[str]:
    """The interface, until the end. Raises LabError where there is one already that is not left of a virtual card, and
    for who may make none."""
    name = interface_of(index)
    about = _INTERFACES / name / "ifalias"
    if about.exists():
        if about.read_text().strip() != _ALIAS:
            raise LabError(
                f"there is an interface {name} already, of a real card it seems",
                next_step="take another number, rshimN, or another machine",
            )
        _ip("link", "delete", name)
    try:
        _ip("tuntap", "add", "dev", name, "mode", "tap")
        _ip("link", "set", name, "alias", _ALIAS)
        _ip("address", "add", HOST_ADDRESS, "dev", name)
        _ip("link", "set", name, "up")
        yield name
    finally:
        subprocess.run(("ip", "link", "delete", name), capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(("ip", *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(
            f"ip {' '.join(arguments)}: {done.stderr.strip()}",
            next_step="run it as root, on a machine with /dev/net/tun",
        )
