"""Several savers for one batch: one prepares while another's write is under way, and nothing is mixed up."""

from __future__ import annotations

import threading

from meshfusion.host.memory.host_memory import ALREADY_PRODUCED
from meshfusion.host.memory.kv_memory import Produced
from meshfusion.host.path.medium import Loader, Saver
from meshfusion.host.path.movers import Savers, each_by_the_next
from meshfusion.host.path.shards import ShardWrite, ShardWritten
from meshfusion.jbof.errors import MediaError, MeshFusionError
from tests.host.support.shard_writes import shard_write


class NamedSaver:
    def __init__(self, name: int) -> None:
        self.name = name
        self.is_closed = False

    def write(self, shard: ShardWrite) -> tuple[bytes, ...]:
        return (bytes([self.name]) * 8,)

    def flush(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class CountingMedium:
    """Makes ``most`` savers, and no more."""

    read_lbas = 1
    save_depth = 2

    def __init__(self, most: int) -> None:
        self.most = most
        self.savers: list[NamedSaver] = []

    def saver(self) -> Saver:
        if len(self.savers) == self.most:
            raise MediaError("no memory", next_step="-")
        self.savers.append(NamedSaver(len(self.savers)))
        return self.savers[-1]

    def loader(self) -> Loader:
        raise NotImplementedError

    def produced(self) -> Produced:
        return ALREADY_PRODUCED

    def interrupt(self, deadline_s: float) -> None: ...

    def close(self) -> None: ...


def test_writes_are_shared_and_told_in_their_order() -> None:
    both = threading.Barrier(2)
    savers = [NamedSaver(0), NamedSaver(1)]
    writes = [shard_write(4096, [0], 256, save_id=i) for i in range(6)]
    by: dict[tuple[int, int], int] = {}

    def save(write: ShardWrite, saver: Saver) -> ShardWritten:
        assert isinstance(saver, NamedSaver)
        if write.save_id[1] < 2:
            both.wait(10)  # breaks unless both are under way at once
        by[write.save_id] = saver.name
        return ShardWritten(write.save_id, saver.write(write))

    results = each_by_the_next(savers, writes, save)
    assert [result.save_id for result in results] == [write.save_id for write in writes]
    assert {by[0, 0], by[0, 1]} == {0, 1}
    assert all(result.unit_digests == (bytes([by[result.save_id]]) * 8,) for result in results)


def test_as_many_savers_as_there_are_writes_and_the_medium_allows() -> None:
    medium = CountingMedium(9)
    savers = Savers(medium)
    counts = []
    for write_count in (1, 2, 5, 1):
        made = savers.made(write_count)
        assert not isinstance(made, MeshFusionError)
        counts.append(len(made))
    assert counts == [1, 2, 2, 1]
    assert len(medium.savers) == 2, "one with the path, the other when it was needed"
    savers.close()
    assert all(saver.is_closed for saver in medium.savers)


def test_one_does_it_alone_where_there_is_no_second() -> None:
    medium = CountingMedium(1)
    made = Savers(medium).made(5)
    assert not isinstance(made, MeshFusionError)
    assert len(made) == 1


def test_without_any_the_reason_is_told_until_there_is_one() -> None:
    medium = CountingMedium(0)
    savers = Savers(medium)
    refused = savers.made(3)
    assert isinstance(refused, MediaError)
    medium.most = 2
    made = savers.made(3)
    assert not isinstance(made, MeshFusionError)
    assert len(made) == 2
