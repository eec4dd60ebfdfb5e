"""The targets that the same suite runs against, and a pool with one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from tests.dpu.export.fake_rpc import FakeRpc
from tests.dpu.export.fake_spdk import FakeSpdk
from tests.dpu.export.keeper_cases import Rig
from tests.dpu.export.real_spdk import RealSpdk

NVMF_TGT = os.environ.get("MESHFUSION_TEST_NVMF_TGT", "")
"""Path of an nvmf_tgt, with spdk_nvme_perf beside it: the suite runs against it too."""

collect_ignore = [] if NVMF_TGT else ["test_opening_spdk.py"]


class Spdk(Protocol):
    @property
    def rpc(self) -> SpdkRpc: ...

    def restart(self) -> None: ...

    def connect_host(self, nqn: str, host_nqn: str, *, key: Path | None = None, psk: Path | None = None) -> None:
        """``key``: the file of that with which it authenticates itself; ``psk``: of that of TLS."""

    def can_read(self, nqn: str, host_nqn: str, *, key: Path | None = None, psk: Path | None = None) -> bool:
        """Or is refused when it connects."""

    def slow_down(self, bdev: str, host_nqn: str) -> None:
        """This host's next writes to the bdev stay under way for longer than SPDK waits when it removes a host."""

    def finish(self, host_nqn: str) -> None:
        """They end; soon, if this cannot be brought about."""

    @property
    def until_writing_s(self) -> float:
        """How long from the first queue pair to the first write."""

    def stop(self) -> None: ...


class FakeRig:
    def __init__(self) -> None:
        self.rpc = FakeRpc()

    def restart(self) -> None:
        self.rpc.process = FakeSpdk()

    def connect_host(self, nqn: str, host_nqn: str, *, key: Path | None = None, psk: Path | None = None) -> None:
        assert self.rpc.process is not None
        self.rpc.process.connect_host(nqn, host_nqn, key, psk)

    def can_read(self, nqn: str, host_nqn: str, *, key: Path | None = None, psk: Path | None = None) -> bool:
        assert self.rpc.process is not None
        return self.rpc.process.lets_in(nqn, host_nqn, key, psk)

    def slow_down(self, bdev: str, host_nqn: str) -> None:
        assert self.rpc.process is not None
        assert bdev in self.rpc.process.bdevs
        self.rpc.process.stuck_hosts.add(host_nqn)

    def finish(self, host_nqn: str) -> None:
        assert self.rpc.process is not None
        self.rpc.process.finish(host_nqn)

    until_writing_s = 0.0

    def stop(self) -> None:
        self.rpc.process = None


@pytest.fixture(params=["fake", *(["real"] if NVMF_TGT else [])])
def spdk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spdk]:
    """An SPDK that waits for its start-up RPCs."""
    rig: Spdk = FakeRig() if request.param == "fake" else RealSpdk(Path(NVMF_TGT), tmp_path)
    yield rig
    rig.stop()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.pool.close()
