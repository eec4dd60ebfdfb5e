"""Which paths are possible, and that nothing is taken that was not asked for."""

from __future__ import annotations

import errno
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshfusion.host.memory.kv_memory import MemoryPlace
from meshfusion.host.path import probe
from meshfusion.host.path.block_layout import DataSight, look_at_data, look_at_folder
from meshfusion.host.path.path_kind import PathKind
from meshfusion.host.path.probe import (
    DEVICE_MEMORY_PREFERENCE,
    KvTarget,
    PathAnswer,
    PathReport,
    RdmaPort,
    RdmaSight,
    choose,
    look_for_rdma,
    report_paths,
)
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.direct import ASSUMED_ALIGNMENT, DirectAlignment
from meshfusion.jbof.media.fabrics import FabricsLink
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.jbof.media.file import open_data_file
from tests.host.support.kv_memory import layer_outermost

DIRECT = DataSight(Path("/pool/data"), True, "a read with O_DIRECT worked", DirectAlignment(4, 512, is_told=True))
CACHED = DataSight(Path("/pool/data"), False, "refused (EINVAL)", ASSUMED_ALIGNMENT)
CLOSED = DataFileError(MediaFault.MISSING, "opening failed", Path("/pool/data"), errno_=errno.ENOENT)
UP = RdmaPort("mlx5_0", 1, "ACTIVE", "Ethernet")
DOWN = RdmaPort("mlx5_1", 1, "DOWN", "InfiniBand")
NO_VERBS = UnsupportedError("pyverbs, which NVMe/RDMA needs, cannot be used: none", next_step="apt install it")
NO_RDMA = RdmaSight((), NO_VERBS)
NO_GPUDIRECT = UnsupportedError("it was not allocated for GPUDirect RDMA", next_step="Use the staged path.")


def target(page_bytes: int, address: int = 0x10000, **place: Any) -> KvTarget:
    layout = layer_outermost(page_bytes=page_bytes, gap_bytes=0, lead_bytes=0).layout
    return KvTarget(MemoryPlace(address, layout.memory_bytes, **place), (layout,))


def possible(report: PathReport) -> set[str]:
    return {answer.kind.value for answer in report.answers if answer.is_possible}


@pytest.mark.parametrize(
    ("data", "kv", "rdma", "expected"),
    [
        (DIRECT, target(1024), RdmaSight((UP,), None), {"rdma", "block", "staged"}),
        (DIRECT, None, NO_RDMA, {"block", "staged"}),
        (DIRECT, target(1236), NO_RDMA, {"staged"}),
        (DIRECT, target(1024, 0x10002), NO_RDMA, {"staged"}),
        (CACHED, target(4096), NO_RDMA, {"staged"}),
        (CACHED, None, RdmaSight((DOWN,), None), {"staged"}),
        (CLOSED, target(4096), RdmaSight((DOWN, UP), None), {"rdma"}),
        (CLOSED, None, RdmaSight((UP,), NO_VERBS), set()),
        (CLOSED, None, RdmaSight((), None), set()),
        (DIRECT, target(4096, device="cuda:0"), RdmaSight((UP,), None), {"rdma", "staged"}),
        (CLOSED, target(4096, device="cuda:0"), NO_RDMA, set()),
        (DIRECT, target(4096, device="cuda:0", rdma_error=NO_GPUDIRECT), RdmaSight((UP,), None), {"staged"}),
    ],
)
def test_what_is_possible(
    data: DataSight | DataFileError, kv: KvTarget | None, rdma: RdmaSight, expected: set[str]
) -> None:
    report = report_paths(data, kv, rdma)
    assert possible(report) == expected
    for answer in report.answers:
        assert answer.reason
        assert bool(answer.next_step) is not answer.is_possible


