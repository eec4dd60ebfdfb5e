"""``mfctl path test`` against a real service whose kernel target and RDMA paths are in memory."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.types import Attachment
from meshfusion.dpu.export.desired import Address, Listener
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.export.nvmet.target import NvmetTarget
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, nqn_prefix_of
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.host.path.flexpath.addresses import PathAddress
from meshfusion.host.path.flexpath.link import OnEvent, PathSpec
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.nvme.inventory import Inventory
from meshfusion.jbof.nvme.namespaces import NamespaceIds
from meshfusion.tools.mfctl import path_trial
from meshfusion.tools.mfctl.main import mfctl
from meshfusion.tools.mfctl.path_trial import ReadLoad, Way, percentile
from tests.dpu.export.fake_nvmet import FakeKernel
from tests.dpu.pool_cases import SIZE_BYTES, make_pool
from tests.host.path.flexpath.fake_path import NGUID, FakePath
from tests.host.path.flexpath.inventories import namespace
from tests.host.path.test_exported_drives import Target as ExportedDrives
from tests.host.support.waiting import until

PORTALS = ("10.0.0.1", "10.0.1.1")
NSID = 1
SECTOR_BYTES = 512


class Target:
    """The pool's service and kernel, and a path for each of its portals. ``change``: of a path when it is opened."""

    def __init__(self, folder: Path) -> None:
        make_pool(folder / "pool")
        self.data = (folder / "pool" / "data").resolve()
        self.kernel = FakeKernel({str(self.data)})
        self.pool = Pool.open(folder / "pool", exports=self._keeper)
        self.server = serve(self.pool, f"unix://{folder}/s")
        self.change: Callable[[int, FakePath], None] = lambda number, path: None
        self.opened: list[FakePath] = []
        self.before = self.data.read_bytes()
        self.holders_seen: list[tuple[str, str]] = []

    def _keeper(self, pool_uuid: uuid.UUID, layout: PoolLayout) -> ExportKeeper:
        listeners = frozenset(Listener(Address("rdma", portal)) for portal in PORTALS)
        plan = ExportPlan(
            TargetKind.NVMET, nqn_prefix_of(pool_uuid), pool_uuid, {0: str(layout.data.resolve())}, listeners
        )
        return ExportKeeper(NvmetTarget(self.kernel, plan.export(()), patience_s=0.1), plan, period_s=0.05)

    def ways_to(self, attachment: Attachment) -> list[Way]:
        assert attachment.export is not None
        ways = []
        for number, portal in enumerate(attachment.export.portals):
            address = PathAddress(portal.address, portal.service, f"eth{number}", f"10.0.{number}.7")
            ways.append(Way(address, PathSpec(address.name, partial(self._open, number, attachment))))
        return ways

    def _open(self, number: int, attachment: Attachment, on_event: OnEvent) -> FakePath:
        export = attachment.export
        assert export is not None
        if (export.host_nqn, str(self.data)) not in self.kernel.reachable():
            raise MediaError("the target refuses this host", next_step="attach first")
        status = self.pool.status(deadline_s=5.0)
        self.holders_seen += [(holder.engine_version, holder.access) for holder in status.holders]
        assert all(path.is_closed for path in self.opened), "each path is tried alone"
        shown = namespace(NSID, NamespaceIds(nguid=NGUID), lba_bytes=SECTOR_BYTES)
        path = FakePath(0, nsid=NSID, on_event=on_event, inventory=Inventory(MappingProxyType({NSID: shown})))
        path.medium = bytearray(self.data.read_bytes())
        path.lba_bytes = SECTOR_BYTES
        self.change(number, path)
        self.opened.append(path)
        return path

    def test(self, *options: str) -> Result:
        arguments = ["path", "test", "--service", self.server.address, "--seconds", "0.1", "--size", "64KiB", *options]
        return CliRunner().invoke(mfctl, arguments)

    def check_left(self) -> None:
        """Nobody is attached any more, long before a silent holder would be cut off, and no byte of data changed."""
        until(lambda: not self.pool.status(deadline_s=5.0).holders, limit_s=2.0, what="for nobody to be attached")
        assert self.data.read_bytes() == self.before


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    made = Target(tmp_path)
    monkeypatch.setattr(path_trial, "ways_to", made.ways_to)
    yield made
    made.server.stop(0.0)
    made.pool.close()


