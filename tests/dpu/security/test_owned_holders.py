"""Engines on a real pool over TLS: each with its own holders, leases and grants, also after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.identity import CallerIdentity
from meshfusion.dpu.api.security.principal import Principal, PrincipalKind
from meshfusion.dpu.api.security.roles import Role
from meshfusion.dpu.api.security.server_tls import ServerTls
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.pool import Pool
from meshfusion.jbof.errors import PermissionDeniedError, StaleHolderError
from tests.dpu.pool_cases import DEADLINE_S, Holder, make_pool
from tests.dpu.security.authority import Authority, client_of, server_files

ENGINES = ("engine-1", "engine-2")


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextmanager
def served(path: Path, ca: Authority) -> Iterator[tuple[Pool, GrpcChunkService, GrpcChunkService]]:
    roles = frozenset({Role.ENGINE})
    known = {name: Principal(PrincipalKind.CERTIFICATE, name, roles, "default") for name in ENGINES}
    with Pool.open(path) as pool:
        guard, tls = Guard(CallerIdentity(known)), ServerTls(server_files(ca, ca))
        server = serve(pool, "127.0.0.1:0", guard=guard, tls=tls)
        one, two = (GrpcChunkService(server.address, client_of(ca, ca.issue(name))) for name in ENGINES)
        try:
            yield pool, one, two
        finally:
            one.close()
            two.close()
            server.stop(0.0)


def test_engines_share_chunks_and_nothing_else(ca: Authority, tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    with served(tmp_path / "pool", ca) as (pool, one, two), Holder(one) as first, Holder(two) as second:
        assert first.put(0)
        assert first.match(0).chunk_count == second.match(0).chunk_count == 1
        assert pool.status(deadline_s=DEADLINE_S).lease_count == 2
        lease = first.match(0).lease_id
        two.release(t.ReleaseRequest(second.id, (lease,)), deadline_s=DEADLINE_S)
        assert pool.status(deadline_s=DEADLINE_S).lease_count == 3, "another holder's lease is left alone"
        granted = first.reserve(1)
        epoch = first.attachment.epoch
        stolen = t.CommitRequest(second.id, epoch, (t.CommitItem(granted.grant_id, (first.write(1, granted),)),))
        assert two.commit(stolen, deadline_s=DEADLINE_S).committed == (False,), "nor its grant"
        own = t.CommitRequest(first.id, epoch, stolen.items)
        with pytest.raises(PermissionDeniedError):
            two.commit(own, deadline_s=DEADLINE_S)
        assert one.commit(own, deadline_s=DEADLINE_S).committed == (True,)


def test_holders_stay_their_owners_over_a_restart(ca: Authority, tmp_path: Path) -> None:
    """A former holder may have writes in flight: who could detach it in its place would free the space under them."""
    make_pool(tmp_path / "pool")
    with served(tmp_path / "pool", ca) as (_, one, _):
        holder = Holder(one)
    with served(tmp_path / "pool", ca) as (pool, one, two):
        with pytest.raises(PermissionDeniedError):
            two.detach(t.DetachRequest(holder.id), deadline_s=DEADLINE_S)
        taken = two.attach(holder.request, deadline_s=DEADLINE_S)
        assert taken.holder_id != holder.id
        states = {h.holder_id: h.state for h in pool.status(deadline_s=DEADLINE_S).holders}
        assert (states[holder.id], states[taken.holder_id]) == ("former", "live")
        heartbeat = t.HeartbeatRequest(holder.id, holder.attachment.epoch, ())
        with pytest.raises(StaleHolderError):
            one.heartbeat(heartbeat, deadline_s=DEADLINE_S)
        assert one.attach(holder.request, deadline_s=DEADLINE_S).holder_id == holder.id
        os.close(holder.lock)
        one.detach(t.DetachRequest(holder.id), deadline_s=DEADLINE_S)