def test_the_report_says_why_and_what_to_do() -> None:
    report = report_paths(DIRECT, target(1236), RdmaSight((DOWN,), NO_VERBS))
    rdma, block, staged = str(report).splitlines()
    assert rdma.startswith("rdma: not possible: no RDMA port is active: mlx5_1 port 1 (InfiniBand) is DOWN (next step:")
    assert block.startswith("block: not possible: the KV layout has runs of 1236 bytes, not a multiple of the 512 that")
    assert "next step: Use the staged path" in block
    assert staged == "staged: possible: /pool/data opens; read with O_DIRECT"
    report = report_paths(CACHED, None, RdmaSight((UP, DOWN), None))
    assert str(report.answer(PathKind.RDMA)) == "rdma: possible: pyverbs works; mlx5_0 port 1 (Ethernet) is ACTIVE"
    assert "page cache (refused (EINVAL))" in report.answer(PathKind.STAGED).reason
    report = report_paths(CLOSED, None, RdmaSight((UP,), NO_VERBS))
    assert report.answer(PathKind.RDMA) == PathAnswer(PathKind.RDMA, False, NO_VERBS.message, "apt install it")
    assert "ENOENT" in report.answer(PathKind.STAGED).reason
    assert report.answer(PathKind.BLOCK).next_step == CLOSED.next_step


def test_what_a_device_s_memory_lacks_is_told() -> None:
    on_device = target(4096, device="cuda:0", rdma_error=NO_GPUDIRECT)
    for data in (DIRECT, CLOSED):
        block = report_paths(data, on_device, RdmaSight((UP,), None)).answer(PathKind.BLOCK)
        assert "the KV memory lies on cuda:0" in block.reason
        assert "cuFile" in block.reason
        assert "staged" in block.next_step
    rdma = report_paths(DIRECT, on_device, RdmaSight((UP,), None)).answer(PathKind.RDMA)
    assert (rdma.reason, rdma.next_step) == (NO_GPUDIRECT.message, NO_GPUDIRECT.next_step)


def test_on_a_device_s_memory_auto_goes_past_the_host_where_it_can() -> None:
    assert choose(report_of(tuple(PathKind)), None, DEVICE_MEMORY_PREFERENCE) is PathKind.RDMA
    assert choose(report_of((PathKind.STAGED, PathKind.BLOCK)), None, DEVICE_MEMORY_PREFERENCE) is PathKind.STAGED


def test_what_block_asks_for_is_told() -> None:
    told = report_paths(DIRECT, None, NO_RDMA).answer(PathKind.BLOCK).reason
    assert told == ("O_DIRECT works on /pool/data; for KV layouts with runs of whole 512 bytes, at multiples of 4")
    kept = report_paths(DIRECT, target(1024), NO_RDMA).answer(PathKind.BLOCK).reason
    assert "the KV layout has runs of whole 512 bytes" in kept
    unknown = DataSight(Path("/pool/data"), True, "", ASSUMED_ALIGNMENT)
    assert "4096 (assumed" in report_paths(unknown, None, NO_RDMA).answer(PathKind.BLOCK).reason


@pytest.mark.parametrize(
    ("wait_s", "block_is_possible", "words"),
    [
        (5, True, "over NVMe/tcp (nvme0), I/O fails 5 s after a connection is lost"),
        (600, False, "over NVMe/tcp (nvme0), I/O fails 600 s after a connection is lost"),
        (None, False, "over NVMe/tcp (nvme0), I/O waits for a lost connection for ever"),
    ],
)
def test_what_lies_behind_the_kernels_initiator_is_told(
    wait_s: int | None, block_is_possible: bool, words: str
) -> None:
    report = report_paths(replace(DIRECT, fabrics=(FabricsLink("nvme0", "tcp", wait_s),)), None, NO_RDMA)
    assert possible(report) == ({"block", "staged"} if block_is_possible else {"staged"})
    assert words in report.answer(PathKind.STAGED).reason
    assert (words in report.answer(PathKind.BLOCK).reason) is block_is_possible
    assert ("fast_io_fail_tmo" in report.answer(PathKind.BLOCK).next_step) is not block_is_possible


# ---- the choice ----------------------------------------------------------------------------------------------------