def failing(number: int, error: MediaError) -> Callable[[int, FakePath], None]:
    def change(opened: int, path: FakePath) -> None:
        if opened == number:
            path.error = error

    return change


def test_each_path_is_read_over_alone_and_told(target: Target) -> None:
    began_s = time.monotonic()
    result = target.test("--depth", "3", "--format", "json")
    took_s = time.monotonic() - began_s
    assert result.exit_code == 0, result.output
    outcomes = json.loads(result.output)["paths"]
    assert [(outcome["local_port"], outcome["portal"]) for outcome in outcomes] == [
        ("eth0 10.0.0.7", "rdma://10.0.0.1:4420"),
        ("eth1 10.0.1.7", "rdma://10.0.1.1:4420"),
    ]
    for outcome, path in zip(outcomes, target.opened, strict=True):
        reads = path.log[2:]  # after the label's copies
        assert outcome["error"] == ""
        assert outcome["read_bytes"] == len(reads) * (64 << 10)
        assert outcome["bytes_per_s"] >= outcome["read_bytes"] / took_s
        assert 0 < outcome["median_s"] <= outcome["p99_s"] < 5
        assert {what for what, _ in path.log} == {"read"}, "never writes"
        assert all(lba % 128 == 0 and (lba + 128) * SECTOR_BYTES <= SIZE_BYTES for _, lba in reads)
        assert len({lba for _, lba in reads}) > 1
        assert path.is_closed
    assert target.holders_seen == [("mfctl path test", "nvmeof")] * 2
    target.check_left()


def test_people_get_a_table(target: Target) -> None:
    result = target.test()
    assert result.exit_code == 0
    header, first, second = result.output.splitlines()
    assert header.split("  ")[0] == "LOCAL PORT"
    assert first.startswith("eth0 10.0.0.7  rdma://10.0.0.1:4420  ")
    assert first.endswith("  works")
    assert second.startswith("eth1 10.0.1.7  rdma://10.0.1.1:4420  ")


def test_a_path_that_does_not_work_is_told_and_the_others_are_tried(target: Target) -> None:
    target.change = failing(0, MediaError("the cable is out", next_step="plug it in"))
    result = target.test()
    assert result.exit_code == 1
    _, first, second = result.stdout.splitlines()
    assert first.endswith("the cable is out")
    assert second.endswith("works")
    assert "1 of 2 paths do not work; eth0 10.0.0.7 to rdma://10.0.0.1:4420: the cable is out" in result.stderr
    assert "next step: plug it in" in result.stderr
    assert all(path.is_closed for path in target.opened)
    target.check_left()


@pytest.mark.parametrize(
    ("is_lost", "told"),
    [(True, "its fate is unknown: the connection is gone"), (False, "reads neither come back nor fail")],
)
def test_a_path_that_breaks_or_falls_silent_under_reads(
    target: Target, monkeypatch: pytest.MonkeyPatch, is_lost: bool, told: str
) -> None:
    monkeypatch.setattr(path_trial, "READ_TIMEOUT_S", 0.5 if is_lost else 0.05)
    monkeypatch.setattr(path_trial, "check_pool", lambda *_: None)

    def hold(number: int, path: FakePath) -> None:
        if number == 0:
            path.holds = True
            if is_lost:
                threading.Timer(0.1, path.lose).start()

    target.change = hold
    result = target.test()
    assert result.exit_code == 1
    assert [line.rsplit("  ", 1)[1] for line in result.stdout.splitlines()[1:]] == [told, "works"]
    assert all(path.is_closed and not path.held for path in target.opened)
    target.check_left()


def test_a_path_that_cannot_be_opened(target: Target) -> None:
    def refuse(number: int, path: FakePath) -> None:
        raise MediaError("nobody is there", next_step="look")

    target.change = refuse
    result = target.test("--format", "json")
    assert result.exit_code == 1
    assert [outcome["error"] for outcome in json.loads(result.stdout)["paths"]] == ["nobody is there"] * 2
    assert json.loads(result.stderr)["error"]["next_step"] == "look"
    target.check_left()


