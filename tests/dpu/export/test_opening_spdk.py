"""A pool of two drives, exported by its service at a real SPDK. Collected only where there is one (conftest.py)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.config_exports import ExportsConfig, SpdkConfig
from meshfusion.dpu.export.errors import ExportError
from meshfusion.dpu.export.opening import keeper_of
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from tests.dpu.export.cases import PORT
from tests.dpu.export.conftest import NVMF_TGT
from tests.dpu.export.real_spdk import RealSpdk
from tests.dpu.pool_cases import DEADLINE_S, IDENTITY, SEGMENT_BYTES, SIZE_BYTES, make_pool


def test_a_real_spdk_exports_every_drive_of_a_pool_also_after_its_restart(tmp_path: Path) -> None:
    target = RealSpdk(Path(NVMF_TGT), tmp_path)
    try:
        config = ExportsConfig(
            target="spdk",
            portals=[f"tcp://127.0.0.1:{PORT}"],
            authenticate=False,
            spdk=SpdkConfig(socket=tmp_path / "spdk.sock", memory=512 << 20),
        )
        path = tmp_path / "pool"
        create_pool_of_drives(path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None] * 2)
        with Pool.open(path, exports=partial(keeper_of, config)) as pool:
            request = api.AttachRequest("one", "vllm", "1", "h", os.getpid(), IDENTITY, 1, access=api.Access.NVMEOF)
            attachment = pool.attach(request, deadline_s=DEADLINE_S)
            assert [namespace.nsid for namespace in attachment.namespaces] == [1, 2]
            assert attachment.export is not None
            expected = {
                1: (f"mf-{pool.pool_uuid}", str((path / "data").resolve())),
                2: (f"mf-{pool.pool_uuid}-1", str((path / "data.1").resolve())),
            }
            assert exported(target, attachment.export.subsystem_nqn) == expected
            target.restart()
            end_s = time.monotonic() + DEADLINE_S
            while exported(target, attachment.export.subsystem_nqn) != expected:
                assert time.monotonic() < end_s
                threading.Event().wait(0.2)
    finally:
        target.stop()


def exported(target: RealSpdk, nqn: str) -> dict[int, tuple[str, str]]:
    """(bdev, file) by NSID, as the target tells."""
    try:
        target.rpc.connect(5.0)
        subsystems = {report["nqn"]: report for report in target.rpc.call("nvmf_get_subsystems", 5.0)}
        bdevs = {bdev["name"]: bdev for bdev in target.rpc.call("bdev_get_bdevs", 5.0)}
    except ExportError:  # it is starting
        return {}
    return {
        namespace["nsid"]: (namespace["name"], bdevs[namespace["name"]]["driver_specific"]["aio"]["filename"])
        for namespace in subsystems.get(nqn, {}).get("namespaces", [])
    }


def test_two_pools_share_a_real_spdk_also_after_its_restart(tmp_path: Path) -> None:
    """Both keepers bring a fresh process up at once. Each host reaches the drives of its own pool."""
    target = RealSpdk(Path(NVMF_TGT), tmp_path)
    try:
        spdk = SpdkConfig(socket=tmp_path / "spdk.sock", memory=512 << 20)
        config = ExportsConfig(
            target="spdk",
            portals=[f"tcp://127.0.0.1:{PORT}"],
            authenticate=False,
            nqn_prefix="nqn.2026-01.io.meshfusion:y",
            spdk=spdk,
        )
        with contextlib.ExitStack() as opened:
            pools = []
            for name in ("red", "blue"):
                make_pool(tmp_path / name)
                pools.append(opened.enter_context(Pool.open(tmp_path / name, exports=partial(keeper_of, config))))
            reaches = []
            for pool in pools:
                request = api.AttachRequest("one", "vllm", "1", "h", os.getpid(), IDENTITY, 1, access=api.Access.NVMEOF)
                export = pool.attach(request, deadline_s=DEADLINE_S).export
                assert export is not None
                reaches.append(export)
            expected = {
                (reach.subsystem_nqn, reach.host_nqn, str((tmp_path / name / "data").resolve()))
                for reach, name in zip(reaches, ("red", "blue"), strict=True)
            }
            assert len({nqn for nqn, _, _ in expected}) == 2
            assert reachable(target) == expected
            target.restart()
            end_s = time.monotonic() + DEADLINE_S
            while reachable(target) != expected:
                assert time.monotonic() < end_s
                threading.Event().wait(0.2)
            red, blue = reaches
            target.connect_host(red.subsystem_nqn, red.host_nqn)
            with pytest.raises(AssertionError, match="has no I/O queue"):
                target.connect_host(blue.subsystem_nqn, red.host_nqn, start_s=3.0)
    finally:
        target.stop()


def reachable(target: RealSpdk) -> set[tuple[str, str, str]]:
    """(subsystem, host, file) of all that a host could read or write, as the target tells."""
    try:
        target.rpc.connect(5.0)
        reports = target.rpc.call("nvmf_get_subsystems", 5.0)
    except ExportError:  # it is starting
        return set()
    return {
        (report["nqn"], host["nqn"], file)
        for report in reports
        for host in report["hosts"]
        for _, file in exported(target, report["nqn"]).values()
        if report.get("listen_addresses")
    }
