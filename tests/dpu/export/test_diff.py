"""The order of changes, one plan at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from meshfusion.dpu.export.actual import OTHER_KEY, ActualSubsystem, AllowedHost, Connection
from meshfusion.dpu.export.desired import Address, Export, Host, HostKey, Listener, Namespace, Subsystem
from meshfusion.dpu.export.diff import Plan, diff
from meshfusion.dpu.export.fence import Confirmed, NotYet, verdict
from meshfusion.dpu.export.steps import (
    AddHost,
    AddListener,
    AddNamespace,
    CreateSubsystem,
    DeleteSubsystem,
    DenyAnyHost,
    RemoveHost,
    RemoveListener,
    RemoveNamespace,
    SetAnaState,
    SetHostKey,
)
from meshfusion.jbof.errors import ConfigError
from tests.dpu.export.cases import HIDDEN, PREFIX, TCP, A, export, host_nqn, namespace, nqn_of, tenant

NQN = nqn_of("a")
(WANTED,) = export(A).subsystems
EXACT = ActualSubsystem(
    NQN,
    WANTED.serial,
    namespaces=WANTED.namespaces,
    hosts=frozenset(AllowedHost(host.nqn) for host in WANTED.hosts),
    listeners=WANTED.listeners,
)
NS0, NS1 = sorted(WANTED.namespaces, key=lambda there: there.nsid)
STRANGER = host_nqn("x")


def plan(there: ActualSubsystem, wanted: Export | None = None, *, removal_disconnects: bool = True) -> Plan:
    return diff(wanted or export(A), (there,), removal_disconnects=removal_disconnects)


def steps(there: ActualSubsystem, wanted: Export | None = None, *, removal_disconnects: bool = True) -> list[object]:
    return list(plan(there, wanted, removal_disconnects=removal_disconnects).steps)


def test_namespaces_come_before_hosts_and_listeners_last() -> None:
    assert diff(export(A), (), removal_disconnects=True).steps == (
        CreateSubsystem(NQN, WANTED.serial),
        AddNamespace(NQN, NS0),
        AddNamespace(NQN, NS1),
        AddHost(NQN, Host(host_nqn("a-1"))),
        AddHost(NQN, Host(host_nqn("a-2"))),
        AddListener(NQN, TCP),
    )


def test_nothing_to_do() -> None:
    assert plan(EXACT) == Plan()
    assert plan(replace(EXACT, nqn="nqn.2026-11.io.example:other", allow_any_host=True), export()) == Plan()


def test_hosts_go_first_and_nothing_is_given_in_the_same_plan() -> None:
    there = replace(
        EXACT, hosts=EXACT.hosts | {AllowedHost(STRANGER)}, namespaces=frozenset({NS0}), listeners=frozenset()
    )
    assert steps(there) == [RemoveHost(NQN, STRANGER)]
    assert steps(replace(there, allow_any_host=True)) == [DenyAnyHost(NQN), RemoveHost(NQN, STRANGER)]
    moved = steps(there, export(tenant("b", "b0", "")))
    assert moved[-5:-3] == [RemoveNamespace(NQN, 1), DeleteSubsystem(NQN)], "all that takes comes before all that gives"
    assert [type(step) for step in moved[-3:]] == [CreateSubsystem, AddNamespace, AddListener]


ONE, TWO = "1" * 16, "2" * 16
KEY = HostKey(Path("/key"), TWO)


def with_first_host(there: AllowedHost) -> ActualSubsystem:
    return replace(EXACT, hosts=frozenset({there, AllowedHost(host_nqn("a-2"))}))


def wanting(host: Host) -> Export:
    return Export(PREFIX, frozenset({replace(WANTED, hosts=frozenset({host, Host(host_nqn("a-2"))}))}))


def test_a_host_that_must_authenticate_or_need_not_any_more_is_let_in_anew() -> None:
    nqn = host_nqn("a-1")
    assert steps(EXACT, wanting(Host(nqn, KEY))) == [RemoveHost(NQN, nqn)]
    assert steps(with_first_host(AllowedHost(nqn, ONE))) == [RemoveHost(NQN, nqn, (ONE,))]


@pytest.mark.parametrize("removal_disconnects", [True, False])
@pytest.mark.parametrize("former", [ONE, OTHER_KEY])
def test_a_new_key_takes_the_place_of_the_former_and_nothing_else_changes(
    former: str, removal_disconnects: bool
) -> None:
    host = Host(host_nqn("a-1"), KEY)
    there = with_first_host(AllowedHost(host.nqn, former))
    there = replace(there, connections=frozenset({Connection(host.nqn, live=True)} if removal_disconnects else ()))
    assert steps(there, wanting(host), removal_disconnects=removal_disconnects) == [SetHostKey(NQN, host, former)]
    assert steps(with_first_host(AllowedHost(host.nqn, TWO)), wanting(host)) == []


def test_a_new_key_waits_for_nobody_that_is_being_removed() -> None:
    host = Host(host_nqn("a-1"), KEY)
    hosts = frozenset({AllowedHost(host.nqn, ONE), AllowedHost(host_nqn("a-2")), AllowedHost(STRANGER)})
    there = replace(EXACT, hosts=hosts, namespaces=frozenset())
    assert steps(there, wanting(host)) == [RemoveHost(NQN, STRANGER), SetHostKey(NQN, host, ONE)]
    draining = replace(there, hosts=hosts - {AllowedHost(STRANGER)})
    draining = replace(draining, connections=frozenset({Connection(STRANGER, live=False)}))
    found = plan(draining, wanting(host))
    assert found.steps == (SetHostKey(NQN, host, ONE),)
    assert len(found.waiting) == 1


def test_a_key_that_cannot_be_read_changes_nothing() -> None:
    host = Host(host_nqn("a-1"), HostKey(Path("/key")))
    assert steps(with_first_host(AllowedHost(host.nqn, ONE)), wanting(host)) == []


def test_a_host_whose_tls_key_is_another_is_let_in_anew() -> None:
    """No target takes another one in its place."""
    nqn = host_nqn("a-1")
    host = Host(nqn, KEY, HostKey(Path("/psk"), ONE))
    wanted = Export(PREFIX, frozenset({replace(WANTED, hosts=frozenset({host}), is_secure=True)}))

    def with_host(there: AllowedHost) -> ActualSubsystem:
        return replace(EXACT, hosts=frozenset({there}))

    assert steps(with_host(AllowedHost(nqn, TWO, ONE)), wanted) == []
    assert steps(with_host(AllowedHost(nqn, TWO, TWO)), wanted) == [RemoveHost(NQN, nqn, (TWO, TWO))]
    assert steps(with_host(AllowedHost(nqn, TWO)), wanted) == [RemoveHost(NQN, nqn, (TWO,))]
    plain = Export(PREFIX, frozenset({replace(WANTED, hosts=frozenset({Host(nqn, KEY)}))}))
    assert steps(with_host(AllowedHost(nqn, TWO, ONE)), plain) == [RemoveHost(NQN, nqn, (TWO, ONE))]


def test_a_namespace_of_another_backing_or_identity_is_replaced() -> None:
    for wrong in (replace(NS0, backing="b0"), replace(NS0, uuid=UUID(int=1)), replace(NS0, nguid="f" * 32)):
        there = replace(EXACT, namespaces=frozenset({wrong, NS1}))
        assert steps(there) == [RemoveNamespace(NQN, 1), AddNamespace(NQN, NS0)]


def test_listeners() -> None:
    other = Listener(Address("tcp", "127.0.0.2", 4420))
    assert steps(replace(EXACT, listeners=frozenset({HIDDEN, other}))) == [
        RemoveListener(NQN, other.address),
        SetAnaState(NQN, TCP),
    ]


def test_what_a_removed_host_has_in_flight_is_waited_for() -> None:
    there = replace(EXACT, namespaces=frozenset(), connections=frozenset({Connection(STRANGER, live=False)}))
    found = plan(there)
    assert found.steps == ()
    assert [waiting.reason for waiting in found.waiting] == [f"queue pairs of {STRANGER} are still being torn down"]
    gone = plan(there, Export(PREFIX))
    assert gone.steps == (RemoveHost(NQN, host_nqn("a-1")), RemoveHost(NQN, host_nqn("a-2")))
    assert len(gone.waiting) == 1


def test_a_stranger_that_lives_costs_the_subsystem() -> None:
    there = replace(EXACT, connections=frozenset({Connection(STRANGER, live=True)}))
    assert steps(there)[-1] == DeleteSubsystem(NQN)


def test_an_allowed_hosts_connections_are_no_obstacle() -> None:
    there = replace(EXACT, connections=frozenset({Connection(host_nqn("a-1"), live=True)}), listeners=frozenset())
    assert steps(there) == [AddListener(NQN, TCP)]


@pytest.mark.parametrize(
    "there",
    [
        replace(EXACT, hosts=EXACT.hosts | {AllowedHost(STRANGER)}),
        replace(EXACT, allow_any_host=True),
        replace(EXACT, serial="other"),
        replace(EXACT, foreign="namespace 9 is disabled"),
    ],
)
def test_where_removal_does_not_disconnect_the_subsystem_goes(there: ActualSubsystem) -> None:
    assert steps(there, removal_disconnects=False)[-1] == DeleteSubsystem(NQN)


def test_a_busy_subsystem_is_left_alone() -> None:
    assert plan(replace(EXACT, serial="other", pending="busy")).steps == ()
    assert plan(replace(EXACT, pending="busy"), Export(PREFIX)).waiting[0].reason == "busy"


def test_a_fenced_host_is_not_admitted() -> None:
    assert steps(EXACT, export(A, fenced="a-1")) == [RemoveHost(NQN, host_nqn("a-1"))]


def test_verdicts() -> None:
    host = host_nqn("a-1")
    assert verdict((), host) == Confirmed()
    assert isinstance(verdict((EXACT,), host), NotYet)
    removed = replace(EXACT, hosts=frozenset())
    assert verdict((removed,), host) == Confirmed()
    for live in (True, False):
        connected = replace(removed, connections=frozenset({Connection(host, live)}))
        assert verdict((connected,), host) == NotYet(f"{host} still has queue pairs at {NQN}")
    assert isinstance(verdict((removed,), host, subsystem_nqn=NQN), NotYet)
    foreign = replace(EXACT, nqn="nqn.2026-11.io.example:other")
    assert isinstance(verdict((removed, foreign), host), NotYet), "whoever lets it in"


def test_what_cannot_be_exported() -> None:
    with pytest.raises(ConfigError, match="backing a0 would belong to tenants"):
        export(A, tenant("b", "a0", "b-1"))
    with pytest.raises(ConfigError, match=r"host .*a-1 would belong to tenants"):
        export(A, tenant("b", "b0", "a-1"))
    with pytest.raises(ConfigError, match="does not begin with"):
        Export(PREFIX, frozenset({replace(WANTED, nqn="nqn.2026-11.io.example:other")}))
    with pytest.raises(ConfigError, match="NSID 1 is there twice"):
        replace(WANTED, namespaces=frozenset({namespace(1, "a0"), namespace(1, "a1")}))
    for nsid, nguid, backing in ((0, "0" * 32, "x"), (256, "0" * 32, "x"), (1, "A" * 32, "x"), (1, "0" * 32, "")):
        with pytest.raises(ConfigError):
            Namespace(nsid, UUID(int=0), nguid, backing)
    with pytest.raises(ConfigError, match="not an absolute path"):
        HostKey(Path("key"))
    with pytest.raises(ConfigError, match="slash"):
        Host("nqn.2026-11.io.example:a/b")
    for address in (("fc", "127.0.0.1", 1), ("tcp", "localhost", 1), ("tcp", "::1", 0)):
        with pytest.raises(ConfigError):
            Address(*address)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="serial"):
        Subsystem(NQN, "a", "x" * 21)
