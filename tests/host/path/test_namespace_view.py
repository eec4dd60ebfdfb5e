"""A namespace in the pool's blocks, and what is read of it before it is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from meshfusion.host.path.namespace_view import NamespaceView, read_blocks
from meshfusion.jbof.errors import MediaError, UnsupportedError
from meshfusion.jbof.nvme.memory import RegionPart
from meshfusion.jbof.nvme.pending import PendingTransfer
from tests.host.support.memory_namespace import NSID, MemoryNamespace


class Shown:
    """``blocks``: of how many bytes its blocks are said to be. The rest is the namespace's."""

    def __init__(self) -> None:
        self.namespace = MemoryNamespace(1 << 20)
        self.blocks: int | None = 4096
        self.asked: list[int] = []

    def lba_bytes(self, nsid: int) -> int | None:
        return self.blocks if nsid == NSID else None

    def begin_read(self, nsid: int, lba: int, memory: Sequence[RegionPart], *, timeout_s: float) -> PendingTransfer:
        self.asked.append(lba)
        at = lba * (self.blocks or 0) // 4096
        return self.namespace.begin_read(nsid, at, memory, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.namespace, name)


def view_of(shown: Any, nsid: int = NSID) -> NamespaceView:
    view = NamespaceView(shown, lba_bytes=4096)
    view.add(nsid)
    return view


@pytest.fixture
def shown() -> Any:
    return Shown()


def test_blocks_are_counted_as_the_pool_does(shown: Any) -> None:
    shown.medium[5 * 4096 : 6 * 4096] = b"x" * 4096
    assert read_blocks(view_of(shown), NSID, 5, 4096) == b"x" * 4096


def test_smaller_blocks_of_the_target_are_taken_together(shown: Any) -> None:
    shown.blocks = 512
    view = view_of(shown)
    shown.medium[3 * 4096 : 4 * 4096] = b"y" * 4096
    assert read_blocks(view, NSID, 3, 4096) == b"y" * 4096
    assert shown.asked == [24]


@pytest.mark.parametrize("blocks", [8192, 520])
def test_blocks_that_do_not_fit_are_refused(shown: Any, blocks: int) -> None:
    shown.blocks = blocks
    with pytest.raises(UnsupportedError, match=rf"blocks of {blocks} bytes"):
        view_of(shown)


def test_a_namespace_that_nobody_shows(shown: Any) -> None:
    with pytest.raises(MediaError, match="does not show namespace 3"):
        NamespaceView(shown, lba_bytes=4096).add(3, appear_s=0.05)


def test_a_read_that_fails_is_told_and_gives_its_memory_up(shown: Any) -> None:
    shown.namespace.error = MediaError("no", next_step="-")
    with pytest.raises(MediaError, match="no"):
        read_blocks(view_of(shown), NSID, 0, 4096)
    assert all(region.is_closed for region in shown.namespace.regions)
