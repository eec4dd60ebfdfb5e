"""A pool, the target that it is exported by, and a clock that tests turn."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from meshfusion.dpu.api import types as api
from meshfusion.dpu.export.desired import Address, Listener
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.dpu.export.nvmet.target import NvmetTarget
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, nqn_prefix_of
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from tests.dpu.export.fake_nvmet import FakeKernel
from tests.dpu.pool_cases import IDENTITY, UNIT_BYTES, key, make_pool

PORTALS = (Address("rdma", "10.0.0.1"), Address("rdma", "10.0.1.1", 4421))
DEADLINE_S = 10.0
SILENCE_S = PoolOptions().holder_silence_s


class Rig:
    """One pool, its target's kernel, and a clock that tests turn."""

    def __init__(self, folder: Path, *, key_lifetime_s: float = math.inf) -> None:
        self.key_lifetime_s = key_lifetime_s
        self.path = folder / "pool"
        make_pool(self.path)
        self.data = str((self.path / "data").resolve())
        self.kernel = FakeKernel({self.data})
        self.now_s = 0.0
        self.prefix: str | None = None
        self.pool = self.open()

    def open(self) -> Pool:
        exports = partial(keeper, self.kernel, self.prefix, key_lifetime_s=self.key_lifetime_s)
        self.pool = Pool.open(self.path, clock=lambda: self.now_s, exports=exports)
        return self.pool

    def attach(self, incarnation: str, *, deadline_s: float = DEADLINE_S) -> api.Attachment:
        request = api.AttachRequest(incarnation, "vllm", "1", "h", 7, IDENTITY, rank_count=1, access=api.Access.NVMEOF)
        return self.pool.attach(request, deadline_s=deadline_s)

    def reserve(self, attachment: api.Attachment, chunk: int = 0) -> api.ReserveResult:
        item = api.ReserveItem(key(chunk), 0, 16 * chunk, 16, (api.ShardSize(0, UNIT_BYTES, 3),))
        request = api.ReserveRequest(attachment.holder_id, attachment.epoch, (item,))
        return self.pool.reserve(request, deadline_s=DEADLINE_S).results[0]

    def status(self) -> api.PoolStatus:
        return self.pool.status(deadline_s=DEADLINE_S)

    def states(self) -> dict[str, str]:
        return {holder.holder_id: holder.state for holder in self.status().holders}

    def connect(self, attachment: api.Attachment) -> None:
        assert attachment.export is not None
        self.kernel.connect_host(attachment.export.subsystem_nqn, attachment.export.host_nqn)

    def hosts_that_reach_it(self) -> set[str]:
        return {host.rsplit(":", 1)[1] for host, device in self.kernel.reachable() if device == self.data}


def keeper(
    kernel: FakeKernel,
    prefix: str | None,
    pool_uuid: uuid.UUID,
    layout: PoolLayout,
    *,
    key_lifetime_s: float = math.inf,
) -> ExportKeeper:
    plan = ExportPlan(
        TargetKind.NVMET,
        nqn_prefix_of(pool_uuid, prefix),
        pool_uuid,
        {drive.number: str(drive.path.resolve()) for drive in find_drives(layout).here},
        frozenset(map(Listener, PORTALS)),
        keys=HostKeys(layout.holders),
    )
    target = NvmetTarget(kernel, plan.export(()), patience_s=0.1)
    return ExportKeeper(target, plan, period_s=0.05, key_lifetime_s=key_lifetime_s)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
