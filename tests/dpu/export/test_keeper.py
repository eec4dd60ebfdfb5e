"""A pool and the target that it is exported by: who may reach the data, and when somebody's space is free again."""

from __future__ import annotations

import os
import threading
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.export.actual import ActualSubsystem, AllowedHost
from meshfusion.dpu.export.desired import Address, Export, Listener
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.export.keys import PSK, HostKeys
from meshfusion.dpu.export.layout import host_subsystem_nqn
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, nqn_prefix_of
from meshfusion.dpu.pool import Pool
from meshfusion.jbof.errors import ConfigError, MediaError, StaleHolderError, UnsupportedError
from meshfusion.jbof.nvme.auth_keys import parse_secret
from meshfusion.jbof.nvme.tls_psk import parse_psk
from tests.dpu.export.keeper_cases import DEADLINE_S, SILENCE_S, Rig, keeper, until
from tests.dpu.pool_cases import IDENTITY, make_pool


def test_who_attaches_is_told_where_and_as_whom_and_can_connect(rig: Rig) -> None:
    attachment = rig.attach("one")
    export = attachment.export
    assert export is not None
    prefix = nqn_prefix_of(uuid.UUID(attachment.pool_uuid))
    assert export.host_nqn == f"{prefix}:host:one"
    assert export.subsystem_nqn == host_subsystem_nqn(prefix, export.host_nqn)
    assert export.portals == (api.Portal("rdma", "10.0.0.1", 4420), api.Portal("rdma", "10.0.1.1", 4421))
    assert (attachment.liveness_path, attachment.namespaces[0].path) == ("", "")
    assert attachment.namespaces[0].nsid == 1
    rig.connect(attachment)
    assert rig.hosts_that_reach_it() == {"one"}
    assert rig.status().exports_problem == ""


def test_each_incarnation_has_its_own(rig: Rig) -> None:
    one, two = rig.attach("one").export, rig.attach("two").export
    assert one is not None
    assert two is not None
    assert one.host_nqn != two.host_nqn
    assert one.subsystem_nqn != two.subsystem_nqn


def test_a_silent_host_is_cut_off_and_its_space_freed_only_when_its_requests_are_done(rig: Rig) -> None:
    attachment = rig.attach("one")
    rig.connect(attachment)
    assert rig.reserve(attachment).outcome is api.ReserveOutcome.GRANTED
    assert attachment.export is not None
    writing = rig.kernel.hold[attachment.export.subsystem_nqn, "1"] = threading.Event()
    rig.now_s += SILENCE_S
    until(lambda: rig.states() == {"one": "condemned"})
    with pytest.raises(StaleHolderError):
        rig.reserve(attachment, 1)
    time.sleep(0.5)
    assert rig.states() == {"one": "condemned"}, "its write may still land"
    assert rig.status().grant_count == 1
    writing.set()
    until(lambda: rig.states() == {})
    assert rig.status().grant_count == 0
    assert rig.hosts_that_reach_it() == set()
    with pytest.raises(StaleHolderError, match="never admitted again"):
        rig.attach("one")


def test_a_host_that_is_heard_stays(rig: Rig) -> None:
    attachment = rig.attach("one")
    for _ in range(3):
        rig.now_s += SILENCE_S - 1
        rig.pool.heartbeat(api.HeartbeatRequest("one", attachment.epoch, ()), deadline_s=DEADLINE_S)
        time.sleep(0.1)
    assert rig.states() == {"one": "live"}


def test_a_goodbye_is_believed_when_the_target_confirms_it(rig: Rig) -> None:
    attachment = rig.attach("one")
    rig.connect(attachment)
    rig.reserve(attachment)
    rig.pool.detach(api.DetachRequest("one"), deadline_s=DEADLINE_S)
    until(lambda: rig.states() == {})
    assert rig.status().grant_count == 0
    assert rig.kernel.subsystems == {}


