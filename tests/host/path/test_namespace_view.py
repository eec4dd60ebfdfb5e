"""A namespace in the pool's blocks, and what is read of it before it is trusted."""

from __future__ import annotations

import pytest

from meshfusion.host.path import namespace_view
from meshfusion.host.path.namespace_view import NamespaceView, read_blocks
from meshfusion.jbof.errors import MediaError, UnsupportedError
from tests.host.support.memory_namespace import NSID, MemoryNamespace


class Shown(MemoryNamespace):
    """``blocks``: of how many bytes its blocks are said to be."""

    blocks: int | None = 4096

    def lba_bytes(self, nsid: int) -> int | None:  # type: ignore[override]
        return self.blocks if nsid == NSID else None


@pytest.fixture
def shown() -> Shown:
    return Shown(1 << 20)


def test_blocks_are_counted_as_the_pool_does(shown: Shown) -> None:
    shown.medium[5 * 4096 : 6 * 4096] = b"x" * 4096
    assert read_blocks(NamespaceView(shown, NSID, lba_bytes=4096), NSID, 5, 4096) == b"x" * 4096


def test_smaller_blocks_of_the_target_are_taken_together(shown: Shown) -> None:
    shown.blocks = 512
    view = NamespaceView(shown, NSID, lba_bytes=4096)
    asked: list[int] = []
    begin = shown.begin_read

    def begin_read(nsid, lba, memory, *, timeout_s):  # type: ignore[no-untyped-def]
        asked.append(lba)
        return begin(nsid, lba // 8, memory, timeout_s=timeout_s)

    shown.begin_read = begin_read  # type: ignore[method-assign]
    shown.medium[3 * 4096 : 4 * 4096] = b"y" * 4096
    assert read_blocks(view, NSID, 3, 4096) == b"y" * 4096
    assert asked == [24]


@pytest.mark.parametrize("blocks", [8192, 520])
def test_blocks_that_do_not_fit_are_refused(shown: Shown, blocks: int) -> None:
    shown.blocks = blocks
    with pytest.raises(UnsupportedError, match=rf"blocks of {blocks} bytes"):
        NamespaceView(shown, NSID, lba_bytes=4096)


def test_a_namespace_that_nobody_shows(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_view, "APPEAR_S", 0.05)
    with pytest.raises(MediaError, match="does not show namespace 3"):
        NamespaceView(shown, 3, lba_bytes=4096)


def test_a_read_that_fails_leaves_nothing_registered_that_works(shown: Shown) -> None:
    shown.error = MediaError("no", next_step="-")
    with pytest.raises(MediaError, match="no"):
        read_blocks(NamespaceView(shown, NSID, lba_bytes=4096), NSID, 0, 4096)
