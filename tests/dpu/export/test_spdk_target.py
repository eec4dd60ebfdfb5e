"""What holds for a fake and for a real nvmf_tgt alike."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.export.desired import Export, Host
from meshfusion.dpu.export.fence import Confirmed, NotYet
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.dpu.export.layout import Tenant
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.dpu.export.spdk.sizing import MIB, Machine, size
from meshfusion.dpu.export.spdk.start import Timeouts
from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget
from tests.dpu.export.cases import (
    BACKINGS,
    HIDDEN,
    PREFIX,
    TCP,
    A,
    B,
    chap_text,
    export,
    host_nqn,
    key_file,
    nqn_of,
    tenant,
)
from tests.dpu.export.conftest import Spdk

SETTINGS_SIZE = size(Machine(memory_bytes=400 * MIB, cores=1, connections=4))
NOTHING = Export(PREFIX)


def attach(rpc: SpdkRpc) -> None:
    there = {bdev["name"] for bdev in rpc.call("bdev_get_bdevs", 60.0)}
    for name in BACKINGS:
        disk = f"{name}-disk"
        if disk not in there:
            rpc.call("bdev_malloc_create", 60.0, name=disk, num_blocks=2048, block_size=4096)
        if name not in there:
            delays = {f"{kind}_latency": 0 for kind in ("avg_read", "p99_read", "avg_write", "p99_write")}
            rpc.call("bdev_delay_create", 60.0, base_bdev_name=disk, name=name, **delays)


@pytest.fixture
def target(spdk: Spdk) -> SpdkTarget:
    timeouts = Timeouts(read_s=60.0, change_s=60.0, start_s=60.0)  # a busy machine is no failure
    return SpdkTarget(spdk.rpc, SpdkSettings(SETTINGS_SIZE, frozenset({"tcp"}), attach, timeouts), NOTHING)


def reports(spdk: Spdk) -> dict[str, dict[str, Any]]:
    """What SPDK says, by NQN, without going through the code under test."""
    found = spdk.rpc.call("nvmf_get_subsystems", 60.0)
    return {report["nqn"]: report for report in found if report["subtype"] == "NVMe"}


def hosts_of(spdk: Spdk, name: str) -> set[str]:
    return {host["nqn"] for host in reports(spdk)[nqn_of(name)]["hosts"]}


def queue_pairs(spdk: Spdk, name: str) -> set[tuple[int, str, int]]:
    """(controller, host, queue) of all that are connected."""
    pairs = spdk.rpc.call("nvmf_subsystem_get_qpairs", 60.0, nqn=nqn_of(name))
    return {(pair["cntlid"], pair["hostnqn"], pair["qid"]) for pair in pairs}


def bdevs_of(spdk: Spdk, name: str) -> dict[int, str]:
    return {ns["nsid"]: ns["bdev_name"] for ns in reports(spdk)[nqn_of(name)]["namespaces"]}


def ana_states(spdk: Spdk, name: str) -> set[str]:
    (listener,) = spdk.rpc.call("nvmf_subsystem_get_listeners", 60.0, nqn=nqn_of(name))
    return {state["ana_state"] for state in listener["ana_states"]}


def test_a_fresh_spdk_is_started_and_exports_what_is_desired(spdk: Spdk, target: SpdkTarget) -> None:
    report = target.desire(export(A, B))
    assert report.converged, report.reasons
    assert hosts_of(spdk, "a") == {host_nqn("a-1"), host_nqn("a-2")}
    assert (hosts_of(spdk, "b"), bdevs_of(spdk, "b")) == ({host_nqn("b-1")}, {1: "b0", 2: "b1"})
    there = reports(spdk)[nqn_of("a")]
    assert (there["allow_any_host"], there["listen_addresses"][0]["trsvcid"]) == (False, str(TCP.address.service))
    (transport,) = spdk.rpc.call("nvmf_get_transports", 60.0)
    assert (transport["trtype"], transport["max_io_size"]) == ("TCP", 1048576)


def test_doing_it_again_does_nothing(target: SpdkTarget) -> None:
    assert target.desire(export(A, B)).applied == 11  # 2 x (subsystem, 2 namespaces, listener), 3 hosts
    again = target.desire(export(A, B))
    assert (again.converged, again.applied) == (True, 0)


def test_changes_of_hosts_namespaces_and_ana_states(spdk: Spdk, target: SpdkTarget) -> None:
    target.desire(export(A, B))
    changed = export(tenant("a", "a1", "a-2 a-3"), listener=HIDDEN)
    assert target.desire(changed).converged
    assert set(reports(spdk)) == {nqn_of("a")}
    assert (hosts_of(spdk, "a"), bdevs_of(spdk, "a")) == ({host_nqn("a-2"), host_nqn("a-3")}, {1: "a1"})
    assert ana_states(spdk, "a") == {"inaccessible"}
    assert target.desire(export(A)).converged
    assert (ana_states(spdk, "a"), bdevs_of(spdk, "a")) == ({"optimized"}, {1: "a0", 2: "a1"})


def test_after_a_restart_everything_is_applied_anew(spdk: Spdk, target: SpdkTarget) -> None:
    target.desire(export(A, B))
    before = reports(spdk)
    spdk.restart()
    reconnected = [target.reconcile(), target.reconcile()]  # the first may find the lost connection
    assert reconnected[1].converged, reconnected[1].reasons
    assert reports(spdk) == before


def test_what_others_changed_is_put_right_and_their_subsystems_are_left_alone(spdk: Spdk, target: SpdkTarget) -> None:
    target.desire(export(A))
    nqn, other = nqn_of("a"), "nqn.2026-11.io.example:other"
    create = {"serial_number": "1", "model_number": "x", "ana_reporting": True, "max_namespaces": 2}
    spdk.rpc.call("nvmf_create_subsystem", 60.0, nqn=other, allow_any_host=True, **create)
    spdk.rpc.call("nvmf_subsystem_add_host", 60.0, nqn=nqn, host=host_nqn("intruder"))
    spdk.rpc.call("nvmf_subsystem_allow_any_host", 60.0, nqn=nqn, allow_any_host=True)
    spdk.rpc.call("nvmf_subsystem_remove_ns", 60.0, nqn=nqn, nsid=1)
    identity = {"uuid": "00000000-0000-4000-8000-000000000001", "nguid": "0" * 31 + "1"}
    wrong = {"nsid": 1, "bdev_name": "b0", "anagrpid": 1, **identity}
    spdk.rpc.call("nvmf_subsystem_add_ns", 60.0, nqn=nqn, namespace=wrong)
    assert target.reconcile().converged
    assert not reports(spdk)[nqn]["allow_any_host"]
    assert hosts_of(spdk, "a") == {host_nqn("a-1"), host_nqn("a-2")}
    assert bdevs_of(spdk, "a") == {1: "a0", 2: "a1"}
    assert reports(spdk)[other]["allow_any_host"]


def test_a_host_with_a_key_must_authenticate(spdk: Spdk, target: SpdkTarget, tmp_path: Path) -> None:
    key = key_file(tmp_path / "key", chap_text(1))
    keyed = Tenant("a", A.namespaces, frozenset({Host(host_nqn("a-1"), key)}))
    assert target.desire(export(A)).converged
    assert target.desire(export(keyed)).converged, "the host was there without a key"
    (host,) = reports(spdk)[nqn_of("a")]["hosts"]
    assert host["dhchap_key"].startswith("mf-")
    assert target.desire(export(keyed)).applied == 0
    assert target.desire(NOTHING).converged
    assert not [entry for entry in spdk.rpc.call("keyring_get_keys", 60.0) if not entry["removed"]]


def test_a_new_key_is_asked_for_from_the_next_connection_on(spdk: Spdk, target: SpdkTarget, tmp_path: Path) -> None:
    """Who is connected stays so, and nobody with the former key comes in any more."""
    path, former = tmp_path / "key", tmp_path / "former"
    key_file(former, chap_text(1))
    one, two = host_nqn("a-1"), host_nqn("a-2")
    keyed = export(Tenant("a", A.namespaces, frozenset({Host(one, key_file(path, chap_text(1))), Host(two)})))
    assert target.desire(keyed).converged
    spdk.connect_host(nqn_of("a"), one, key=path)
    before = queue_pairs(spdk, "a")
    assert {host for _, host, _ in before} == {one}
    new = key_file(path, chap_text(2))
    keyed = export(Tenant("a", A.namespaces, frozenset({Host(one, new), Host(two)})))
    assert target.desire(keyed).applied == 1
    assert queue_pairs(spdk, "a") == before
    (there,) = (host for host in reports(spdk)[nqn_of("a")]["hosts"] if host["nqn"] == one)
    assert there["dhchap_key"].endswith(f"-{new.id}")
    assert len([entry for entry in spdk.rpc.call("keyring_get_keys", 60.0) if not entry["removed"]]) == 1
    assert target.desire(keyed).applied == 0
    assert not spdk.can_read(nqn_of("a"), one, key=former)
    assert spdk.can_read(nqn_of("a"), one, key=path)
    spdk.connect_host(nqn_of("a"), one, key=path)
    assert len(queue_pairs(spdk, "a")) > len(before)
    assert target.fence(one) == Confirmed()
    assert not [entry for entry in spdk.rpc.call("keyring_get_keys", 60.0) if not entry["removed"]]


def test_a_new_key_takes_effect_when_the_target_gets_it_and_not_when_it_is_written(
    spdk: Spdk, target: SpdkTarget, tmp_path: Path
) -> None:
    """SPDK reads the file whenever a host connects. The service may end before it can tell anybody of the new one."""
    keys, (one, nqn) = HostKeys(tmp_path), (host_nqn("a-1"), nqn_of("a"))

    def keyed() -> Export:
        return export(Tenant("a", A.namespaces, frozenset({Host(one, keys.wanted("one"))})))

    keys.make("one")
    former = keys.wanted("one")
    assert target.desire(keyed()).converged
    keys.replace("one")
    new = keys.wanted("one")
    assert spdk.can_read(nqn, one, key=former.file)
    assert not spdk.can_read(nqn, one, key=new.file)
    assert target.desire(keyed()).applied == 1
    assert spdk.can_read(nqn, one, key=new.file)
    assert not spdk.can_read(nqn, one, key=former.file)
    keys.is_there("one", new.id)
    assert not former.file.exists()
    assert spdk.can_read(nqn, one, key=new.file)
    assert target.desire(keyed()).applied == 0


def test_a_key_of_an_earlier_release_is_named_anew(spdk: Spdk, target: SpdkTarget, tmp_path: Path) -> None:
    """A service that is newer finds hosts of the one before, whose connections stay."""
    host = Host(host_nqn("a-1"), key_file(tmp_path / "key", chap_text(1)))
    assert target.desire(export(Tenant("a", A.namespaces, frozenset()))).converged
    spdk.rpc.call("keyring_file_add_key", 60.0, name=f"mf-{'0' * 32}", path=str(tmp_path / "key"))
    keyed = {"host": host.nqn, "dhchap_key": f"mf-{'0' * 32}"}
    spdk.rpc.call("nvmf_subsystem_add_host", 60.0, nqn=nqn_of("a"), **keyed)
    spdk.connect_host(nqn_of("a"), host.nqn, key=tmp_path / "key")
    before = queue_pairs(spdk, "a")
    assert target.desire(export(Tenant("a", A.namespaces, frozenset({host})))).applied == 1
    assert queue_pairs(spdk, "a") == before


def test_a_fence_disconnects_a_writing_host_and_survives_restarts(spdk: Spdk, target: SpdkTarget) -> None:
    target.desire(export(A, B))
    spdk.connect_host(nqn_of("a"), host_nqn("a-1"))
    spdk.connect_host(nqn_of("a"), host_nqn("a-2"))
    fence = target.fence(host_nqn("a-1"))
    assert fence == Confirmed()
    connected = {pair["hostnqn"] for pair in spdk.rpc.call("nvmf_subsystem_get_qpairs", 60.0, nqn=nqn_of("a"))}
    assert connected == {host_nqn("a-2")}
    assert hosts_of(spdk, "a") == {host_nqn("a-2")}
    spdk.restart()
    target.reconcile()
    assert target.desire(export(A, B)).converged
    assert hosts_of(spdk, "a") == {host_nqn("a-2")}, "never readmitted"
    assert target.fence(host_nqn("a-1")) == Confirmed()


def test_a_fence_waits_for_writes_in_flight(spdk: Spdk, target: SpdkTarget) -> None:
    target.desire(export(A, B))
    spdk.slow_down("a0", host_nqn("a-1"))
    spdk.connect_host(nqn_of("a"), host_nqn("a-1"))
    time.sleep(spdk.until_writing_s)
    fence = target.fence(host_nqn("a-1"))
    assert isinstance(fence, NotYet)
    assert host_nqn("a-1") in fence.reason
    assert host_nqn("a-1") not in hosts_of(spdk, "a"), "it has no access, and still a write under way"
    pairs = spdk.rpc.call("nvmf_subsystem_get_qpairs", 60.0, nqn=nqn_of("a"))
    assert {(pair["hostnqn"], pair["state"]) for pair in pairs} == {(host_nqn("a-1"), "deactivating")}
    moved = export(tenant("a", "a1", "a-2"), B)
    waiting = target.desire(moved)
    assert (waiting.converged, waiting.applied) == (False, 0), "nothing is given while a stranger may still be served"
    spdk.finish(host_nqn("a-1"))
    deadline_s = time.monotonic() + 60.0
    while target.fence(host_nqn("a-1")) != Confirmed():
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert target.desire(moved).converged
    assert (hosts_of(spdk, "a"), bdevs_of(spdk, "a")) == ({host_nqn("a-2")}, {1: "a1"})


def test_a_fence_of_an_unknown_host_is_confirmed_only_by_a_target_that_answers(spdk: Spdk, target: SpdkTarget) -> None:
    target.desire(export(A))
    assert target.fence(host_nqn("nobody")) == Confirmed()
    spdk.stop()
    fence = target.fence(host_nqn("a-1"))
    assert isinstance(fence, NotYet)
    assert "did not answer" in fence.reason
