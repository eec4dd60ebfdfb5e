"""Several initiators as one: flushes, paths that come and go, and the end."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from meshfusion.host.path.flexpath.link import CurrentKey
from meshfusion.host.path.flexpath.requests import NoPathError
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.flexpath.spread import Spread
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.auth_keys import Secret
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.pending import FateUnknownError
from meshfusion.jbof.nvme.registration import DmaBufRange
from tests.host.path.flexpath.fake_path import NSID, Fabric
from tests.host.path.flexpath.multipath_rig import BLOCK, Rig, rig, soon

# ---- flushes ---------------------------------------------------------------------------------------------------------


def test_a_flush_goes_to_every_path_that_was_written_over() -> None:
    with rig(3) as r:
        r.write().wait()
        (written,) = {number for number, _, _ in r.fabric.log}
        r.paths.flush(NSID, timeout_s=1)
        assert [(number, what) for number, what, _ in r.fabric.log] == [(written, "write"), (written, "flush")]
        r.paths.flush(NSID, timeout_s=1)
        assert len(r.fabric.log) == 2, "there is nothing to flush"


def test_writes_that_a_connection_took_with_it_are_not_durable() -> None:
    with rig() as r:
        r.write().wait()
        ((written, _, _),) = r.fabric.log
        r.fabric.path(written).lose()
        r.fabric.path(written).come_back()
        with pytest.raises(MediaError, match=f"connection of p{written} was lost before"):
            r.paths.flush(NSID, timeout_s=1)
        r.paths.flush(NSID, timeout_s=1)


def test_a_flush_that_fails_is_told() -> None:
    with rig() as r:
        r.write().wait()
        ((written, _, _),) = r.fabric.log
        r.fabric.path(written).flush_error = MediaError("no flush", next_step="look")
        with pytest.raises(MediaError, match="no flush"):
            r.paths.flush(NSID, timeout_s=1)


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_a_new_key_goes_to_paths_that_are_there_and_to_those_that_come() -> None:
    former, new = Secret(bytes(32)), Secret(bytes(range(32)))
    fabric, key = Fabric(2), CurrentKey(former)
    fabric.closed.add(0)
    with rig(fabric=fabric, key=key) as r:
        there = fabric.path(1)
        r.paths.use_key(new)
        assert (there.host_keys[-1], key.secret) == (new, new)
        fabric.closed.clear()
        soon(lambda: fabric.opened[0] and fabric.path(0).host_keys == [new], "the new key there")


# ---- paths that come and go ------------------------------------------------------------------------------------------


def test_a_path_that_is_not_there_at_first_joins_with_all_memory() -> None:
    fabric = Fabric(2)
    fabric.closed.add(0)
    with rig(fabric=fabric) as r:
        assert r.fabric.opened[0] == []
        fabric.closed.clear()
        soon(lambda: fabric.opened[0], "for path 0")
        soon(lambda: fabric.path(0).keys, "for the memory")
        r.fabric.path(1).lose()
        soon(lambda: r.paths._spread.lanes[0].health.is_usable, "for path 0 to be used")
        assert {number for number, _, _ in r.fabric.log} <= {1}
        r.read().wait()
        assert (0, "read", 0) in r.fabric.log


def test_a_dma_buf_is_registered_with_every_path_and_those_to_come() -> None:
    with rig(2, fabric=Fabric(2, takes_dma_bufs=True, max_descriptors=4)) as r:
        region = r.paths.register_dma_buf(DmaBufRange(9, 0x1000, 64), writable=True, owner=object())
        for number in (0, 1):
            assert r.fabric.path(number).regions[-1].remote.address == 0x1000
        old = r.fabric.path(1)
        old.give_up()
        soon(lambda: r.fabric.path(1) is not old and len(r.fabric.path(1).regions) == 2, "for the path")
        assert r.fabric.path(1).regions[-1].remote.address == 0x1000
        region.close()
        assert all(r.fabric.path(number).regions[-1].is_closed for number in (0, 1))


def test_memory_that_one_path_cannot_register_is_left_with_none() -> None:
    fabric = Fabric(2, max_descriptors=4)
    fabric.options[0]["takes_dma_bufs"] = True
    with rig(2, fabric=fabric) as r:
        with pytest.raises(UnsupportedError):
            r.paths.register_dma_buf(DmaBufRange(9, 0x1000, 64), writable=True, owner=object())
        assert [region.is_closed for region in r.fabric.path(0).regions] == [False, True]
        r.read().wait()


def test_a_path_that_was_given_up_is_opened_anew() -> None:
    with rig() as r:
        old = r.fabric.path(0)
        old.give_up()
        soon(lambda: r.fabric.path(0) is not old, "for a new connection")
        assert old.is_closed
        r.fabric.path(1).lose()
        soon(lambda: r.paths._spread.lanes[0].health.is_usable, "for path 0 to be used")
        r.read().wait()
        assert r.fabric.path(0).log == [("read", 0)]


def test_a_path_that_takes_too_few_descriptors_does_not_join() -> None:
    fabric = Fabric(2, max_descriptors=16)
    fabric.options[0]["max_descriptors"] = 1
    fabric.closed.add(0)
    with rig(fabric=fabric) as r:
        assert r.paths.max_descriptors == 16
        fabric.closed.clear()
        soon(lambda: len(fabric.opened[0]) > 1, "for another attempt")
        assert fabric.opened[0][0].is_closed
        assert r.used() == {0} or not fabric.opened[0][0].log


def test_the_least_number_of_descriptors_counts() -> None:
    fabric = Fabric(2, max_descriptors=16)
    fabric.options[1]["max_descriptors"] = 4
    with rig(fabric=fabric) as r:
        assert r.paths.max_descriptors == 4


def test_no_path_at_all_is_refused_with_all_reasons() -> None:
    fabric = Fabric(2)
    fabric.closed |= {0, 1}
    with pytest.raises(NoPathError, match=r"p0: p0 does not answer; p1: p1 does not answer"):
        Rig(fabric=fabric)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_closing_ends_everything() -> None:
    r = Rig(settings=SpreadSettings(max_outstanding_bytes=BLOCK, min_outstanding_bytes=BLOCK))
    r.hold()
    pending = [r.read(block) for block in range(4)]
    r.paths.close(timeout_s=1.0)
    for transfer in pending:
        with pytest.raises(MediaError):
            transfer.wait()
        assert transfer.wait_memory_free(0)
    assert all(paths[-1].is_closed for paths in r.fabric.opened)
    assert len(r.fabric.log) == 2, "what waited is not sent, and nothing is replayed"
    with pytest.raises(NoPathError, match="closed"):
        r.read().wait()
    r.paths.close(timeout_s=1.0)


def test_a_queue_pair_that_does_not_die_is_told_when_all_others_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    r = Rig()

    def does_not_die(*, timeout_s: float) -> None:
        raise MediaError("a queue pair is left", next_step="end the process")

    monkeypatch.setattr(r.fabric.path(0), "close", does_not_die)
    with pytest.raises(MediaError, match="a queue pair is left"):
        r.paths.close(timeout_s=0.1)
    assert r.fabric.path(1).is_closed


def test_a_bug_leaves_nobody_waiting_and_frees_no_memory_early(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig() as r:
        r.hold()
        pending = r.read()
        path = r.holder()
        (held,) = path.held

        def bug(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Spread, "tick", bug)
        with pytest.raises(FateUnknownError, match="ended by a bug: ZeroDivisionError"):
            pending.wait()
        assert not pending.wait_memory_free(0.02)
        with pytest.raises(FateUnknownError, match="ended by a bug"):
            r.read().wait()
        path.held.clear()
        held.pending.end()
        assert pending.wait_memory_free(1)


def test_many_threads_at_once() -> None:
    """Every thread's bytes are its own, while paths come and go."""
    with rig(3) as r:
        r.fabric.medium[: 8 * BLOCK] = b"".join(bytes([n]) * BLOCK for n in range(1, 9))
        errors: list[BaseException] = []

        def load(block: int) -> None:
            array = np.zeros(BLOCK, np.uint8)
            region = r.register(array)
            try:
                for _ in range(100):
                    array[:] = 0
                    r.paths.begin_read(NSID, block, [region.all()], timeout_s=5).wait()
                    assert (array == block + 1).all()
                region.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=load, args=(block,)) for block in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            r.fabric.path(1).lose()
            r.fabric.path(2).set_access(AnaState.INACCESSIBLE)
            time.sleep(0.01)
            r.fabric.path(1).come_back()
            r.fabric.path(2).set_access(AnaState.OPTIMIZED)
        for thread in threads:
            thread.join()
        assert errors == []
