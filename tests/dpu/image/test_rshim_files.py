"""The rshim driver's protocol, over real files: what the fake gives is what the driver's source says."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.image.edge.rshim import LocalRshim
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.flash_types import PushEnded, PushMoved
from meshfusion.dpu.image.stream import Stream
from tests.dpu.image.fake_card import BF_CFG, tiny_bfb
from tests.dpu.image.rshim_mount import Mounted, mounted


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("dev") / "rshim0") as found:
        yield found


@pytest.fixture
def rshim(place: Mounted) -> Mounted:
    return place.renew()


def _stream(tmp_path: Path, size_bytes: int = 3_000_000) -> Stream:
    path = tmp_path / "image.bfb"
    path.write_bytes(tiny_bfb(size_bytes))
    return Stream(lambda: path.open("rb"), path.stat().st_size, BF_CFG)


def _push(rshim: LocalRshim, stream: Stream) -> list[PushMoved]:
    rshim.begin_push(stream)
    moved = []
    while isinstance(step := rshim.continue_push(), PushMoved):
        moved.append(step)
    assert isinstance(step, PushEnded)
    return moved


def test_what_it_says_is_read_and_set(rshim: Mounted) -> None:
    files = LocalRshim(rshim.folder)
    misc = files.read_misc()
    assert (misc.chip_family, misc.mode, misc.pci_device) == ("BlueField-3", "DPU mode", "0000:83:00")
    assert (misc.display_level, misc.log) == (0, ())
    files.set_misc("DISPLAY_LEVEL", 2)
    files.set_misc("CLEAR_ON_READ", 1)
    assert files.read_misc().log[-1] == " INFO[MISC]: DPU is ready"
    assert files.read_misc().log == (), "it was emptied by the first read"


def test_a_key_that_is_not_known_is_told_as_that(rshim: Mounted) -> None:
    with pytest.raises(CardError, match="misc: Invalid argument") as raised:
        LocalRshim(rshim.folder).set_misc("NO_SUCH_KEY", 1)
    assert raised.value.kind is FaultKind.BROKEN


def test_a_write_behind_the_beginning_is_refused(rshim: Mounted) -> None:
    descriptor = os.open(rshim.folder / "misc", os.O_WRONLY)
    with pytest.raises(OSError, match="Invalid argument") as raised:
        os.pwrite(descriptor, b"DISPLAY_LEVEL 2\n", 5)
    os.close(descriptor)
    assert raised.value.errno == errno.EINVAL


def test_all_of_a_stream_arrives(rshim: Mounted, tmp_path: Path) -> None:
    stream = _stream(tmp_path)
    moved = _push(LocalRshim(rshim.folder), stream)
    assert moved[-1].done_bytes < stream.bfb_bytes, "the end of the BFB goes with bf.cfg"
    assert rshim.state["pushed_bytes"] == stream.total_bytes
    assert (rshim.state["resets"], rshim.state["erased_pool_drives"]) == (1, 0)


def test_boot_is_opened_once_at_a_time(rshim: Mounted, tmp_path: Path) -> None:
    first, second = LocalRshim(rshim.folder), LocalRshim(rshim.folder)
    first.begin_push(_stream(tmp_path))
    with pytest.raises(CardError, match="Device or resource busy") as raised:
        second.begin_push(_stream(tmp_path))
    assert raised.value.kind is FaultKind.BUSY
    first.abandon_push()
    _until(lambda: not rshim.state["is_boot_open"])
    second.begin_push(_stream(tmp_path))
    second.abandon_push()
    assert rshim.state["installed"] == 0


@pytest.mark.parametrize(
    ("behaviour", "kind"), [({"is_dropped": True}, FaultKind.OWNED_ELSEWHERE), ({"is_locked": True}, FaultKind.LOCKED)]
)
def test_a_card_that_is_kept_from_us_is_not_reset(
    rshim: Mounted, tmp_path: Path, behaviour: dict[str, object], kind: FaultKind
) -> None:
    rshim.behave(**behaviour)
    with pytest.raises(CardError) as raised:
        LocalRshim(rshim.folder).begin_push(_stream(tmp_path))
    assert raised.value.kind is kind
    assert raised.value.next_step
    assert rshim.state["resets"] == 0


def test_a_card_that_takes_no_more_is_told_as_that(rshim: Mounted, tmp_path: Path) -> None:
    rshim.behave(stall_at_bytes=1_500_000)
    with pytest.raises(CardError, match="timed out") as raised:
        _push(LocalRshim(rshim.folder), _stream(tmp_path))
    assert raised.value.kind is FaultKind.STALLED


def test_a_driver_that_is_not_there_is_told_as_that(tmp_path: Path) -> None:
    for call in (LocalRshim(tmp_path / "rshim7").take, LocalRshim(tmp_path / "rshim7").read_misc):
        with pytest.raises(CardError, match="rshim7/misc: No such file or directory") as raised:
            call()
        assert raised.value.kind is FaultKind.GONE


def test_a_bfb_that_becomes_shorter_is_no_image(rshim: Mounted, tmp_path: Path) -> None:
    stream = _stream(tmp_path)
    files = LocalRshim(rshim.folder)
    files.begin_push(stream)
    os.truncate(tmp_path / "image.bfb", 1000)
    with pytest.raises(CardError, match="shorter"):
        _continue(files, 10)
    files.abandon_push()
    assert rshim.state["erased_pool_drives"] == 0


def _continue(files: LocalRshim, times: int) -> None:
    for _ in range(times):
        files.continue_push()


def _until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    give_up_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
