"""Which engine gets places, and hears of chunks, on which drives."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from meshfusion.dpu.api.types import Access, ChunkRecord, Extent, Reached, Shard
from meshfusion.dpu.drive_reach import DriveReach
from meshfusion.dpu.store.effects import HolderRecord
from meshfusion.dpu.store.holders import Holder, HolderTable
from meshfusion.dpu.store.stored_chunks import StoredChunks
from meshfusion.jbof.pool_addresses import first_segment, namespace_of

SILENCE_S = 10.0


def chunk(*numbers: int) -> ChunkRecord:
    """With a shard on each of these drives."""
    shards = (
        Shard(rank, Extent(namespace_of(number), first_segment(number), 0, 1, 1), 0, 1, 4096, (b"digest--",))
        for rank, number in enumerate(numbers)
    )
    return ChunkRecord(bytes([*numbers, 255]).ljust(32), b"I" * 32, "default", 0, 0, 16, tuple(shards))


@dataclass
class Rig:
    table: HolderTable = field(default_factory=lambda: HolderTable((), silence_s=SILENCE_S, now_s=0.0))

    def __post_init__(self) -> None:
        self.reach = DriveReach(self.table)
        for holder_id, access in {"near": Access.LOCAL, "far": Access.NVMEOF}.items():
            self.come(holder_id, access)

    def come(self, holder_id: str, access: Access) -> None:
        record = HolderRecord(holder_id, "vllm", "1", "h", 1, b"I" * 32, access=access)
        self.table.add(Holder(record, last_seen_s=0.0, current=True))

    def told(self, holder_id: str, *numbers: int) -> None:
        self.reach.told(holder_id, self.reach.version, numbers)

    def says(self, version: int, *numbers: int) -> None:
        self.reach.says("far", Reached(version, tuple(map(namespace_of, numbers))))

    def finds(self, holder_id: str, *chunks: ChunkRecord, offered: frozenset[int]) -> list[ChunkRecord]:
        found = {one.key: one for one in chunks}
        return list(self.reach.known_to(holder_id, StoredChunks.of(found), offered).values())


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_an_engine_of_this_machine_gets_places_anywhere(rig: Rig) -> None:
    rig.told("near", 0, 1)
    assert rig.reach.places_of("near") is None
    rig.reach.says("near", Reached(0, (1,)))
    assert rig.reach.places_of("near") is None, "it opens drives itself"


def test_a_host_that_was_told_of_no_drives_gets_no_places(rig: Rig) -> None:
    """One of an earlier life of the service, before it has come again."""
    assert rig.reach.places_of("far") == frozenset()
    assert rig.finds("far", chunk(0), offered=frozenset({0})) == []


def test_until_a_host_says_what_it_reaches_that_is_what_it_was_told(rig: Rig) -> None:
    rig.told("far", 0, 1)
    assert rig.reach.places_of("far") == frozenset({0, 1})
    rig.reach.has_come(2)
    rig.told("far", 0, 1, 2)
    assert rig.reach.places_of("far") == frozenset({0, 1}), "to be told again is no proof"
    rig.says(rig.reach.version, 0, 2)
    assert rig.reach.places_of("far") == frozenset({0, 2})


def test_a_report_says_nothing_of_drives_that_have_come_since(rig: Rig) -> None:
    rig.told("far", 0, 1)
    before = rig.reach.version
    rig.reach.has_come(1)  # it was gone, and is back
    assert rig.reach.places_of("far") == frozenset({0})
    rig.says(before, 0, 1)
    assert rig.reach.places_of("far") == frozenset({0})
    rig.says(rig.reach.version, 0, 1)
    assert rig.reach.places_of("far") == frozenset({0, 1})


def test_a_report_from_the_future_says_nothing_of_drives_that_come_later(rig: Rig) -> None:
    rig.says(99, 0, 1)
    rig.reach.has_come(1)
    assert rig.reach.places_of("far") == frozenset({0})


def test_what_lies_partly_on_a_drive_out_of_reach_is_a_miss(rig: Rig) -> None:
    rig.told("far", 0, 1)
    rig.reach.has_come(2)
    chunks = [chunk(0), chunk(0, 1), chunk(2), chunk(1, 2)]
    assert rig.finds("far", *chunks, offered=frozenset({0, 1, 2})) == chunks[:2]
    rig.told("near", 0, 1, 2)
    assert rig.finds("near", *chunks, offered=frozenset({0, 1, 2})) == chunks
    rig.reach.has_come(1)
    assert rig.finds("near", *chunks, offered=frozenset({0, 1, 2})) == [chunks[0], chunks[2]]


@pytest.mark.parametrize("holder_id", ["near", "far", "nobody"])
def test_who_knows_all_drives_gets_chunks_as_they_are_stored(rig: Rig, holder_id: str) -> None:
    """Not one by one: lookups ask for hundreds. A drive that is not offered does not matter: nothing on it is found."""
    for known in ("near", "far"):
        rig.told(known, 0, 1)
    stored = StoredChunks.of({one.key: one for one in (chunk(0), chunk(1))})
    assert rig.reach.known_to(holder_id, stored, frozenset({0, 1})) is stored
    rig.says(rig.reach.version, 0)
    assert rig.reach.known_to(holder_id, stored, frozenset({0})) is stored


def test_engines_here_know_all_when_those_that_live_have_asked(rig: Rig) -> None:
    rig.come("other", Access.LOCAL)
    rig.reach.has_come(0)
    rig.told("near", 0)
    assert not rig.reach.is_known_to_all_here(0.0)
    rig.told("other", 0)
    assert rig.reach.is_known_to_all_here(0.0), "hosts of a target are not waited for"
    rig.reach.has_come(1)
    assert not rig.reach.is_known_to_all_here(0.0)
    assert rig.reach.is_known_to_all_here(SILENCE_S), "nor is who is silent"


def test_who_has_left_is_forgotten(rig: Rig) -> None:
    rig.told("far", 0)
    rig.table.remove("far")
    rig.told("near", 0)
    rig.come("far", Access.NVMEOF)
    assert rig.reach.places_of("far") == frozenset()
    rig.table.remove("far")
    rig.says(rig.reach.version, 0)
    assert rig.reach.places_of("far") is None, "the store refuses it"


def test_each_change_is_another_version(rig: Rig) -> None:
    versions = [rig.reach.version]
    for change in (rig.reach.has_come, rig.reach.has_left, rig.reach.has_come):
        change(1)
        versions.append(rig.reach.version)
    assert versions == sorted(set(versions))
