"""What doctor says of a pool that is served."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api.server import serve
from meshfusion.dpu.pool import Pool
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.faults import DataFileError, MediaFault
from meshfusion.tools.mfctl.doctor import check_pool
from meshfusion.tools.mfctl.doctor_service import check_service
from meshfusion.tools.mfctl.findings import Finding, State
from tests.dpu.pool_cases import Holder, make_pool


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Pool]:
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool") as pool:
        server = serve(pool, f"unix://{tmp_path}/s")
        pool.announce_service(server.address)
        yield pool
        server.stop(1.0)


def found(path: Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in check_service(path)}


def test_a_service_that_is_well(tmp_path: Path, served: Pool) -> None:
    findings = found(tmp_path / "pool")
    assert [findings[check].state for check in ("service", "saves")] == [State.OK] * 2
    assert findings.keys() <= {finding.check for finding in check_pool(tmp_path / "pool")}
    assert f"unix://{tmp_path}/s" in findings["service"].cause


def test_saves_that_are_stopped_and_go_on(tmp_path: Path, served: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DataFileError(MediaFault.IO, "writing failed", Path("data"), errno_=errno.EIO)

    with Holder(served) as holder:
        with monkeypatch.context() as patch:
            patch.setattr(served._drives._open[0].file._data, "write_from", fail)
            with pytest.raises(MediaError):
                holder.reserve(0)
        saves = found(tmp_path / "pool")["saves"]
        assert saves.state is State.WARN
        assert all(words in saves.cause for words in ("EIO", "dmesg", "for 0 s")), saves.cause
        with served._mutex:
            served._store.saves._refused_until_s = 0.0
        assert holder.put(0)
        assert found(tmp_path / "pool")["saves"].state is State.OK


def test_a_pool_that_nobody_serves(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    assert found(tmp_path / "pool") == {}
    with Pool.open(tmp_path / "pool"):
        assert found(tmp_path / "pool") == {}, "an embedded one"
    with Pool.open(tmp_path / "pool") as pool:
        pool.announce_service(f"unix://{tmp_path}/gone")
        assert found(tmp_path / "pool")["service"].state is State.FAIL
    assert found(tmp_path / "pool") == {}, "what was announced is over"
