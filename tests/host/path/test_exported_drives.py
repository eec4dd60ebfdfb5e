"""A namespace is used only when its label says that it is the drive that the service spoke of."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest

from meshfusion.dpu.api.types import Attachment, Namespace
from meshfusion.host.path import exported_drives
from meshfusion.host.path.exported_drives import open_exported
from meshfusion.host.path.namespace_view import read_blocks
from meshfusion.jbof.errors import FormatError, MediaError, UnsupportedError
from meshfusion.jbof.format import LABEL_LBAS, LBA_BYTES
from meshfusion.jbof.label import Label, encode_label
from tests.host.path.test_rdma_drives import FIRST, SECOND, TwoNamespaces

POOL = uuid.UUID(int=99)


class Target(TwoNamespaces):
    """Both drives labelled as they should be, in blocks of these sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, int] = {FIRST: 4096, SECOND: 512}
        for nsid, namespace in self.each.items():
            namespace.lba_bytes = self.blocks[nsid]
            self.label(nsid, nsid - 1)

    def label(self, nsid: int, drive_number: int, pool: uuid.UUID = POOL) -> None:
        raw = encode_label(Label(pool.bytes, b"d" * 16, 0, 256, 2, drive_number=drive_number))
        for lba in LABEL_LBAS:
            self.each[nsid].medium[lba * LBA_BYTES : (lba + 1) * LBA_BYTES] = raw

    def lba_bytes(self, nsid: int) -> int | None:
        return self.blocks.get(nsid)


def attachment(*nsids: int) -> Attachment:
    namespaces = tuple(Namespace(nsid, "", 4096, 1024) for nsid in nsids)
    return Attachment(str(POOL), "h", 1, namespaces, "", 1.0, 1.0, 1.0)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(exported_drives, "APPEAR_S", 0.05)
    return Target()


def test_both_are_proven_and_read_in_the_pools_blocks(target: Any) -> None:
    view, drives = open_exported(target, attachment(FIRST, SECOND))
    assert drives.nsids == {FIRST, SECOND}
    for nsid, text in ((FIRST, b"x"), (SECOND, b"y")):
        target.each[nsid].medium[7 * LBA_BYTES : 8 * LBA_BYTES] = text * LBA_BYTES
        assert read_blocks(view, nsid, 7, LBA_BYTES) == text * LBA_BYTES


def wrong_number(target: Any) -> None:
    target.label(SECOND, 1)


def the_first_drive_again(target: Any) -> None:
    target.label(SECOND, 0)


def wrong_pool(target: Any) -> None:
    target.label(SECOND, SECOND - 1, uuid.UUID(int=98))


def no_label(target: Any) -> None:
    target.each[SECOND].medium[: 2 * LBA_BYTES] = bytes(2 * LBA_BYTES)


def not_shown(target: Any) -> None:
    del target.blocks[SECOND]


def unreadable(target: Any) -> None:
    target.each[SECOND].error = MediaError("unrecovered read error", next_step="-")


def large_blocks(target: Any) -> None:
    target.blocks[SECOND] = 8192


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (wrong_number, FormatError, "is drive 1 of the pool, the service speaks of drive 2"),
        (the_first_drive_again, FormatError, "is drive 0 of the pool, the service speaks of drive 2"),
        (wrong_pool, FormatError, "the service speaks of"),
        (no_label, FormatError, "not a MeshFusion pool's label"),
        (not_shown, MediaError, "does not show namespace 3"),
        (unreadable, MediaError, "unrecovered read error"),
        (large_blocks, UnsupportedError, "blocks of 8192 bytes"),
    ],
)
def test_what_is_not_that_drive_is_left_out(
    target: Any, spoil: Any, error: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(target)
    with caplog.at_level(logging.ERROR):
        _, drives = open_exported(target, attachment(FIRST, SECOND))
    assert drives.nsids == {FIRST}
    assert "drive 2 is not reached" in caplog.text
    assert message in caplog.text
    with pytest.raises(error, match=message):
        open_exported(target, attachment(SECOND))


def test_a_drive_that_comes_is_proven_over_the_view_that_is_open(target: Any) -> None:
    view, drives = open_exported(target, attachment(FIRST))
    assert set(drives) == {FIRST}
    drives.reach(attachment(FIRST, SECOND))
    assert (set(drives), SECOND in drives, len(drives)) == ({FIRST, SECOND}, True, 2)
    assert read_blocks(view, SECOND, 7, LBA_BYTES) == bytes(LBA_BYTES)
    drives.reach(attachment(SECOND))
    assert set(drives) == {SECOND}, "the service speaks of the first no more"


def test_a_drive_that_is_another_one_when_it_is_back_is_used_no_more(target: Any) -> None:
    _, drives = open_exported(target, attachment(FIRST, SECOND))
    no_label(target)
    drives.reach(attachment(FIRST, SECOND))
    assert set(drives) == {FIRST}


def test_what_is_not_reached_is_told_once(target: Any, caplog: pytest.LogCaptureFixture) -> None:
    not_shown(target)
    with caplog.at_level(logging.ERROR):
        _, drives = open_exported(target, attachment(FIRST, SECOND))
        drives.reach(attachment(FIRST, SECOND))
    assert caplog.text.count("drive 2 is not reached") == 1


def test_where_none_is_reached_all_stay_as_they_were(target: Any) -> None:
    _, drives = open_exported(target, attachment(FIRST, SECOND))
    target.each[FIRST].error = target.each[SECOND].error = MediaError("unrecovered read error", next_step="-")
    with pytest.raises(MediaError, match="unrecovered"):
        drives.reach(attachment(FIRST, SECOND))
    assert set(drives) == {FIRST, SECOND}


def test_nothing_is_written_while_drives_are_proven(target: Any) -> None:
    open_exported(target, attachment(FIRST, SECOND))
    assert {what for namespace in target.each.values() for what, _ in namespace.log} == {"read"}
