"""The doctor on whole machines, made of files: well, not well, and not to be seen."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from meshfusion.tools.doctor.clock import STA_UNSYNC, ClockState
from meshfusion.tools.doctor.examine import Surroundings, examine_machine
from meshfusion.tools.doctor.machine import Machine
from meshfusion.tools.doctor.role import Role, guess, role_finding
from meshfusion.tools.mfctl.findings import Finding, State
from tests.tools.doctor.trees import Tree, bad_host, bad_jbof, bare, good_dpu, good_host, good_jbof

SYNCED = ClockState(0, 2_000)
NOW = datetime(2026, 12, 1, tzinfo=UTC)


def examined(tree: Tree, role: Role, clock: ClockState | None = SYNCED) -> dict[str, Finding]:
    around = Surroundings(NOW, read_clock=lambda: clock)
    found = list(examine_machine(Machine(tree.root), role, around))
    by_check = {finding.check: finding for finding in found}
    assert len(by_check) == len(found), "each check has its name"
    for finding in found:
        assert finding.cause
        assert finding.remedy or finding.state in (State.OK, State.INFO), finding
    return by_check


def in_state(found: dict[str, Finding], *states: State) -> set[str]:
    return {check for check, finding in found.items() if finding.state in states}


@pytest.mark.parametrize(
    ("make", "role"), [(good_host, Role.HOST), (good_dpu, Role.DPU), (good_jbof, Role.JBOF), (bare, Role.HOST)]
)
def test_what_a_machine_is_is_seen(tmp_path: Path, make: Callable[[Path], Tree], role: Role) -> None:
    machine = Machine(make(tmp_path).root)
    assert guess(machine)[0] is role
    found, finding = role_finding(machine, None)
    assert (found, finding.state) == (role, State.INFO)
    assert "--role" in finding.remedy
    assert role_finding(machine, Role.JBOF)[0] is Role.JBOF, "what is said holds"


@pytest.mark.parametrize(("make", "role"), [(good_host, Role.HOST), (good_dpu, Role.DPU), (good_jbof, Role.JBOF)])
def test_on_a_good_machine_nothing_is_wrong(tmp_path: Path, make: Callable[[Path], Tree], role: Role) -> None:
    found = examined(make(tmp_path), role)
    assert in_state(found, State.WARN, State.FAIL) == set()
    # What no file tells is not called well: here PFC, for each interface.
    assert in_state(found, State.UNSEEN) == {check for check in found if check.startswith("pfc ")} != set()


def test_a_good_host_in_words(tmp_path: Path) -> None:
    found = examined(good_host(tmp_path), Role.HOST)
    assert found["kernel"].cause == "Linux 6.14.0-35-generic"
    told = "ACTIVE, LinkUp, 400 Gb/sec (4X NDR), Ethernet, ens1f0np0, firmware 28.43.1014"
    assert found["rdma mlx5_0/1"].cause == told
    assert found["mtu ens1f0np0"].cause == "9000, so RDMA sends 4096 bytes in a packet"
    assert "same root port or switch" in found["pcie 0000:3c:00.0"].cause
    assert found["gpudirect"].cause.startswith("dma-buf (open kernel modules); NVIDIA UNIX Open Kernel Module")
    assert found["rdma-core"].cause == "50.0"
    assert found["drivers"].cause == "mlx5_core 25.07-0.9.7, nvidia 580.95.05"
    assert found["iommu"].state is State.OK


@pytest.mark.parametrize(
    ("check", "cause", "remedy"),
    [
        ("kernel", "no dma-buf before 5.12", "nvidia-peermem"),
        ("rdma mlx5_0/1", "DOWN, Disabled", "ip link set ens1f0np0 up"),
        ("rdma mlx5_0/1 address", "no RoCE v2 address", "ip addr add"),
        ("mtu ens1f0np0", "1500, so RDMA sends 1024 bytes", "mtu 9000"),
        ("locked memory", "8.0 MiB", "LimitMEMLOCK=infinity"),
        ("gpudirect", "no way for RDMA", "modprobe nvidia-peermem"),
        ("iommu", "translates for mlx5_0", "iommu=pt"),
        ("pcie 0000:3c:00.0", "another socket", "slot of the GPU's socket"),
        ("pcie mlx5_0", "x8 at 32.0 GT/s PCIe; it could have x16", "lanes"),
    ],
)
def test_each_trouble_of_a_bad_host_comes_with_its_remedy(tmp_path: Path, check: str, cause: str, remedy: str) -> None:
    finding = examined(bad_host(tmp_path), Role.HOST)[check]
    assert finding.state is State.WARN
    assert cause in finding.cause
    assert remedy in finding.remedy


def test_losses_are_told_and_judged_by_nobody(tmp_path: Path) -> None:
    found = examined(bad_host(tmp_path), Role.HOST)["rdma mlx5_0/1 losses"]
    assert (found.state, found.cause) == (State.INFO, "since the driver was loaded: out_of_sequence 17")


def test_a_bad_server_of_drives(tmp_path: Path) -> None:
    found = examined(bad_jbof(tmp_path), Role.JBOF)
    assert in_state(found, State.WARN) == {"pcie drives", "pcie nvme1"}
    assert "nvme0, nvme1; mlx5_0 on 0" in found["pcie drives"].cause
    assert "x2 at" in found["pcie nvme1"].cause
    assert found["module nvmet"].state is State.INFO, "without a configuration nobody knows that it is needed"
    assert found["module nvmet"].remedy.startswith("modprobe nvmet")


def test_firmware_of_drives_is_told_not_that_of_a_fabric(tmp_path: Path) -> None:
    tree = good_jbof(tmp_path)
    tree.write("sys/class/nvme/nvme9/transport", "rdma").write("sys/class/nvme/nvme9/model", "Linux")
    tree.write("sys/class/nvme/nvme9/firmware_rev", "6.14")
    found = examined(tree, Role.JBOF)["drive firmware"]
    assert found.cause == "2 of SAMSUNG MZWLO3T8HCLS with OPPA4B5Q"


def test_a_dpu_without_rdma(tmp_path: Path) -> None:
    tree = bare(tmp_path)
    assert examined(tree, Role.DPU)["rdma"].state is State.WARN
    assert examined(tree, Role.HOST)["rdma"].state is State.INFO, "a service on one machine needs none"


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv"])
def test_in_a_container_absence_is_no_answer(tmp_path: Path, mark: str) -> None:
    tree = bare(tmp_path)
    tree.write(mark, "")
    found = examined(tree, Role.DPU)["rdma"]
    assert found.state is State.UNSEEN
    assert "in this container" in found.cause


def test_where_nothing_is_shown_nothing_is_well(tmp_path: Path) -> None:
    found = examined(Tree(tmp_path), Role.HOST, clock=None)
    assert {"kernel", "modules", "rdma", "gpudirect", "clock"} <= in_state(found, State.UNSEEN)
    assert in_state(found, State.OK) == set()


def test_what_may_not_be_read_is_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = good_host(tmp_path)
    real = Path.read_text

    def read(path: Path, *arguments: Any, **named: Any) -> str:
        if path.name in ("state", "osrelease"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", read)
    found = examined(tree, Role.HOST)
    for check in ("kernel", "rdma"):
        assert found[check].state is State.UNSEEN
        assert "Permission denied" in found[check].cause
        assert "as root" in found[check].remedy


def test_an_attribute_without_a_value_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers EINVAL for the type of a GID that is not in use."""
    tree = good_host(tmp_path)
    real = Path.read_text

    def read(path: Path, *arguments: Any, **named: Any) -> str:
        if path.parent.name == "types" and path.name == "0":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", read)
    assert "rdma mlx5_0/1 address" not in examined(tree, Role.HOST), "another one is RoCE v2"


@pytest.mark.parametrize(
    ("clock", "state"),
    [
        (SYNCED, State.OK),
        (ClockState(STA_UNSYNC, 16_000_000), State.WARN),
        (ClockState(0, 400_000), State.WARN),
        (None, State.UNSEEN),
    ],
)
def test_the_clock(tmp_path: Path, clock: ClockState | None, state: State) -> None:
    assert examined(bare(tmp_path), Role.HOST, clock)["clock"].state is state
