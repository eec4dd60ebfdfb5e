"""The direct path of an engine's worker over FlexPath: loads go on when a path is lost in their midst."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.host.path.flexpath.multipath import Multipath
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.rdma import rdma_path
from meshfusion.host.path.shards import WriteFate
from meshfusion.jbof.digest import DigestKernels
from meshfusion.jbof.format import LBA_BYTES
from tests.host.path.flexpath.fake_path import NSID, Fabric
from tests.host.path.test_rdma import MAX_UNITS, Rig, aligned
from tests.host.support.staged_rig import into, wait
from tests.host.support.waiting import until


class PathsRig(Rig):
    def __init__(self, kernels: DigestKernels) -> None:
        self.kv = aligned()
        self.kv.fill(3)
        self.fabric = Fabric(2, 4 << 20)
        self.paths = Multipath(self.fabric.specs(), SpreadSettings())
        self.path = rdma_path(
            self.paths,
            {NSID},
            HostKvMemory(self.kv.memory, kernels),
            (self.kv.layout,),
            lba_bytes=LBA_BYTES,
            load_threads=2,
            read_bytes=64 << 10,
            max_units=MAX_UNITS,
        )

    def hold(self, is_held: bool) -> None:
        for (path,) in self.fabric.opened:
            path.holds = is_held


@pytest.fixture
def rig(kernels: DigestKernels) -> Iterator[PathsRig]:
    made = PathsRig(kernels)
    yield made
    assert made.path.close()


def test_saved_units_come_back_and_only_these_blocks_change(rig: PathsRig) -> None:
    expected = [rig.kv.unit(block) for block in (3, 1, 4)]
    reads = rig.save([3, 1, 4])
    rig.kv.fill(4)
    before = rig.kv.memory.copy()
    assert wait(rig.path.load(into(reads, [0, 2, 5]), abandon_after_s=10)).failures == ()
    assert [rig.kv.unit(block) for block in (0, 2, 5)] == expected
    assert rig.kv.untouched_except(before, [0, 2, 5])


def test_a_load_survives_the_loss_of_a_path(rig: PathsRig) -> None:
    expected = [rig.kv.unit(block) for block in (1, 2, 3, 4)]
    reads = rig.save([1, 2, 3, 4])
    rig.kv.fill(5)
    rig.hold(True)
    job = rig.path.load(into(reads, [0, 5, 6, 7]), abandon_after_s=30)
    (one,), (other,) = rig.fabric.opened
    until(lambda: (one.held and other.held) or None, what="for reads on both paths")
    rig.hold(False)
    for held in other.held:
        held.land()
        held.pending.end()
    other.held.clear()
    one.lose()
    assert wait(job).failures == ()
    assert [rig.kv.unit(block) for block in (0, 5, 6, 7)] == expected


def test_blocks_are_kept_until_the_lost_path_cannot_write_them(rig: PathsRig) -> None:
    reads = rig.save([1])
    rig.hold(True)
    job = rig.path.load(into(reads, [7]), abandon_after_s=0.3)
    until(lambda: any(path.held for (path,) in rig.fabric.opened) or None, what="for the read")
    (path,) = (path for (path,) in rig.fabric.opened if path.held)
    (held,) = path.held
    path.lose(free_memory=False)
    time.sleep(0.5)
    assert job.result(time.monotonic()) is None
    path.held.clear()
    held.land()
    held.pending.free_memory()
    assert [failure.index for failure in wait(job).failures] == [0]


def test_memory_of_all_paths_is_given_up_with_the_path(kernels: DigestKernels) -> None:
    made = PathsRig(kernels)
    (kept,) = (region for region in made.paths._links._regions if region.remote.length_bytes == made.kv.memory.nbytes)
    assert made.path.close()
    assert kept.is_closed
    assert kept.memory_owner is None


def test_a_save_over_a_path_that_is_lost_is_in_doubt(rig: PathsRig) -> None:
    rig.hold(True)
    rig.path.save([rig.shard([1])])
    until(lambda: any(path.held for (path,) in rig.fabric.opened) or None, what="for the write")
    (path,) = (path for (path,) in rig.fabric.opened if path.held)
    path.lose()
    assert rig.written().fate is WriteFate.UNKNOWN
    assert sum(what == "write" for _, what, _ in rig.fabric.log) == 1
