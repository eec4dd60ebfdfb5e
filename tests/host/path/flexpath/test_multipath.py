"""Several initiators as one: memory under each path's own key, replays, doubts, access, many threads."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace

import numpy as np
import pytest

from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.requests import NoPathError
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.jbof.errors import ConfigError, MediaError
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.memory import MemoryInUseError
from meshfusion.jbof.nvme.pending import FateUnknownError
from tests.host.path.flexpath.fake_path import NSID, Fabric
from tests.host.path.flexpath.inventories import inventory_of
from tests.host.path.flexpath.multipath_rig import BLOCK, SETTINGS, rig, soon


def test_written_bytes_come_back_over_any_path() -> None:
    with rig(3) as r:
        rng = np.random.default_rng(1)
        r.array[:] = rng.integers(0, 256, r.array.nbytes, np.uint8)
        expected = r.array.copy()
        r.hold()
        pending = [r.write(block) for block in range(8)]
        assert len({number for number, _, _ in r.fabric.log}) == 3, "spread over all paths"
        for paths in r.fabric.opened:
            for held in paths[-1].held:
                held.land()
                held.pending.end()
            paths[-1].held.clear()
        for transfer in pending:
            transfer.wait()
        r.hold(False)
        r.paths.flush(NSID, timeout_s=1)
        assert bytes(r.fabric.medium[: 8 * BLOCK]) == expected.tobytes()
        r.array[:] = 0
        for block in range(8):
            r.read(block).wait()
        assert (r.array == expected).all()
        assert r.region.use_count == 0


def test_a_large_write_goes_over_all_paths_and_is_whole() -> None:
    with rig(settings=SpreadSettings(piece_bytes=BLOCK, probe_s=1e9)) as r:
        r.array[:] = np.random.default_rng(2).integers(0, 256, r.array.nbytes, np.uint8)
        r.hold()
        memory = [r.region.part(0, 3 * BLOCK), r.region.part(5 * BLOCK, BLOCK)]
        pending = r.paths.begin_write(NSID, 0, memory, timeout_s=5)
        assert sorted(lba for _, _, lba in r.fabric.log) == [0, 1, 2, 3]
        assert {number for number, _, _ in r.fabric.log} == {0, 1}
        for number in (0, 1):
            for held in r.fabric.path(number).held:
                assert not pending.has_ended
                held.land()
                held.pending.end()
            r.fabric.path(number).held.clear()
        pending.wait()
        assert r.region.use_count == 0
        expected = np.concatenate([r.array[: 3 * BLOCK], r.array[5 * BLOCK : 6 * BLOCK]])
        assert bytes(r.fabric.medium[: 4 * BLOCK]) == expected.tobytes()


def test_a_large_write_is_in_doubt_if_a_piece_is() -> None:
    with rig(settings=SpreadSettings(piece_bytes=BLOCK)) as r:
        r.hold()
        pending = r.paths.begin_write(NSID, 0, [r.region.all()], timeout_s=5)
        r.fabric.path(0).lose()
        assert not pending.has_ended, "the other path has pieces"
        for held in r.fabric.path(1).held:
            held.pending.end()
        r.fabric.path(1).held.clear()
        with pytest.raises(FateUnknownError):
            pending.wait()
        assert pending.wait_memory_free(1)


def test_a_read_is_replayed_when_its_path_says_that_nobody_can_write_any_more() -> None:
    with rig() as r:
        r.fabric.medium[:BLOCK] = b"x" * BLOCK
        r.hold()
        pending = r.read()
        path = r.holder()
        (held,) = path.held
        path.lose(free_memory=False)
        r.hold(False)
        time.sleep(0.05)
        assert not pending.has_ended
        assert len(r.fabric.log) == 1, "the other path must not be asked yet"
        held.land()
        path.held.clear()
        held.pending.free_memory()
        pending.wait()
        assert [what for _, what, _ in r.fabric.log] == ["read", "read"]
        assert r.array[:BLOCK].tobytes() == b"x" * BLOCK


def test_a_write_in_doubt_is_told_and_keeps_its_memory() -> None:
    with rig() as r:
        r.hold()
        pending = r.write()
        path = r.holder()
        (held,) = path.held
        path.lose(free_memory=False)
        with pytest.raises(FateUnknownError, match="the connection is gone") as caught:
            pending.wait()
        assert caught.value.transfer is pending
        assert not pending.wait_memory_free(0.02)
        with pytest.raises(MemoryInUseError):
            r.region.close()
        path.held.clear()
        held.pending.free_memory()
        assert pending.wait_memory_free(1)
        assert [what for _, what, _ in r.fabric.log] == ["write"]


def test_a_lost_path_is_left_alone_and_used_again_later() -> None:
    # Paths in memory are so fast that the other one would be preferred for ever, were it not for probes.
    with rig(settings=replace(SETTINGS, probe_s=0.3)) as r:
        r.fabric.path(0).lose()
        assert r.used() == {1}
        r.fabric.path(0).come_back()
        assert r.used(times=3) == {1}, "in quarantine"
        r.hold()
        seen = r.fabric.path(0).log
        before = len(seen)

        def is_used_again() -> bool:
            pending = [r.read(timeout_s=0.5) for _ in range(32)]
            for paths in r.fabric.opened:
                held, paths[-1].held = paths[-1].held, []
                for one in held:
                    one.pending.end()
            for transfer in pending:
                with contextlib.suppress(MediaError):
                    transfer.wait()
            return len(seen) > before

        soon(is_used_again, "for path 0")
        r.hold(False)


def test_without_any_path_it_fails_at_once() -> None:
    with rig() as r:
        for number in (0, 1):
            r.fabric.path(number).lose()
        with pytest.raises(NoPathError, match="p0: quarantined, p1: quarantined"):
            r.read().wait()


def test_access_states_are_respected() -> None:
    with rig() as r:
        r.fabric.path(0).set_access(AnaState.NON_OPTIMIZED)
        assert r.used() == {1}
        r.fabric.path(1).set_access(AnaState.INACCESSIBLE)
        assert r.used() == {0}
        r.fabric.path(1).set_access(AnaState.OPTIMIZED)
        assert r.used() == {1}


def test_another_namespace_under_the_same_number_is_not_touched() -> None:
    fabric = Fabric(2)
    fabric.options[1]["inventory"] = inventory_of(NSID, b"z" * 16)
    with rig(fabric=fabric) as r:
        assert r.used() == {0}
        r.fabric.path(0).lose()
        with pytest.raises(NoPathError, match="p1: does not have it"):
            r.write().wait()
        assert not any(number == 1 for number, _, _ in fabric.log)


def test_a_path_is_disabled_and_enabled_by_its_name() -> None:
    with rig() as r:
        r.paths.disable("p0")
        assert r.used() == {1}
        assert [report.is_disabled for report in r.paths.reports()] == [True, False]
        r.paths.disable("p1")
        with pytest.raises(NoPathError, match="p0: disabled by an operator, p1: disabled by an operator"):
            r.read().wait()
        r.paths.enable("p0")
        assert r.used() == {0}
        with pytest.raises(ConfigError, match="p9") as caught:
            r.paths.disable("p9")
        assert "p0, p1" in caught.value.next_step


def test_what_a_path_moved_and_what_went_wrong_there_is_reported() -> None:
    with rig(1) as r:
        r.read().wait()
        r.write().wait()
        r.write().wait()
        (report,) = r.paths.reports()
        assert (report.read_bytes, report.written_bytes, report.last_error) == (BLOCK, 2 * BLOCK, "")
        r.fabric.path(0).lose()
        (report,) = r.paths.reports()
        assert report.last_error == "the connection is gone"


def test_whoever_asked_hears_of_the_end_once() -> None:
    heard = []
    with rig() as r:
        r.paths.when_closed(lambda: heard.append("closed"))
        assert heard == []
    r.paths.close(timeout_s=1.0)
    assert heard == ["closed"]


def test_paths_are_reported() -> None:
    with rig() as r:
        r.hold()
        pending = [r.read(), r.read()]
        r.fabric.path(1).lose()
        first, second = r.paths.reports()
        assert (first.name, first.state, first.outstanding_bytes) == ("p0", PathState.LIVE, 2 * BLOCK), "one replayed"
        assert (second.name, second.state, second.outstanding_bytes) == ("p1", PathState.QUARANTINED, 0)
        assert not first.is_measured
        for held in r.fabric.path(0).held:
            held.pending.end()
        r.fabric.path(0).held.clear()
        for transfer in pending:
            transfer.wait()
        r.hold(False)
        r.used()
        first, _ = r.paths.reports()
        assert first.is_measured
        assert first.outstanding_bytes == 0
        assert 0 < BLOCK / first.bandwidth_bytes_per_s + first.latency_s < 1
