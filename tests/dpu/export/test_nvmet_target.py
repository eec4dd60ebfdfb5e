"""The kernel's target, against a tree with its rules. A real kernel's configfs is the lab's business."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.dpu.export.desired import Address, AnaState, Export, Host, HostKey, Listener
from meshfusion.dpu.export.errors import StepRefusedError, TargetUnreachableError
from meshfusion.dpu.export.fence import Confirmed, NotYet
from meshfusion.dpu.export.layout import Tenant, host_subsystem_nqn, one_subsystem_per_host
from meshfusion.dpu.export.nvmet.configfs import KernelConfigFs
from meshfusion.dpu.export.nvmet.target import NvmetTarget
from meshfusion.jbof.errors import ConfigError
from tests.dpu.export.cases import HIDDEN, PREFIX, TCP, A, B, chap_text, export, host_nqn, key_file, namespace, tenant
from tests.dpu.export.fake_nvmet import FakeKernel, FakePort, os_error

DEVICES = {f"/dev/{name}" for name in ("a0", "a1", "b0", "b1")}


def devices(base: Tenant) -> Tenant:
    """The same with block devices for namespaces."""
    paths = (namespace(there.nsid, f"/dev/{there.backing}") for there in base.namespaces)
    return replace(base, namespaces=frozenset(paths))


def exported(*tenants: Tenant, listener: Listener = TCP, fenced: str = "") -> Export:
    hosts = frozenset(host_nqn(host) for host in fenced.split())
    return one_subsystem_per_host(PREFIX, map(devices, tenants), frozenset({listener}), hosts)


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel(set(DEVICES))


@pytest.fixture
def target(kernel: FakeKernel) -> NvmetTarget:
    return NvmetTarget(kernel, Export(PREFIX), patience_s=0.2)


def nqn(host: str) -> str:
    return host_subsystem_nqn(PREFIX, host_nqn(host))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_each_host_has_a_subsystem_with_its_tenants_namespaces(kernel: FakeKernel, target: NvmetTarget) -> None:
    report = target.desire(exported(A, B))
    assert report.converged, report.reasons
    assert set(kernel.subsystems) == {nqn("a-1"), nqn("a-2"), nqn("b-1")}
    assert kernel.reachable() == {
        (host_nqn(host), f"/dev/{host[0]}{number}") for host in ("a-1", "a-2", "b-1") for number in (0, 1)
    }
    (port,) = kernel.ports.values()
    assert (port.attributes["addr_traddr"], port.ana_state, len(port.subsystems)) == ("127.0.0.1", "optimized", 3)
    there = kernel.subsystems[nqn("b-1")].namespaces["1"]
    expected = namespace(1, "/dev/b0")
    assert (there["device_uuid"], there["device_nguid"].replace("-", "")) == (str(expected.uuid), expected.nguid)
    assert (target.reconcile().applied, target.reconcile().converged) == (0, True)


def test_changes_and_a_reboot(kernel: FakeKernel, target: NvmetTarget) -> None:
    target.desire(exported(A, B))
    smaller = exported(tenant("a", "a1", "a-2 a-3"), listener=HIDDEN)
    assert target.desire(smaller).converged
    assert kernel.reachable() == {(host_nqn("a-2"), "/dev/a1"), (host_nqn("a-3"), "/dev/a1")}
    assert {port.ana_state for port in kernel.ports.values()} == {"inaccessible"}
    assert set(kernel.hosts) == {host_nqn("a-2"), host_nqn("a-3")}
    kernel.reboot()
    assert target.reconcile().converged
    assert kernel.reachable() == {(host_nqn("a-2"), "/dev/a1"), (host_nqn("a-3"), "/dev/a1")}
    assert target.desire(Export(PREFIX)).converged
    assert [*kernel.subsystems, *kernel.ports, *kernel.hosts] == []


def test_a_fence_waits_for_requests_in_flight(kernel: FakeKernel, target: NvmetTarget) -> None:
    target.desire(exported(A, B))
    kernel.connect_host(nqn("a-1"), host_nqn("a-1"))
    event = kernel.hold[nqn("a-1"), "1"] = threading.Event()
    fence = target.fence(host_nqn("a-1"))
    assert isinstance(fence, NotYet)
    assert "the kernel has been at it" in fence.reason
    assert kernel.subsystems[nqn("a-1")].namespaces["1"]["enable"] == "0", "reads as if it were done"
    assert isinstance(target.fence(host_nqn("a-1")), NotYet)
    assert isinstance(target.fence(host_nqn("b-1")), NotYet), "nvmet's lock is held, nothing can be known"
    event.set()
    wait_until(lambda: target.fence(host_nqn("a-1")) == Confirmed())
    assert nqn("a-1") not in kernel.subsystems
    assert target.desire(exported(A)).converged
    assert set(kernel.subsystems) == {nqn("a-2")}, "neither the fenced a-1 nor b-1 come back"
    kernel.reboot()
    assert target.reconcile().converged
    assert set(kernel.subsystems) == {nqn("a-2")}


def test_a_service_that_restarts_while_the_kernel_waits_does_not_take_it_for_done(kernel: FakeKernel) -> None:
    NvmetTarget(kernel, exported(A), patience_s=0.2).reconcile()
    event = kernel.hold[nqn("a-1"), "1"] = threading.Event()
    fenced = exported(A, fenced="a-1")
    assert isinstance(NvmetTarget(kernel, fenced, patience_s=0.2).fence(host_nqn("a-1")), NotYet)
    successor = NvmetTarget(kernel, fenced, patience_s=0.2)
    assert isinstance(successor.fence(host_nqn("a-1")), NotYet), "its write of 0 waits behind the first"
    event.set()
    wait_until(lambda: successor.fence(host_nqn("a-1")) == Confirmed())


def test_what_was_half_made_is_made_anew(kernel: FakeKernel, target: NvmetTarget) -> None:
    target.desire(exported(A))
    kernel.subsystems[nqn("a-1")].namespaces["2"]["enable"] = "0"
    kernel.make(f"subsystems/{nqn('a-2')}/namespaces/9")
    assert target.reconcile().converged
    assert {len(subsystem.namespaces) for subsystem in kernel.subsystems.values()} == {2}
    assert len(kernel.reachable()) == 4


def test_a_port_that_no_listener_describes_is_left_before_the_subsystem_goes(
    kernel: FakeKernel, target: NvmetTarget
) -> None:
    target.desire(exported(A))
    kernel.ports["7"] = FakePort(dict.fromkeys(("addr_adrfam", "addr_trtype", "addr_traddr", "addr_trsvcid"), "fc"))
    kernel.link(f"ports/7/subsystems/{nqn('a-1')}", f"subsystems/{nqn('a-1')}")
    assert target.reconcile().converged
    assert list(kernel.ports) == ["1"]
    assert len(kernel.reachable()) == 4


def test_a_missing_device_stops_only_its_subsystem_and_leaves_nothing_half_made(
    kernel: FakeKernel, target: NvmetTarget
) -> None:
    kernel.devices.discard("/dev/a1")
    report = target.desire(exported(A, B))
    assert not report.converged
    assert all("No such file" in reason for reason in report.reasons)
    assert kernel.reachable() == {(host_nqn("b-1"), "/dev/b0"), (host_nqn("b-1"), "/dev/b1")}
    kernel.devices.add("/dev/a1")
    assert target.reconcile().converged


def test_keys_reach_the_kernel_and_no_message(kernel: FakeKernel, target: NvmetTarget, tmp_path: Path) -> None:
    key = tmp_path / "key"
    keyed = Tenant("a", A.namespaces, frozenset({Host(host_nqn("a-1"), HostKey(key))}))
    missing = target.desire(exported(keyed))
    assert "cannot be read" in missing.reasons[0]
    key.write_text("secret-of-a wrong form\n")
    assert not any("secret" in reason for reason in target.reconcile().reasons)
    key.write_text("DHHC-1:00:abc:\n")
    assert target.reconcile().converged
    assert kernel.hosts[host_nqn("a-1")] == "DHHC-1:00:abc:"


def test_a_new_key_is_set_and_nothing_is_made_anew(kernel: FakeKernel, target: NvmetTarget, tmp_path: Path) -> None:
    def keyed(number: int) -> Export:
        key = key_file(tmp_path / "key", chap_text(number))
        return exported(Tenant("a", A.namespaces, frozenset({Host(host_nqn("a-1"), key)})))

    assert target.desire(keyed(1)).converged
    kernel.connect_host(nqn("a-1"), host_nqn("a-1"))
    changes: list[str] = []
    kernel.fault = changes.append
    report = target.desire(keyed(2))
    assert (report.converged, report.applied) == (True, 1)
    assert changes == [f"{what} hosts/{host_nqn('a-1')}/dhchap_key" for what in ("hide", "write")]
    assert kernel.hosts[host_nqn("a-1")] == chap_text(2)
    assert kernel.connected == {(nqn("a-1"), host_nqn("a-1"))}
    assert target.desire(keyed(2)).applied == 0
    kernel.hosts[host_nqn("a-1")] = chap_text(3)
    assert target.reconcile().applied == 1, "what somebody else wrote is put right"
    assert kernel.hosts[host_nqn("a-1")] == chap_text(2)


def test_what_nvmet_cannot_do_safely_is_refused(target: NvmetTarget) -> None:
    with pytest.raises(ConfigError, match="2 hosts, not one"):
        target.desire(export(A))
    (one,) = exported(tenant("a", "a0", "a-1")).subsystems
    with pytest.raises(ConfigError, match="is not named after its host"):
        target.desire(Export(PREFIX, frozenset({replace(one, nqn=f"{PREFIX}:other")})))
    (two,) = exported(tenant("b", "b0", "b-1"), listener=HIDDEN).subsystems
    with pytest.raises(ConfigError, match="two ANA states"):
        target.desire(Export(PREFIX, frozenset({one, two})))


def test_the_real_tree_is_files_folders_and_links(tmp_path: Path) -> None:
    with pytest.raises(TargetUnreachableError, match="does not exist"):
        KernelConfigFs(tmp_path / "none")
    (tmp_path / "hosts").mkdir()
    (tmp_path / "subsystems").mkdir()
    tree = KernelConfigFs(tmp_path)
    tree.make("hosts/h")
    (tmp_path / "hosts/h/dhchap_key").write_text("\n")
    tree.hide("hosts/h/dhchap_key")
    assert (tmp_path / "hosts/h/dhchap_key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StepRefusedError, match="hide hosts/h/none: No such file"):
        tree.hide("hosts/h/none")
    tree.write("hosts/h/dhchap_key", "DHHC-1:")
    assert tree.read("hosts/h/dhchap_key") == "DHHC-1:"
    tree.link("subsystems/link", "hosts/h")
    assert (tmp_path / "subsystems/link").resolve() == (tmp_path / "hosts/h").resolve()
    assert tree.entries("subsystems") == {"link"}
    assert tree.entries("none") == set()
    tree.unlink("subsystems/link")
    with pytest.raises(StepRefusedError, match="write '1' to hosts/h/no_such_attribute"):
        tree.write("hosts/h/no_such_attribute", "1")
    assert not (tmp_path / "hosts/h/no_such_attribute").exists()
    with pytest.raises(StepRefusedError, match="remove hosts/h: Directory not empty"):
        tree.remove("hosts/h")


def _tenants(draw: st.DrawFn) -> list[Tenant]:
    hosts = draw(st.sets(st.sampled_from(("a-1", "a-2", "b-1"))))
    backings = draw(st.sets(st.sampled_from(("a0", "a1", "b0"))))
    return [
        tenant(
            name,
            " ".join(sorted(backing for backing in backings if backing[0] == name)),
            " ".join(host for host in hosts if host[0] == name),
        )
        for name in "ab"
    ]


@st.composite
def exports(draw: st.DrawFn) -> Export:
    state = draw(st.sampled_from(list(AnaState)))
    port = draw(st.sampled_from((4420, 4421)))
    return exported(*_tenants(draw), listener=Listener(Address("tcp", "127.0.0.1", port), state))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            exports(), st.sampled_from(("reconcile", "reboot", "connect", "successor", "fence a-1", "fence b-1"))
        ),
        max_size=8,
    ),
    st.lists(st.booleans(), max_size=60),
)
def test_it_converges_and_nobody_gets_what_is_not_theirs(actions: list[Export | str], faults: list[bool]) -> None:
    kernel = FakeKernel(set(DEVICES))
    wanted, fenced = Export(PREFIX), set[str]()
    target = NvmetTarget(kernel, wanted)

    def fault(_change: str) -> None:
        if faults and faults.pop():
            raise os_error(5)

    def watch() -> None:
        for host, device in kernel.reachable():
            assert host.rpartition(":")[2][0] == device.removeprefix("/dev/")[0]
            assert host not in fenced

    kernel.fault, kernel.watch = fault, watch
    for action in actions:
        match action:
            case Export():
                wanted = action.fencing(wanted.fenced)
                target.desire(action)
            case "reboot":
                kernel.reboot()
            case "connect":
                for name, subsystem in kernel.subsystems.items():
                    if any(name in port.subsystems for port in kernel.ports.values()):
                        for host in subsystem.hosts:
                            kernel.connect_host(name, host)
            case "successor":
                target = NvmetTarget(kernel, wanted)
            case "fence a-1" | "fence b-1":
                host = host_nqn(action.removeprefix("fence "))
                wanted = wanted.fencing(frozenset({host}))
                if target.fence(host) == Confirmed():
                    fenced.add(host)
                    watch()
            case _:
                target.reconcile()
    faults.clear()
    report = target.reconcile()
    assert report.converged, report.reasons
    assert kernel.reachable() == {
        (host.nqn, there.backing)
        for subsystem in wanted.subsystems
        for host in subsystem.hosts
        if host.nqn not in wanted.fenced
        for there in subsystem.namespaces
    }
