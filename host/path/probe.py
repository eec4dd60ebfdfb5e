"""Which paths can this process take to its medium, and which one does it take? Decided here, and nowhere else.

What was seen comes in as values and the answer is a value, so that logs, ``mfctl doctor`` and the choice itself say
the same. What is asked for by name is taken or refused: there is no falling back that nobody hears of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshfusion.host.kv.group_layout import GroupLayout
from meshfusion.host.memory.kv_memory import MemoryPlace
from meshfusion.host.path.block_layout import OpenedData, check_block_layout, check_direct, check_patience
from meshfusion.host.path.path_kind import PathKind
from meshfusion.jbof.errors import MeshFusionError, UnsupportedError
from meshfusion.jbof.media.fabrics import longest_wait_s
from meshfusion.jbof.nvme.verbs_names import load_verbs

HOST_MEMORY_PREFERENCE: Final = (PathKind.STAGED, PathKind.BLOCK, PathKind.RDMA)
"""For KV memory of the host: what opens here is read here, and staged.

Measured in turns by ``tools/bench/path_rate.py`` on a virtual machine's disk, units of 1 MiB: into ordinary pages block
loads at 0.65 to 0.9 of the staged rate and takes 1.2 to 1.3 of its processor time; into huge pages at 0.8 to 1.0. The
likely cause: a staging buffer is a few huge pages that stay in the caches, so that the copy costs less than what many
small, cold pages cost a request. And the staged path gives an abandoned load's blocks back at once. Block is for those
who would rather not give memory to staging, or whose drive says otherwise: it was not measured on NVMe.
"""


DEVICE_MEMORY_PREFERENCE: Final = (PathKind.RDMA, PathKind.STAGED)
"""For KV memory of a device: past the host where the pool is exported, else copied by the device; not measured."""


@dataclass(frozen=True, slots=True)
class PathAnswer:
    """``reason``: what makes it possible, or not. ``next_step``: what to do where it is not, else ""."""

    kind: PathKind
    is_possible: bool
    reason: str
    next_step: str = ""

    def __str__(self) -> str:
        if self.is_possible:
            return f"{self.kind.value}: possible: {self.reason}"
        return f"{self.kind.value}: not possible: {self.reason} (next step: {self.next_step})"


@dataclass(frozen=True, slots=True)
class PathReport:
    """An answer for each kind, in the order of :class:`PathKind`. As text: a line each."""

    answers: tuple[PathAnswer, ...]

    def __post_init__(self) -> None:
        assert [answer.kind for answer in self.answers] == list(PathKind)

    def __str__(self) -> str:
        return "\n".join(map(str, self.answers))

    def answer(self, kind: PathKind) -> PathAnswer:
        return self.answers[list(PathKind).index(kind)]


# ---- what is seen --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """As the kernel shows it: ``state`` is ACTIVE, DOWN, INIT, ...; ``link_layer`` InfiniBand or Ethernet (RoCE)."""

    device: str
    number: int
    state: str
    link_layer: str

    def __str__(self) -> str:
        return f"{self.device} port {self.number} ({self.link_layer}) is {self.state}"


@dataclass(frozen=True, slots=True)
class RdmaSight:
    """``verbs_error``: why pyverbs cannot be used. None: it can."""

    ports: tuple[RdmaPort, ...]
    verbs_error: MeshFusionError | None


@dataclass(frozen=True, slots=True, eq=False)
class KvTarget:
    """The engine's memory: ``place.address`` is what the offsets of its KV groups' layouts count from."""

    place: MemoryPlace
    layouts: tuple[GroupLayout, ...]


def look_for_rdma(folder: Path = Path("/sys/class/infiniband")) -> RdmaSight:
    """Never raises: what cannot be read is not there."""
    try:
        load_verbs()
        verbs_error: MeshFusionError | None = None
    except UnsupportedError as error:
        verbs_error = error
    return RdmaSight(tuple(_port(place) for place in sorted(folder.glob("*/ports/*"))), verbs_error)


def _port(place: Path) -> RdmaPort:
    """``place``: .../DEVICE/ports/NUMBER, whose ``state`` reads "4: ACTIVE"."""
    state = _read(place / "state").partition(":")[2].strip() or "unknown"
    return RdmaPort(place.parent.parent.name, int(place.name), state, _read(place / "link_layer") or "unknown link")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# ---- what follows from it ------------------------------------------------------------------------------------------


def report_paths(data: OpenedData | MeshFusionError, target: KvTarget | None, rdma: RdmaSight) -> PathReport:
    """``data``: the medium as opened here, or why it does not open. ``target`` None: not known yet (no engine runs)."""
    return PathReport((rdma_answer(rdma, target), block_answer(data, target), staged_answer(data)))


def rdma_answer(rdma: RdmaSight, target: KvTarget | None = None) -> PathAnswer:
    """Possible means: on this side. Whether a target answers shows when connecting."""
    if not rdma.ports:
        return PathAnswer(
            PathKind.RDMA,
            False,
            "this machine shows no RDMA device",
            "Install an RDMA NIC and its driver, or use the block or the staged path.",
        )
    active = [port for port in rdma.ports if port.state == "ACTIVE"]
    if not active:
        return PathAnswer(
            PathKind.RDMA,
            False,
            "no RDMA port is active: " + ", ".join(map(str, rdma.ports)),
            "Bring a link up (`rdma link` shows them), or use the block or the staged path.",
        )
    if rdma.verbs_error is not None:
        return PathAnswer(PathKind.RDMA, False, rdma.verbs_error.message, rdma.verbs_error.next_step)
    if target is not None and target.place.rdma_error is not None:
        error = target.place.rdma_error
        return PathAnswer(PathKind.RDMA, False, error.message, error.next_step)
    return PathAnswer(PathKind.RDMA, True, "pyverbs works; " + ", ".join(map(str, active)))


def block_answer(data: OpenedData | MeshFusionError, target: KvTarget | None) -> PathAnswer:
    if target is not None and target.place.device:
        return PathAnswer(
            PathKind.BLOCK,
            False,
            f"the KV memory lies on {target.place.device}, and the kernel reaches a device's memory only with cuFile "
            "(GPUDirect Storage), which this version does not use",
            "Use the staged path, or rdma with a service that exports its pool.",
        )
    if isinstance(data, MeshFusionError):
        return PathAnswer(PathKind.BLOCK, False, data.message, data.next_step)
    try:
        alignment = check_direct(data)
        check_patience(data)
        if target is not None:
            check_block_layout(data, target.place.address, target.layouts)
    except UnsupportedError as error:
        return PathAnswer(PathKind.BLOCK, False, error.message, error.next_step)
    asked = f"runs of whole {alignment.granule_bytes} bytes, at multiples of {alignment.memory_bytes}"
    if not alignment.is_told:
        asked += " (assumed: this kernel does not tell)"
    kept = f"the KV layout has {asked}" if target is not None else f"for KV layouts with {asked}"
    return PathAnswer(PathKind.BLOCK, True, f"O_DIRECT works on {data.path}; {kept}{_over_fabrics(data)}")


def staged_answer(data: OpenedData | MeshFusionError) -> PathAnswer:
    if isinstance(data, MeshFusionError):
        return PathAnswer(PathKind.STAGED, False, data.message, data.next_step)
    how = "O_DIRECT" if data.direct else f"the page cache ({data.direct_reason})"
    return PathAnswer(PathKind.STAGED, True, f"{data.path} opens; read with {how}{_over_fabrics(data)}")


def _over_fabrics(data: OpenedData) -> str:
    if not data.fabrics:
        return ""
    wait_s = longest_wait_s(data.fabrics)
    waits = "waits for a lost connection for ever" if wait_s is None else f"fails {wait_s} s after a connection is lost"
    controllers = ", ".join(link.controller for link in data.fabrics)
    return f"; over NVMe/{data.fabrics[0].transport} ({controllers}), I/O {waits}"


def choose(
    report: PathReport, wanted: PathKind | None, preference: Sequence[PathKind] = HOST_MEMORY_PREFERENCE
) -> PathKind:
    """``wanted``, or where that is None (auto) the first of ``preference`` that is possible.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError` with the reason when what is wanted is not possible, or
    nothing is.
    """
    if wanted is not None:
        answer = report.answer(wanted)
        if not answer.is_possible:
            raise UnsupportedError(
                f"the {wanted.value} path is asked for and not possible: {answer.reason}", next_step=answer.next_step
            )
        return wanted
    assert preference, "auto needs something to choose from"
    answers = [report.answer(kind) for kind in preference]
    for answer in answers:
        if answer.is_possible:
            return answer.kind
    raise UnsupportedError(
        "no path to the medium is possible: " + "; ".join(f"{a.kind.value}: {a.reason}" for a in answers),
        next_step=answers[0].next_step,
    )