def test_hosts_of_an_earlier_service_go_on_until_they_were_silent_and_then_are_cut_off(rig: Rig) -> None:
    attachment = rig.attach("one")
    rig.connect(attachment)
    rig.pool.close()
    assert rig.hosts_that_reach_it() == {"one"}, "what is exported stays so"
    rig.open()
    time.sleep(0.3)
    assert rig.states() == {"one": "former"}
    assert rig.hosts_that_reach_it() == {"one"}
    with pytest.raises(StaleHolderError):
        rig.attach("one")
    rig.attach("two")
    rig.now_s += SILENCE_S - 1
    rig.pool.heartbeat(api.HeartbeatRequest("two", rig.status().epoch, ()), deadline_s=DEADLINE_S)
    rig.now_s += 1
    until(lambda: rig.states() == {"two": "live"})
    assert rig.hosts_that_reach_it() == {"two"}


def test_a_pool_opened_without_its_exports_says_that_hosts_may_still_write(rig: Rig) -> None:
    rig.attach("one")
    rig.pool.close()
    with Pool.open(rig.path, clock=lambda: rig.now_s) as pool:
        assert "only its target can say" in pool.status(deadline_s=DEADLINE_S).exports_problem


def test_exports_are_not_changed_under_hosts_that_only_the_former_ones_can_cut_off(rig: Rig) -> None:
    """The new ones would find nothing of such a host, call it gone, and free space that it may still write to."""
    attachment = rig.attach("one")
    rig.connect(attachment)
    rig.reserve(attachment)
    rig.pool.close()
    former, rig.prefix = rig.prefix, "nqn.2026-11.io.meshfusion:rack7"
    with pytest.raises(ConfigError, match=r"exports = nvmet, NQNs nqn\.2026-11\.io\.meshfusion:rack7:.* only there"):
        rig.open()
    assert rig.hosts_that_reach_it() == {"one"}
    rig.prefix = former
    rig.open()
    rig.now_s += SILENCE_S
    until(lambda: rig.states() == {})
    rig.pool.close()
    rig.prefix = "nqn.2026-11.io.meshfusion:rack7"
    rig.open()
    rig.connect(rig.attach("two"))


@pytest.mark.parametrize("prefix", [None, "nqn.2026-11.io.meshfusion", "nqn.2026-11.io.meshfusion:rack7"])
def test_services_that_are_told_the_same_prefix_leave_each_other_alone(
    rig: Rig, tmp_path: Path, prefix: str | None
) -> None:
    rig.connect(rig.attach("one"))
    make_pool(tmp_path / "other")
    other_data = str((tmp_path / "other" / "data").resolve())
    rig.kernel.devices.add(other_data)
    for _ in range(2):
        with Pool.open(tmp_path / "other", exports=partial(keeper, rig.kernel, prefix)) as other:
            request = api.AttachRequest("two", "vllm", "1", "h", 7, IDENTITY, rank_count=1, access=api.Access.NVMEOF)
            other.attach(replace(request, incarnation=uuid.uuid4().hex), deadline_s=DEADLINE_S)
            time.sleep(0.3)
            assert rig.hosts_that_reach_it() == {"one"}
            assert rig.status().exports_problem == ""
            assert other.status(deadline_s=DEADLINE_S).exports_problem == ""


