"""What the setup in the guest would do, as steps. That the kernel takes them is tried in a guest: tests/lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.guest_setup.__main__ import file_device, memory_device
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, memory_device_steps
from meshfusion.tools.lab.guest_setup.initiator import block_devices
from meshfusion.tools.lab.guest_setup.links import dummy_steps, path_steps, rdma_path, removal_steps
from meshfusion.tools.lab.guest_setup.nvmet import (
    Port,
    Subsystem,
    offer_steps,
    port_steps,
    subsystem_steps,
    withdraw_steps,
)
from meshfusion.tools.lab.guest_setup.nvmet import removal_steps as export_removal_steps
from meshfusion.tools.lab.guest_setup.shaping import Shaping, shaping_steps
from meshfusion.tools.lab.guest_setup.steps import (
    Link,
    MakeDirectory,
    Remove,
    Run,
    Write,
    carry_out,
    output_of,
    try_all,
)


def commands(steps: object) -> list[str]:
    assert isinstance(steps, list)
    return [" ".join(step.argv) for step in steps if isinstance(step, Run)]


def test_dummy() -> None:
    assert commands(dummy_steps(9000)) == [
        "ip link add roce0 type dummy",
        "ip address add 10.99.0.1/24 dev roce0",
        "ip link set roce0 mtu 9000 up",
        "rdma link add rxe0 type rxe netdev roce0",
    ]


def test_paths_share_nothing() -> None:
    ends = [link for index in (0, 1, 63) for path in (rdma_path(index),) for link in (path.host, path.target)]
    for attribute in ("device", "interface", "address"):
        assert len({getattr(link, attribute) for link in ends}) == 6
    assert len({link.address.rpartition(".")[0] for link in ends}) == 3
    assert all(len(link.interface) < 16 for link in ends), "IFNAMSIZ"


def test_a_path() -> None:
    steps = path_steps(rdma_path(3), 4200)
    assert commands(steps)[0] == "ip link add mfhost3 type veth peer name mftarget3"
    assert commands(steps)[-1] == "rdma link add rxetarget3 type rxe netdev mftarget3"
    assert Write(Path("/proc/sys/net/ipv4/conf/mftarget3/accept_local"), "1") in steps


def test_removal_leaves_what_is_not_ours() -> None:
    steps = removal_steps(["rxe0", "mlx5_0"], ["lo", "eth0", "roce0", "mfhost1", "mftarget1"])
    assert commands(steps) == ["rdma link delete rxe0", "ip link delete roce0", "ip link delete mfhost1"]


def test_shaping() -> None:
    assert commands(shaping_steps("v0", Shaping(rate_mbit=800, delay_us=50, jitter_us=5, loss_percent=0.1))) == [
        "tc qdisc replace dev v0 root handle 4: pfifo",
        "tc qdisc replace dev v0 root handle 1: htb default 1",
        "tc class replace dev v0 parent 1: classid 1:1 htb rate 800mbit",
        "tc qdisc replace dev v0 parent 1:1 handle 2: netem delay 50us 5us loss 0.1% limit 10000",
    ]
    assert commands(shaping_steps("v0", Shaping(rate_mbit=10)))[-1].endswith("handle 2: pfifo limit 10000")
    assert commands(shaping_steps("v0", Shaping(loss_percent=100))) == [
        "tc qdisc replace dev v0 root handle 3: netem loss 100% limit 10000"
    ]


def test_memory_device() -> None:
    folder = Path("/nullb/a")
    plain = memory_device_steps(MemoryDevice("a", 256), Path("/nullb"))
    assert plain[0] == MakeDirectory(folder)
    assert plain[-1] == Write(folder / "power", "1")
    assert {Write(folder / "size", "256"), Write(folder / "memory_backed", "1")} < set(plain)
    zoned = memory_device_steps(MemoryDevice("a", 256, zone_mib=16), Path("/nullb"))
    assert {Write(folder / "zoned", "1"), Write(folder / "zone_size", "16")} < set(zoned)
    assert Write(folder / "discard", "1") in plain
    assert Write(folder / "discard", "1") not in zoned


def test_subsystem_for_some_hosts(tmp_path: Path) -> None:
    folder = tmp_path / "subsystems" / "nqn"
    (tmp_path / "hosts" / "known").mkdir(parents=True)
    steps = subsystem_steps(Subsystem("nqn", (Path("/dev/a"), Path("/dev/b")), ("known", "new")), tmp_path)
    assert steps == [
        MakeDirectory(folder),
        Write(folder / "attr_allow_any_host", "0"),
        Link(folder / "allowed_hosts" / "known", tmp_path / "hosts" / "known"),
        MakeDirectory(tmp_path / "hosts" / "new"),
        Link(folder / "allowed_hosts" / "new", tmp_path / "hosts" / "new"),
        MakeDirectory(folder / "namespaces" / "1"),
        Write(folder / "namespaces" / "1" / "device_path", "/dev/a"),
        Write(folder / "namespaces" / "1" / "enable", "1"),
        MakeDirectory(folder / "namespaces" / "2"),
        Write(folder / "namespaces" / "2" / "device_path", "/dev/b"),
        Write(folder / "namespaces" / "2" / "enable", "1"),
    ]
    assert Write(folder / "attr_allow_any_host", "1") in subsystem_steps(Subsystem("nqn", ()), tmp_path)


def test_port_listens_last() -> None:
    root = Path("/nvmet")
    steps = port_steps(Port(2, "10.0.0.1", ("a", "b")), root)
    assert steps[0] == MakeDirectory(root / "ports" / "2")
    assert Write(root / "ports" / "2" / "addr_trsvcid", "4420") in steps
    assert steps[-2:] == [
        Link(root / "ports" / "2" / "subsystems" / name, root / "subsystems" / name) for name in ("a", "b")
    ]


def test_a_port_is_taken_from_its_subsystems_and_given_back() -> None:
    port = Port(2, "10.0.0.1", ("a", "b"))
    listed = Path("/nvmet/ports/2/subsystems")
    assert withdraw_steps(port, Path("/nvmet")) == [Remove(listed / "a"), Remove(listed / "b")]
    assert offer_steps(port, Path("/nvmet")) == [
        Link(listed / name, Path("/nvmet/subsystems") / name) for name in ("a", "b")
    ]


def test_exports_are_removed_from_the_outside_in(tmp_path: Path) -> None:
    """On folders like configfs's, where a directory goes only when nothing refers to it or lies in it."""
    subsystem, host, port = tmp_path / "subsystems" / "nqn", tmp_path / "hosts" / "h", tmp_path / "ports" / "1"
    for folder in (subsystem / "namespaces" / "1", subsystem / "allowed_hosts", host, port / "subsystems"):
        folder.mkdir(parents=True)
    (subsystem / "allowed_hosts" / "h").symlink_to(host)
    (port / "subsystems" / "nqn").symlink_to(subsystem)
    assert export_removal_steps(tmp_path) == [
        Remove(port / "subsystems" / "nqn"),
        Remove(port),
        Remove(subsystem / "allowed_hosts" / "h"),
        Write(subsystem / "namespaces" / "1" / "enable", "0"),
        Remove(subsystem / "namespaces" / "1"),
        Remove(subsystem),
        Remove(host),
    ]
    assert export_removal_steps(tmp_path / "none") == []


