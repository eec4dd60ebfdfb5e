"""Links of the kernel's initiator, in a tree like sysfs of Linux 6.1; a real one is in ``tests/lab``."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from meshfusion.jbof.media.fabrics import FabricsLink, fabrics_links, longest_wait_s

DISK = os.makedev(259, 1)


def status_of(number: int, *, is_block_device: bool = True) -> os.stat_result:
    """As of a block device, or of a file on one."""
    fields = [0] * 20
    fields[0] = stat.S_IFBLK if is_block_device else stat.S_IFREG
    extra = {"st_rdev": number if is_block_device else 0}
    fields[2] = 0 if is_block_device else number
    return os.stat_result(fields[:10], extra)


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev" / "block").mkdir(parents=True)

    def disk(self, name: str, number: int, *, in_folder: str = "devices/virtual") -> Path:
        folder = self.root / in_folder / name
        folder.mkdir(parents=True)
        (self.root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(folder)
        return folder

    def controller(self, name: str, transport: str, fast: str = "off", loss: str = "600") -> Path:
        folder = self.root / "devices" / name
        folder.mkdir(parents=True)
        for attribute, text in (("transport", transport), ("fast_io_fail_tmo", fast), ("ctrl_loss_tmo", loss)):
            (folder / attribute).write_text(f"{text}\n")
        return folder

    def subsystem(self, *controllers: Path) -> Path:
        folder = self.root / "devices" / "nvme-subsys0"
        folder.mkdir(parents=True)
        for controller in controllers:
            (folder / controller.name).symlink_to(controller)
        (folder / "nvme0n1").mkdir()
        return folder


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_namespace_with_multipath_has_all_links_of_its_subsystem(tree: Tree) -> None:
    subsystem = tree.subsystem(tree.controller("nvme1", "tcp", "5"), tree.controller("nvme0", "tcp", "off", "120"))
    (tree.disk("nvme0n1", DISK) / "device").symlink_to(subsystem)
    assert fabrics_links(status_of(DISK), tree.root) == (
        FabricsLink("nvme0", "tcp", 120),
        FabricsLink("nvme1", "tcp", 5),
    )


def test_a_namespace_without_multipath_has_its_controller(tree: Tree) -> None:
    (tree.disk("nvme2n1", DISK) / "device").symlink_to(tree.controller("nvme2", "rdma", "7", "off"))
    assert fabrics_links(status_of(DISK), tree.root) == (FabricsLink("nvme2", "rdma", 7),)


def test_partitions_and_device_mapper_are_looked_through(tree: Tree) -> None:
    nvme = tree.disk("nvme0n1", DISK)
    (nvme / "device").symlink_to(tree.controller("nvme0", "tcp", "off", "off"))
    partition = tree.disk("nvme0n1p1", os.makedev(259, 2), in_folder="devices/virtual/nvme0n1")
    (partition / "partition").write_text("1\n")
    mapped = tree.disk("dm-0", os.makedev(253, 0))
    (mapped / "slaves").mkdir()
    (mapped / "slaves" / "nvme0n1p1").symlink_to(partition)
    expected = (FabricsLink("nvme0", "tcp", None),)
    assert fabrics_links(status_of(os.makedev(259, 2)), tree.root) == expected
    assert fabrics_links(status_of(os.makedev(253, 0)), tree.root) == expected
    assert fabrics_links(status_of(os.makedev(253, 0), is_block_device=False), tree.root) == expected


@pytest.mark.parametrize("transport", ["pcie", "loop"])
def test_drives_of_this_machine_have_none(tree: Tree, transport: str) -> None:
    (tree.disk("nvme0n1", DISK) / "device").symlink_to(tree.controller("nvme0", transport))
    assert fabrics_links(status_of(DISK), tree.root) == ()
    tree.disk("vda", os.makedev(254, 0))
    assert fabrics_links(status_of(os.makedev(254, 0)), tree.root) == ()


def test_what_sysfs_does_not_show_has_none(tree: Tree, tmp_path: Path) -> None:
    assert fabrics_links(status_of(DISK), tree.root) == ()
    assert fabrics_links(status_of(DISK), tmp_path / "none") == ()
    half = tree.controller("nvme3", "tcp")
    (half / "fast_io_fail_tmo").unlink()  # before Linux 5.11
    (tree.disk("nvme3n1", DISK) / "device").symlink_to(half)
    assert fabrics_links(status_of(DISK), tree.root) == (FabricsLink("nvme3", "tcp", 600),)
    (half / "ctrl_loss_tmo").unlink()
    assert fabrics_links(status_of(DISK), tree.root) == (FabricsLink("nvme3", "tcp", None),)


@pytest.mark.parametrize(("waits", "expected"), [((5,), 5), ((5, 600), 600), ((5, None), None), ((None,), None)])
def test_io_fails_when_the_most_patient_link_has_given_up(waits: tuple[int | None, ...], expected: int | None) -> None:
    links = tuple(FabricsLink(f"nvme{i}", "tcp", wait_s) for i, wait_s in enumerate(waits))
    assert longest_wait_s(links) == expected