def test_a_service_without_exports_says_so(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    request = api.AttachRequest("one", "vllm", "1", "h", 7, IDENTITY, rank_count=1, access=api.Access.NVMEOF)
    with Pool.open(tmp_path / "pool") as pool, pytest.raises(UnsupportedError, match="exports nothing") as caught:
        pool.attach(request, deadline_s=DEADLINE_S)
    assert "exports" in caught.value.next_step


def test_for_spdk_a_tenant_has_one_subsystem() -> None:
    pool_uuid = uuid.uuid4()
    plan = ExportPlan(TargetKind.SPDK, nqn_prefix_of(pool_uuid), pool_uuid, {0: "bdev0"}, frozenset())
    export: Export = plan.export(["one", "two"])
    (subsystem,) = export.subsystems
    assert {host.nqn for host in subsystem.hosts} == {plan.host_nqn("one"), plan.host_nqn("two")}
    assert plan.reach("one").subsystem_nqn == plan.reach("two").subsystem_nqn == subsystem.nqn


def test_with_tls_each_incarnation_has_a_second_key_which_is_told_and_goes_with_it(tmp_path: Path) -> None:
    pool_uuid, tcp = uuid.uuid4(), Listener(Address("tcp", "10.0.0.1"))
    keys, psks = HostKeys(tmp_path), HostKeys(tmp_path, PSK)
    plan = ExportPlan(
        TargetKind.SPDK, nqn_prefix_of(pool_uuid), pool_uuid, {0: "b"}, frozenset({tcp}), keys=keys, psks=psks
    )
    exports = ExportKeeper(None, plan)  # type: ignore[arg-type]  # no target is asked here
    exports.prepare("one")
    reach = plan.reach("one")
    assert len(parse_psk(reach.tls_psk)) == 32
    assert reach.tls_psk not in repr(reach)
    assert (tmp_path / "one.psk").read_text() == reach.tls_psk, "SPDK takes it without a line's end"
    assert {(path.name, path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        ("one.key", 0o600),
        ("one.psk", 0o600),
    }
    (subsystem,) = plan.export(["one"]).subsystems
    (host,) = subsystem.hosts
    assert host.key is not None
    assert host.psk is not None
    there = ActualSubsystem(subsystem.nqn, subsystem.serial, False, subsystem.namespaces, frozenset(), frozenset({tcp}))
    right = AllowedHost(host.nqn, host.key.id, host.psk.id)
    assert plan.is_served((replace(there, hosts=frozenset({right})),), "one")
    assert not plan.is_served((replace(there, hosts=frozenset({replace(right, psk_id="")})),), "one")
    exports.forget("one")
    assert list(tmp_path.iterdir()) == []


def test_hosts_of_this_machine_and_of_the_target_share_a_pool_and_go_each_in_its_way(rig: Rig) -> None:
    far = rig.attach("far")
    rig.connect(far)
    request = api.AttachRequest("near", "vllm", "1", "h", 7, IDENTITY, rank_count=1)
    near = rig.pool.attach(request, deadline_s=DEADLINE_S)
    assert (near.export, near.namespaces[0].path) == (None, rig.data)
    lock = hold_liveness(Path(near.liveness_path))
    with pytest.raises(StaleHolderError):  # neither becomes the other
        rig.pool.attach(replace(request, incarnation="far"), deadline_s=DEADLINE_S)
    with pytest.raises(StaleHolderError):
        rig.attach("near")
    for attachment in (far, near):
        assert rig.reserve(attachment, 0 if attachment is far else 1).outcome is api.ReserveOutcome.GRANTED
    rig.now_s += SILENCE_S
    until(lambda: rig.states() == {"near": "silent"})
    assert rig.status().grant_count == 1, "its process lives"
    assert rig.hosts_that_reach_it() == set()
    os.close(lock)
    until(lambda: rig.states() == {})
    assert rig.status().grant_count == 0


def test_each_incarnation_has_a_key_of_its_own_which_goes_with_it(rig: Rig) -> None:
    one, two = rig.attach("one").export, rig.attach("two").export
    assert one is not None
    assert two is not None
    keys = {parse_secret(export.host_key).key for export in (one, two)}
    assert len(keys) == 2
    assert "DHHC" not in repr(one)
    files = sorted(rig.path.glob("holders/*.key"))
    assert [file.name for file in files] == ["one.key", "two.key"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert rig.kernel.hosts == {one.host_nqn: one.host_key, two.host_nqn: two.host_key}
    rig.pool.detach(api.DetachRequest("one"), deadline_s=DEADLINE_S)
    until(lambda: set(rig.states()) == {"two"})
    assert [file.name for file in rig.path.glob("holders/*.key")] == ["two.key"]
    rig.pool.close()
    (rig.path / "holders" / "left-over.key").write_text("-")
    rig.open()
    assert [file.name for file in rig.path.glob("holders/*.key")] == ["two.key"]


def test_a_key_is_made_once_and_never_shown(tmp_path: Path) -> None:
    keys = HostKeys(tmp_path)
    keys.make("one")
    first = keys.read("one")
    keys.make("one")
    assert keys.read("one") == first
    keys.path("one").write_text("DHHC-1:00:AAAA:")
    with pytest.raises(ConfigError) as caught:
        keys.read("one")
    assert "AAAA" not in str(caught.value)
    with pytest.raises(MediaError, match=r"the key file .*two.key: No such file"):
        keys.read("two")
    with pytest.raises(MediaError, match="the key file"):
        HostKeys(tmp_path / "nowhere").make("one")