def test_another_pool_behind_a_portal_is_no_path(target: Target) -> None:
    def swap(number: int, path: FakePath) -> None:
        if number == 1:
            path.medium = bytearray(len(path.medium))

    target.change = swap
    result = target.test()
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].endswith("works")
    assert "rdma://10.0.1.1:4420" in result.stderr
    target.check_left()


def test_a_namespace_that_is_not_shown(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_trial, "APPEAR_S", 0.02)
    target.change = lambda number, path: setattr(path, "inventory", Inventory())
    result = target.test()
    assert result.exit_code == 1
    assert "does not show namespace 1" in result.stdout
    target.check_left()


def test_a_bug_on_the_way_still_detaches(target: Target) -> None:
    def crash(number: int, path: FakePath) -> None:
        raise ZeroDivisionError

    target.change = crash
    assert isinstance(target.test().exception, ZeroDivisionError)
    target.check_left()


def test_sizes_that_cannot_be_read_are_refused(target: Target) -> None:
    result = target.test("--size", "1000")
    assert result.exit_code == 1
    assert "multiple of 4096" in result.stderr
    assert "at most a drive's size" in target.test("--size", "1GiB", "--depth", "1").stderr
    assert target.test("--size", "1GiB", "--depth", "2").exit_code == 2
    assert target.test("--size", "much").exit_code == 2
    target.check_left()


def test_a_service_that_is_away_or_exports_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(mfctl, ["path", "test", "--service", f"unix://{tmp_path}/none"])
    assert result.exit_code == 5
    assert "cannot be reached" in result.stderr
    make_pool(tmp_path / "pool")
    pool = Pool.open(tmp_path / "pool")
    server = serve(pool, f"unix://{tmp_path}/s")
    try:
        result = CliRunner().invoke(mfctl, ["path", "test", "--service", server.address])
        assert result.exit_code == 1
        assert "next step" in result.stderr
        assert not pool.status(deadline_s=5.0).holders
    finally:
        server.stop(0.0)
        pool.close()


@pytest.mark.parametrize(
    ("part", "expected"), [(0.5, 50.0), (0.99, 99.0), (0.995, 100.0), (1.0, 100.0), (0.0, 1.0)]
)  # fmt: skip
def test_percentiles_are_values_that_were_seen(part: float, expected: float) -> None:
    """Nearest rank: ceil(part * count), of 1 to 100."""
    assert percentile([float(value) for value in range(100, 0, -1)], part) == expected
    assert percentile([7.0], part) == 7.0


def test_reads_go_to_every_drive_in_its_own_blocks() -> None:
    target: Any = ExportedDrives()
    shown = {
        nsid: namespace(nsid, NamespaceIds(nguid=bytes([nsid]) * 16), lba_bytes=lba_bytes)
        for nsid, lba_bytes in target.blocks.items()
    }
    target.inventory = Inventory(MappingProxyType(shown))
    load = ReadLoad(seconds=0.2, size_bytes=64 << 10, depth=2)
    drives = [api.Namespace(nsid, "", 4096, 1024) for nsid in shown]  # of 4 MiB
    reader = path_trial._Reader(target, drives, load, AlignedBuffer(load.size_bytes * load.depth))
    for nsid, text in zip(shown, (b"x", b"y"), strict=True):
        target.each[nsid].medium[7 * 4096 : 8 * 4096] = text * 4096
        assert reader.block(nsid, 7) == text * 4096
    _, latencies_s = reader.run()
    reads = {nsid: [lba for _, lba in target.each[nsid].log[1:]] for nsid in shown}
    assert sum(map(len, reads.values())) == len(latencies_s)
    for nsid, lbas in reads.items():
        blocks = (64 << 10) // target.blocks[nsid]
        assert len(set(lbas)) > 1, nsid
        assert all(lba % blocks == 0 and (lba + blocks) * target.blocks[nsid] <= 4 << 20 for lba in lbas)
