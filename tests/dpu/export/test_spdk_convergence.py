"""Any sequence of desired states, faults, restarts, connections and fences ends as desired, and on the way nobody gets
what is not theirs. Two tenants take turns on two subsystems, which the layouts never do: it is the harder case.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from meshfusion.dpu.export.desired import AnaState, Export, Host, Listener, Subsystem
from meshfusion.dpu.export.fence import Confirmed
from meshfusion.dpu.export.spdk.sizing import MIB, Machine, size
from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget
from tests.dpu.export.cases import PREFIX, TCP, host_nqn, namespace
from tests.dpu.export.fake_rpc import FakeRpc
from tests.dpu.export.fake_spdk import FakeSpdk
from tests.dpu.export.test_spdk_target import attach

NQNS = (f"{PREFIX}:s1", f"{PREFIX}:s2")
HOSTS = ("a-1", "a-2", "b-1")
FAULTS = ("refuse", "lose request", "lose answer", "restart")
SETTINGS = SpdkSettings(size(Machine(memory_bytes=400 * MIB, cores=1)), frozenset({"tcp"}), attach)


def tenant_of(name: str) -> str:
    """Of a host's NQN or a backing."""
    return name.rpartition(":")[2][0]


@st.composite
def exports(draw: st.DrawFn) -> Export:
    subsystems = []
    for number, nqn in enumerate(NQNS):
        tenant = draw(st.sampled_from(["a", "b", ""]))
        if not tenant:
            continue
        backing = draw(st.sampled_from(["", f"{tenant}{number}"]))  # a bdev is in one subsystem only
        hosts = draw(st.sets(st.sampled_from([host for host in HOSTS if host[0] == tenant])))
        state = draw(st.sampled_from(list(AnaState)))
        subsystems.append(
            Subsystem(
                nqn,
                tenant,
                f"MF{tenant}",
                frozenset({namespace(1, backing)} if backing else ()),
                frozenset(Host(host_nqn(host)) for host in hosts),
                frozenset({Listener(TCP.address, state)} if draw(st.booleans()) else ()),
            )
        )
    return Export(PREFIX, frozenset(subsystems))


EVENTS = ("connect", "connect slow", "race", "finish", "reconcile", "restart", "tamper")
ACTIONS = st.one_of(
    exports(),
    exports(),
    st.tuples(st.just("fence"), st.sampled_from(HOSTS)),
    st.tuples(st.sampled_from(EVENTS), st.just("")),
    st.tuples(st.sampled_from(("connect", "connect slow", "race")), st.just("")),
    st.tuples(st.just("refuse"), st.sampled_from(("remove_host", "remove_ns", "remove_listener", "add_ns", ""))),
)
SCHEDULES = st.one_of(st.just([]), st.lists(st.sampled_from(("",) * 6 + FAULTS), max_size=80))


@dataclass
class World:
    """Watches every call."""

    faults: list[str]
    rpc: FakeRpc = field(default_factory=FakeRpc)
    wanted: Export = field(default_factory=lambda: Export(PREFIX))
    confirmed: set[str] = field(default_factory=set)
    seen: set[tuple[str, str]] = field(default_factory=set)
    watched: FakeSpdk | None = None
    refused: str = ""

    def __post_init__(self) -> None:
        self.target = SpdkTarget(self.rpc, SETTINGS, self.wanted)
        self.rpc.interfere = self.interfere
        self.rpc.watch = self.watch

    @property
    def spdk(self) -> FakeSpdk:
        assert self.rpc.process is not None
        return self.rpc.process

    def interfere(self, method: str) -> str:
        if method == f"nvmf_subsystem_{self.refused}":
            return "refuse"
        return self.faults.pop() if self.faults else ""

    def watch(self) -> None:
        if self.watched is not self.spdk:
            self.watched, self.seen = self.spdk, set()
        now = self.spdk.reachable()
        for host, backing in now:
            assert tenant_of(host) == tenant_of(backing), f"{host} reaches {backing}"
        granted = {
            (host.nqn, there.backing)
            for subsystem in self.wanted.admitted()
            for host in subsystem.hosts
            for there in subsystem.namespaces
        }
        assert now - self.seen <= granted, "given to somebody who should not have it"
        self.seen = now
        for subsystem in self.spdk.subsystems.values():
            served = {*subsystem.hosts, *(pair.host_nqn for pair in subsystem.pairs)}
            assert not served & self.confirmed, "a confirmed fence does not hold"

    def act(self, action: Export | tuple[str, str]) -> None:
        if isinstance(action, Export):
            self.wanted = action.fencing(self.wanted.fenced)
            self.target.desire(action)
            return
        kind, name = action
        host = host_nqn(name)
        match kind:
            case "reconcile":
                self.target.reconcile()
            case "restart":
                self.rpc.process = FakeSpdk()
            case "fence":
                self.wanted = self.wanted.fencing(frozenset({host}))
                if self.target.fence(host) == Confirmed():
                    self.confirmed.add(host)
                    self.watch()
            case "finish":
                self.finish()
            case "tamper":
                for subsystem in self.spdk.subsystems.values():
                    subsystem.listeners.clear()
                    subsystem.serial = "other"
            case "refuse":
                self.refused = name
            case "race":
                self.spdk.racing_hosts |= set(map(host_nqn, HOSTS))
            case _:
                for subsystem in self.spdk.subsystems.values():
                    for host in subsystem.hosts if subsystem.listeners else ():
                        self.spdk.connect_host(subsystem.nqn, host)
                        self.spdk.stuck_hosts |= {host} if kind == "connect slow" else set()

    def finish(self) -> None:
        for host in HOSTS:
            self.spdk.finish(host_nqn(host))

    def settle(self) -> None:
        """No more faults; requests in flight end."""
        self.faults.clear()
        self.refused = ""
        for _ in range(3):
            self.finish()
            report = self.target.reconcile()
        assert report.converged, report.reasons

    def state(self) -> set[tuple[object, ...]]:
        """What the fake has, in the words of :meth:`desired_state`."""
        return {
            (
                subsystem.nqn,
                subsystem.serial,
                frozenset(subsystem.hosts),
                frozenset((nsid, there["bdev_name"]) for nsid, there in subsystem.namespaces.items()),
                frozenset((address["trsvcid"], state) for address, state in subsystem.listeners),
            )
            for subsystem in self.spdk.subsystems.values()
        }

    def desired_state(self) -> set[tuple[object, ...]]:
        return {
            (
                subsystem.nqn,
                subsystem.serial,
                frozenset(host.nqn for host in subsystem.hosts if host.nqn not in self.wanted.fenced),
                frozenset((there.nsid, there.backing) for there in subsystem.namespaces),
                frozenset((str(there.address.service), there.ana_state.value) for there in subsystem.listeners),
            )
            for subsystem in self.wanted.subsystems
        }


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, max_size=12), SCHEDULES)
def test_it_converges_and_nobody_gets_what_is_not_theirs(
    actions: list[Export | tuple[str, str]], faults: list[str]
) -> None:
    world = World(faults)
    for action in actions:
        world.act(action)
    world.settle()
    assert world.state() == world.desired_state()
    for host in world.wanted.fenced:
        assert world.target.fence(host) == Confirmed()
