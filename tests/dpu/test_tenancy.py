"""Two pools behind one service: what an engine of one tenant can learn or do of the other's, which is nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.drive_client import GrpcDriveAdmin
from meshfusion.dpu.api.drive_types import AddDriveRequest, DrainDriveRequest
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.tenancy import PoolRouter, TenantPool
from meshfusion.jbof.errors import MeshFusionError, ServiceError, StaleHolderError, UnsupportedError
from tests.dpu.pool_cases import DEADLINE_S, Holder, key, make_pool

TENANTS = {"r": frozenset({"red"}), "s": frozenset({"blue", "green"})}


@dataclass(frozen=True)
class Service:
    pools: dict[str, Pool]
    router: PoolRouter
    client: GrpcChunkService
    address: str

    def named(self, pool: str) -> GrpcChunkService:
        return GrpcChunkService(self.address, pool=pool)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    for name in TENANTS:
        make_pool(tmp_path / name)
    pools = {name: Pool.open(tmp_path / name, tenants=tenants) for name, tenants in TENANTS.items()}
    router = PoolRouter({name: TenantPool(pools[name], tenants) for name, tenants in TENANTS.items()})
    server = serve(router, f"unix://{tmp_path}/socket", pools=router)
    client = GrpcChunkService(server.address)
    yield Service(pools, router, client, server.address)
    client.close()
    server.stop(1.0)
    router.close()


def lookup(holder: Holder, *numbers: int) -> api.MatchReply:
    keys = tuple(map(key, numbers))
    groups = (api.GroupKeys(0, keys, (0,) * len(keys)),)
    return holder.pool.match(api.MatchRequest(holder.id, "request", 16, groups), deadline_s=DEADLINE_S)


def test_equal_prompts_of_two_tenants_share_nothing(service: Service) -> None:
    """The same identity and the same keys: but for the tenant, B would find all that A has stored."""
    with Holder(service.client, tenant="red") as red, Holder(service.client, tenant="blue") as blue:
        assert red.attachment.pool_uuid != blue.attachment.pool_uuid
        assert not {n.path for n in red.attachment.namespaces} & {n.path for n in blue.attachment.namespaces}
        assert red.put(0)
        assert lookup(red, 0).chunk_count == 1
        assert lookup(blue, 0).chunk_count == 0
        granted = red.reserve(1)
        assert granted.outcome is api.ReserveOutcome.GRANTED
        assert blue.reserve(0).outcome is api.ReserveOutcome.GRANTED, "EXISTS would tell what red has stored"
        assert blue.reserve(1).outcome is api.ReserveOutcome.GRANTED, "BUSY would tell what red is storing"
        assert red.reserve(0).outcome is api.ReserveOutcome.EXISTS
        assert red.reserve(1).outcome is api.ReserveOutcome.BUSY


def test_tenants_that_a_pool_names_share_it(service: Service) -> None:
    with Holder(service.client, tenant="green") as green, Holder(service.client, tenant="blue") as blue:
        assert green.put(0)
        assert lookup(blue, 0).chunk_count == 1


def test_a_tenants_tickets_are_worth_nothing_to_another(service: Service) -> None:
    with Holder(service.client, tenant="red") as red, Holder(service.client, tenant="blue") as blue:
        assert red.put(0)
        lease = lookup(red, 0)
        granted = red.reserve(1)
        digests = red.write(1, granted)
        service.client.release(api.ReleaseRequest(blue.id, (lease.lease_id,)), deadline_s=DEADLINE_S)
        assert not blue.commit(granted, digests)
        abort = api.AbortRequest(blue.id, blue.attachment.epoch, (granted.grant_id,))
        service.client.abort(abort, deadline_s=DEADLINE_S)
        drop = api.DropRequest(blue.id, key(0), lease.chunks[0].shards[0].extent, "told so")
        assert not service.client.drop(drop, deadline_s=DEADLINE_S)
        beat = api.HeartbeatRequest(red.id, red.attachment.epoch, (lease.lease_id,))
        assert service.client.heartbeat(beat, deadline_s=DEADLINE_S).lost_lease_ids == ()
        assert red.commit(granted, digests)
        assert lookup(red, 0, 1).chunk_count == 2


def test_a_tenant_that_is_not_served_learns_nothing_of_others(service: Service) -> None:
    with pytest.raises(UnsupportedError) as refused:
        Holder(service.client, tenant="acme")
    assert "'acme'" in refused.value.message
    told = str(refused.value)
    assert not any(name in told.split() or f"'{name}'" in told for name in ("red", "blue", "green", "r", "s"))
    with pytest.raises(UnsupportedError, match="'default'"):
        Holder(service.client)
    assert all(not pool.status(deadline_s=1).holders for pool in service.pools.values())


def test_unknown_holders_must_attach_again(service: Service) -> None:
    with Holder(service.client, tenant="red") as red:
        red_id, epoch = red.id, red.attachment.epoch
    for holder_id in (red_id, "never"):
        beat = api.HeartbeatRequest(holder_id, epoch, ())
        with pytest.raises(StaleHolderError):
            service.client.heartbeat(beat, deadline_s=DEADLINE_S)
        with pytest.raises(StaleHolderError):
            service.client.drop(
                api.DropRequest(holder_id, key(0), api.Extent(1, 0, 0, 1, 1), ""), deadline_s=DEADLINE_S
            )
        service.client.release(api.ReleaseRequest(holder_id, ("x",)), deadline_s=DEADLINE_S)
        service.client.detach(api.DetachRequest(holder_id), deadline_s=DEADLINE_S)


def test_an_incarnation_is_of_one_tenant(service: Service) -> None:
    """Else which pool its calls are meant for would not be known."""
    with Holder(service.client, "one", tenant="red") as red:
        with pytest.raises(StaleHolderError, match="attached already"):
            Holder(service.client, "one", tenant="blue")
        again = service.client.attach(red.request, deadline_s=DEADLINE_S)
        assert again.pool_uuid == red.attachment.pool_uuid
        assert not service.pools["s"].status(deadline_s=1).holders
    with Holder(service.client, "one", tenant="blue") as blue:
        assert blue.put(0), "the other is gone for good"


def test_of_two_that_attach_as_one_at_once_the_second_is_refused(service: Service) -> None:
    """The first is under way: its pool does not have it yet."""
    red, blue = service.pools["r"], service.pools["s"]
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(red, name)

        def attach(self, request: api.AttachRequest, *, deadline_s: float) -> api.Attachment:
            has_begun.set()
            assert may_go_on.wait(30)
            return red.attach(request, deadline_s=deadline_s)

    router = PoolRouter(
        {"r": TenantPool(Slow(), frozenset({"red"})), "s": TenantPool(blue, TENANTS["s"])}  # type: ignore[arg-type]
    )
    request = api.AttachRequest("one", "vllm", "1", "h", 1, b"I" * 32, 1, "red")
    first = threading.Thread(target=lambda: router.attach(request, deadline_s=DEADLINE_S))
    first.start()
    assert has_begun.wait(30)
    try:
        with pytest.raises(StaleHolderError):
            router.attach(replace(request, tenant="blue"), deadline_s=DEADLINE_S)
    finally:
        may_go_on.set()
        first.join()
    assert red.has_holder("one")
    assert not blue.has_holder("one")


def test_holders_of_before_a_restart_are_their_pools(tmp_path: Path) -> None:
    for name in TENANTS:
        make_pool(tmp_path / name)

    def opened() -> PoolRouter:
        pools = {name: Pool.open(tmp_path / name, tenants=tenants) for name, tenants in TENANTS.items()}
        return PoolRouter({name: TenantPool(pools[name], tenants) for name, tenants in TENANTS.items()})

    router = opened()
    holder = Holder(router, tenant="red")
    assert holder.put(0)
    router.close()
    holder.pool = router = opened()
    try:
        with pytest.raises(StaleHolderError):
            lookup(holder, 0)
        with pytest.raises(StaleHolderError):
            router.attach(replace(holder.request, tenant="blue"), deadline_s=DEADLINE_S)
        router.attach(holder.request, deadline_s=DEADLINE_S)
        assert lookup(holder, 0).chunk_count == 1
    finally:
        router.close()


# ---- operators -------------------------------------------------------------------------------------------------------


def test_what_operators_ask_names_a_pool(service: Service) -> None:
    with Holder(service.client, tenant="red") as red:
        assert red.put(0)
        status = service.named("r").status(deadline_s=DEADLINE_S)
        assert (status.committed_chunk_count, [holder.holder_id for holder in status.holders]) == (1, [red.id])
        assert status.pool_uuid == red.attachment.pool_uuid
        other = service.named("s").status(deadline_s=DEADLINE_S)
        assert (other.committed_chunk_count, other.holders) == (0, ())
        assert other.pool_uuid == service.pools["s"].pool_uuid
        assert [c.key for c in service.named("r").list_chunks(api.ListRequest(), deadline_s=DEADLINE_S).chunks] == [
            key(0)
        ]
        assert service.named("s").list_chunks(api.ListRequest(), deadline_s=DEADLINE_S).chunks == ()
        assert service.named("r").get_chunk(key(0), deadline_s=DEADLINE_S) is not None
        assert service.named("s").get_chunk(key(0), deadline_s=DEADLINE_S) is None


@pytest.mark.parametrize(("name", "problem"), [("", "has several pools"), ("q", "has no pool 'q'")])
def test_without_a_name_that_is_known_it_is_told_which_there_are(service: Service, name: str, problem: str) -> None:
    client, admin = service.named(name), GrpcDriveAdmin(service.address, pool=name)
    calls = (
        lambda: client.status(deadline_s=DEADLINE_S),
        lambda: client.list_chunks(api.ListRequest(), deadline_s=DEADLINE_S),
        lambda: client.get_chunk(key(0), deadline_s=DEADLINE_S),
        lambda: admin.drives(deadline_s=DEADLINE_S),
        lambda: admin.drain_drive(DrainDriveRequest(0), deadline_s=DEADLINE_S),
    )
    for call in calls:
        with pytest.raises(ServiceError, match=problem) as refused:
            call()
        assert "--pool: r, s" in refused.value.next_step


def test_the_drives_of_each_pool_are_its_own(service: Service) -> None:
    red, shared = (GrpcDriveAdmin(service.address, pool=name) for name in "rs")
    red.add_drive(AddDriveRequest(7 << 20), deadline_s=DEADLINE_S)
    assert [drive.number for drive in red.drives(deadline_s=DEADLINE_S)] == [0, 1]
    assert [drive.number for drive in shared.drives(deadline_s=DEADLINE_S)] == [0]


def test_a_service_of_one_pool_has_no_name_for_it(tmp_path: Path) -> None:
    """Old clients, which name none, are answered; a name is refused, not taken for the only pool."""
    make_pool(tmp_path / "pool")
    with Pool.open(tmp_path / "pool") as pool:
        server = serve(pool, f"unix://{tmp_path}/s", admin=pool.drive_admin)
        assert GrpcChunkService(server.address).status(deadline_s=DEADLINE_S).pool_uuid == pool.pool_uuid
        for ask in (
            GrpcChunkService(server.address, pool="red").status,
            GrpcDriveAdmin(server.address, pool="r").drives,
        ):
            with pytest.raises(ServiceError, match="has no pool"):
                ask(deadline_s=DEADLINE_S)
        server.stop(1.0)


def test_all_pools_are_closed_whatever_becomes_of_one(tmp_path: Path) -> None:
    for name in TENANTS:
        make_pool(tmp_path / name)
    pools = {name: Pool.open(tmp_path / name, tenants=tenants) for name, tenants in TENANTS.items()}

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(pools["s"], name)

        def close(self) -> None:
            pools["s"].close()
            raise MeshFusionError("failed", next_step="none")

    router = PoolRouter(
        {"r": TenantPool(pools["r"], TENANTS["r"]), "s": TenantPool(Failing(), TENANTS["s"])}  # type: ignore[arg-type]
    )
    with pytest.raises(MeshFusionError, match="failed"):
        router.close()
    Pool.open(tmp_path / "r", tenants=TENANTS["r"]).close()
