"""What is asked for by name and stays impossible does not start; what may still come does."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.dpu.api.types import Attachment, Namespace
from meshfusion.host.path import start_check
from meshfusion.host.path.block_layout import DataSight, Runs, look_at_data
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.start_check import check_attached_path
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.direct import ASSUMED_ALIGNMENT, DirectAlignment
from meshfusion.jbof.media.fabrics import FabricsLink

ALIGNMENT = DirectAlignment(512, 4096, is_told=True)
FITS = Runs(8192, 512)


def attachment(path: Path) -> Attachment:
    return Attachment("pool", "one", 1, (Namespace(1, str(path), 4096, 1 << 20),), "/run/one.alive", 30.0, 60.0, 5.0)


def seen(
    monkeypatch: pytest.MonkeyPatch,
    *,
    direct: bool = True,
    alignment: DirectAlignment | None = ALIGNMENT,
    fabrics: tuple[FabricsLink, ...] = (),
) -> Attachment:
    sight = DataSight(Path("/pool/data"), direct, "refused (EINVAL)", alignment, fabrics)
    monkeypatch.setattr(start_check, "look_at_data", lambda path: sight)
    return attachment(sight.path)


def test_what_fits_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_attached_path(PathKind.BLOCK, seen(monkeypatch), FITS)
    check_attached_path(PathKind.BLOCK, seen(monkeypatch, fabrics=(FabricsLink("nvme0", "tcp", 5),)), FITS)


def test_no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (seen(monkeypatch, direct=False), seen(monkeypatch, alignment=None)):
        with pytest.raises(
            UnsupportedError, match=r"^the block path is asked for and not possible: /pool/data"
        ) as caught:
            check_attached_path(PathKind.BLOCK, there, FITS)
        assert "staged path" in caught.value.next_step


@pytest.mark.parametrize("runs", [Runs(512, 512), Runs(8192, 64), Runs(8192 + 512, 4096)])
def test_memory_that_does_not_keep_the_rules(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    with pytest.raises(UnsupportedError, match=r"^the block path is asked for and not possible: .*the kernel says"):
        check_attached_path(PathKind.BLOCK, seen(monkeypatch), runs)


def test_a_connection_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    there = seen(monkeypatch, fabrics=(FabricsLink("nvme0", "tcp", 600),))
    with pytest.raises(UnsupportedError, match=r"not possible: .* waits 600 s") as caught:
        check_attached_path(PathKind.BLOCK, there, FITS)
    assert "fast_io_fail_tmo" in caught.value.next_step


@pytest.mark.parametrize("wanted", [None, PathKind.STAGED, PathKind.RDMA])
def test_others_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, wanted: PathKind | None) -> None:
    there = seen(monkeypatch, direct=False)
    monkeypatch.setattr(start_check, "look_at_data", lambda path: pytest.fail("looked"))
    check_attached_path(wanted, there, Runs(1, 1))


def test_a_pool_out_of_reach_is_no_reason(tmp_path: Path) -> None:
    check_attached_path(PathKind.BLOCK, attachment(tmp_path / "none"), Runs(1, 1))


def test_a_real_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(LBA_BYTES))
    data = look_at_data(path)
    if not data.direct or data.alignment is None:
        with pytest.raises(UnsupportedError):
            check_attached_path(PathKind.BLOCK, attachment(path), Runs(LBA_BYTES, LBA_BYTES))
        return
    check_attached_path(PathKind.BLOCK, attachment(path), Runs(ASSUMED_ALIGNMENT.granule_bytes, LBA_BYTES))
    with pytest.raises(UnsupportedError, match=f"runs of {data.alignment.granule_bytes + 4} bytes"):
        check_attached_path(PathKind.BLOCK, attachment(path), Runs(data.alignment.granule_bytes + 4, LBA_BYTES))
