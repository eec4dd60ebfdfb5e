"""A virtual DPU from empty drives to hits: flashed, given a service, upgraded, broken on purpose and given back.

An emulated Arm machine with NVMe drives stands in for the card, behind the files of the rshim driver; the engine's side
is a guest at the other end of its port. All that happens to the card is done by ``mfctl dpu``, as an operator does it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.places import Places, default_cache
from meshfusion.tools.lab.progress import elapsed_notes
from meshfusion.tools.lab.qemu import TcgMachine
from meshfusion.tools.vdpu.hardware import drive_id, jbof_serial
from meshfusion.tools.vdpu.image import prepared_bfb
from tests.lab.conftest import machine_or_skip
from tests.lab.virtual_dpu import Bench, broken_source, served

DRIVES = 2
CHUNKS, UNITS = 6, 2  # of tests.lab.guest_pool_drives, which is for guests: it compiles digests when it is imported
UNIT_BYTES = 3 * (64 << 10)
HITS = {"hits": CHUNKS, "drives": DRIVES, "failures": [], "right": CHUNKS * UNITS, "bytes": CHUNKS * UNITS * UNIT_BYTES}
FLASHED = "it runs what was flashed"
_T = TypeVar("_T")


@pytest.fixture(scope="module")
def bfb() -> Path:
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not Path("/dev/fuse").exists():
        pytest.skip("needs hardware: root, /dev/net/tun and /dev/fuse, for the card's tmfifo and its rshim")
    try:
        return prepared_bfb(Places(default_cache()).vdpu, elapsed_notes())
    except LabError as error:
        pytest.skip(f"no system for a virtual card on this machine: {error}")


@pytest.fixture(scope="module")
def engine_machine() -> TcgMachine:
    machine = machine_or_skip("tcg")
    assert isinstance(machine, TcgMachine)
    return machine


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_a_card_is_flashed_serves_chunks_and_keeps_them_through_upgrades_and_a_broken_one(
    bfb: Path, engine_machine: TcgMachine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    bench.prepare()
    timed = _Timed(capsys)
    first = timed("build 1.0.0", lambda: bench.bundle("1.0.0"))
    second = timed("build 2.0.0", lambda: bench.bundle("2.0.0"))
    broken = timed("build 3.0.0", lambda: bench.bundle("3.0.0", broken_source(tmp_path / "broken")))
    with served(bench):
        assert FLASHED in timed("flash", lambda: bench.flash(first, bfb))
        drives_before = _labels(bench)
        _give_certificates(bench)
        timed("first service", lambda: bench.mfctl(*bench.upgrade_arguments(first)))
        assert _runs(bench) == ("a", "a", "1.0.0", True)
        assert timed("save", lambda: bench.client(engine_machine, "save")) == {"saved": CHUNKS, "drives": DRIVES}
        assert timed("load", lambda: bench.client(engine_machine, "load")) == HITS
        timed("upgrade", lambda: bench.mfctl(*bench.upgrade_arguments(second)))
        assert _runs(bench) == ("b", "b", "2.0.0", True)
        assert timed("load after the upgrade", lambda: bench.client(engine_machine, "load")) == HITS
        status, said = timed("broken upgrade", lambda: bench.mfctl_fails(*bench.upgrade_arguments(broken)))
        assert status == 1
        assert _runs(bench) == ("b", "b", "2.0.0", True), said
        assert timed("load after it was broken", lambda: bench.client(engine_machine, "load")) == HITS
        assert drives_before == ["", ""], "the installer wrote to drives of the JBOF"


class _Timed:
    """Tells how long each step took, past pytest's capture."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, what: str, step: Callable[[], _T]) -> _T:
        began_s = time.monotonic()
        result = step()
        with self._capsys.disabled():
            print(f"\n{what}: {time.monotonic() - began_s:.0f} s", flush=True)
        return result


def _labels(bench: Bench) -> list[str]:
    """What lies at the beginning of the JBOF's drives, in the first MiB, without zeros."""
    return [
        bench.ssh(f"head -c 1048576 {drive_id(jbof_serial(index))} | tr -d '\\0' | head -c 100")
        for index in range(DRIVES)
    ]


def _give_certificates(bench: Bench) -> None:
    for name, mode in (("service.pem", 644), ("service.key", 600), ("ca.pem", 644)):
        path = f"/etc/meshfusion/tls/{name}"
        bench.ssh(
            f"mkdir -p /etc/meshfusion/tls && cat > {path} && chmod {mode} {path}", (bench.tls / name).read_bytes()
        )


def _runs(bench: Bench) -> tuple[str, str, str, bool]:
    """Of the service: the slot that it runs from, the one that comes back, its version, whether it is ready."""
    (card,) = bench.status()["cards"]
    return card["running"], card["committed"], card["version"], card["is_ready"]