def report_of(kinds: tuple[PathKind, ...]) -> PathReport:
    return PathReport(
        tuple(
            PathAnswer(kind, kind in kinds, f"because of {kind.value}", "" if kind in kinds else f"mend {kind.value}")
            for kind in PathKind
        )
    )


SUBSETS = [subset for count in range(4) for subset in itertools.combinations(PathKind, count)]


@pytest.mark.parametrize("kinds", SUBSETS)
@pytest.mark.parametrize("wanted", list(PathKind))
def test_what_is_wanted_is_taken_or_refused(kinds: tuple[PathKind, ...], wanted: PathKind) -> None:
    if wanted in kinds:
        assert choose(report_of(kinds), wanted) is wanted
        return
    with pytest.raises(UnsupportedError, match=f"{wanted.value} path is asked for .* because of {wanted.value}") as e:
        choose(report_of(kinds), wanted)
    assert e.value.next_step == f"mend {wanted.value}"


@pytest.mark.parametrize("kinds", SUBSETS)
@pytest.mark.parametrize("preference", list(itertools.permutations(PathKind)))
def test_auto_takes_the_first_that_is_possible(kinds: tuple[PathKind, ...], preference: tuple[PathKind, ...]) -> None:
    if kinds:
        assert choose(report_of(kinds), None, preference) is min(kinds, key=preference.index)
        return
    with pytest.raises(UnsupportedError) as caught:
        choose(report_of(kinds), None, preference)
    assert all(f"{kind.value}: because of {kind.value}" in caught.value.message for kind in PathKind)
    assert caught.value.next_step == f"mend {preference[0].value}"


def test_auto_takes_only_what_it_may() -> None:
    with pytest.raises(UnsupportedError):
        choose(report_of((PathKind.STAGED,)), None, (PathKind.BLOCK, PathKind.RDMA))


def test_on_host_memory_auto_stages_before_it_goes_direct() -> None:
    """As measured: see HOST_MEMORY_PREFERENCE."""
    assert choose(report_of(tuple(PathKind)), None) is PathKind.STAGED
    assert choose(report_of((PathKind.RDMA,)), None) is PathKind.RDMA


# ---- what is seen --------------------------------------------------------------------------------------------------


def test_ports_as_the_kernel_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device, number, state, layer in (
        ("mlx5_0", 1, "4: ACTIVE\n", "Ethernet\n"),
        ("mlx5_0", 2, "1: DOWN\n", "InfiniBand\n"),
        ("rxe0", 1, None, None),
    ):
        port = tmp_path / device / "ports" / str(number)
        port.mkdir(parents=True)
        if state is not None and layer is not None:
            (port / "state").write_text(state)
            (port / "link_layer").write_text(layer)
    monkeypatch.setattr(probe, "load_verbs", lambda: None)
    seen = look_for_rdma(tmp_path)
    assert seen.ports == (
        RdmaPort("mlx5_0", 1, "ACTIVE", "Ethernet"),
        RdmaPort("mlx5_0", 2, "DOWN", "InfiniBand"),
        RdmaPort("rxe0", 1, "unknown", "unknown link"),
    )
    assert seen.verbs_error is None

    def missing() -> None:
        raise NO_VERBS

    monkeypatch.setattr(probe, "load_verbs", missing)
    assert look_for_rdma(tmp_path / "none") == RdmaSight((), NO_VERBS)


def test_data_is_seen_as_it_opens(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(LBA_BYTES))
    with open_data_file(path, writable=False) as data:
        assert look_at_data(path) == DataSight(path, data.direct, data.direct_reason, data.alignment)
        assert look_at_folder(tmp_path) == DataSight(tmp_path, data.direct, data.direct_reason, data.alignment)
    assert list(tmp_path.iterdir()) == [path], "nothing is left behind"
    for missing in (look_at_data, look_at_folder):
        with pytest.raises(DataFileError) as caught:
            missing(tmp_path / "none")
        assert caught.value.fault is MediaFault.MISSING