def test_carrying_out(tmp_path: Path) -> None:
    made = tmp_path / "made"
    carry_out([MakeDirectory(made), Link(tmp_path / "link", made), Write(made / "attribute", "7")])
    assert (tmp_path / "link" / "attribute").read_text() == "7"
    with pytest.raises(LabError, match="File exists"):
        carry_out([MakeDirectory(made)])


def test_what_fails_is_told_and_the_rest_is_done(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    (failure,) = try_all([Remove(tmp_path / "full"), Remove(tmp_path / "none"), Remove(tmp_path / "empty")])
    assert "full" in failure
    assert not (tmp_path / "empty").exists()


def test_a_failing_command() -> None:
    with pytest.raises(LabError, match="failed with exit status 3: the cause"):
        output_of("sh", "-c", "echo the cause >&2; exit 3")
    with pytest.raises(LabError, match="not installed"):
        output_of("no-such-command-at-all")


def test_block_devices_of_a_subsystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, nqn in (("nvme-subsys0", "ours"), ("nvme-subsys1", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "subsysnqn").write_text(f"{nqn}\n")
    for name in ("nvme0n2", "nvme0n1", "nvme0c0n1", "nvme0"):
        (tmp_path / "nvme-subsys0" / name).mkdir()
    (tmp_path / "nvme-subsys1" / "nvme1n1").mkdir()
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert block_devices("ours", 2, tmp_path) == [Path("/dev/nvme0n1"), Path("/dev/nvme0n2")]


def test_options_of_the_shell_command() -> None:
    assert memory_device("256,zone=16", 1) == MemoryDevice("mf1", 256, zone_mib=16)
    assert file_device("/out/a:b.img:64") == (Path("/out/a:b.img"), 64)
