"""Which of this machine's RDMA ports lead to which portal."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from meshfusion.dpu.api.types import Portal
from meshfusion.host.path.flexpath.addresses import PathAddress
from meshfusion.host.path.rdma_ports import LocalPort, local_ports, paths_to
from meshfusion.jbof.errors import UnsupportedError

ONE, TWO = LocalPort("ens1", "10.0.0.7/24"), LocalPort("ens2", "10.0.1.7/24")
A, B = Portal("rdma", "10.0.0.1", 4420), Portal("rdma", "10.0.1.1", 4421)
Found = namedtuple("Found", "address netmask")


def test_each_portal_is_reached_by_the_ports_of_its_subnet() -> None:
    assert paths_to([A, B], [ONE, TWO]) == (
        PathAddress("10.0.0.1", 4420, "ens1", "10.0.0.7"),
        PathAddress("10.0.1.1", 4421, "ens2", "10.0.1.7"),
    )
    both = LocalPort("ens3", "10.0.0.8/24")
    assert [path.net_device for path in paths_to([A], [ONE, both])] == ["ens1", "ens3"]


def test_a_portal_beyond_a_router_is_left_to_the_kernels_routes() -> None:
    assert paths_to([Portal("rdma", "10.9.9.9", 4420)], [ONE]) == (PathAddress("10.9.9.9", 4420, "routed"),)


def test_a_portal_on_this_machine() -> None:
    own = Portal("rdma", "10.0.0.7", 4420)
    assert paths_to([own], [ONE]) == (PathAddress("10.0.0.7", 4420, "ens1"),)
    other = LocalPort("veth0", "10.0.0.9/24")
    assert paths_to([own], [ONE, other]) == (PathAddress("10.0.0.7", 4420, "veth0", "10.0.0.9"),)


def test_other_transports_do_not_count() -> None:
    assert len(paths_to([A, Portal("tcp", "10.0.0.1", 4420)], [ONE])) == 1
    with pytest.raises(UnsupportedError, match="not over RDMA"):
        paths_to([Portal("tcp", "10.0.0.1", 4420)], [ONE])


def test_addresses_of_rdma_devices_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs"
    folder.mkdir(parents=True)
    for index, device in enumerate(("ens1", "ens1", "ens2")):
        (folder / str(index)).write_text(f"{device}\n")
    (folder / "9").mkdir()  # as unreadable as an entry that is not in use
    addresses = {
        "ens1": [
            Found("10.0.0.7", "255.255.255.0"),
            Found("fe80::1%ens1", "ffff:ffff:ffff:ffff::"),
            Found("fd00::7", "ffff:ffff:ffff:ffff::"),
            Found("b8:59:9f:00:00:01", None),
        ],
        "eth0": [Found("192.168.1.2", "255.255.255.0")],
        "ens2": [],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert local_ports(tmp_path) == (LocalPort("ens1", "10.0.0.7/24"), LocalPort("ens1", "fd00::7/64"))
    assert local_ports(tmp_path / "nothing") == ()
