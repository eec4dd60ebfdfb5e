"""Two pools of one service on one target: each host reaches its own pool only, whatever the keepers do in between."""

from __future__ import annotations

import errno
import itertools
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from meshfusion.dpu.export.desired import Export
from meshfusion.dpu.export.fence import Confirmed, NotYet
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.dpu.export.nvmet.target import NvmetTarget
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, nqn_prefix_of
from meshfusion.dpu.export.spdk.sizing import MIB, Machine, size
from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget
from tests.dpu.export.cases import TCP
from tests.dpu.export.fake_nvmet import FakeKernel, os_error
from tests.dpu.export.fake_rpc import FakeRpc
from tests.dpu.export.fake_spdk import FakeSpdk
from tests.dpu.export.fake_subsystem import INTERNAL
from tests.dpu.export.keeper_cases import Rig, until

RED, BLUE = uuid.UUID(int=1), uuid.UUID(int=2)
NAMES = {RED: "red", BLUE: "blue"}
HOSTS = ("1", "2")  # of each pool the same: what sets them apart is the pool


def plan_of(kind: TargetKind, pool: uuid.UUID, folder: Path) -> ExportPlan:
    keys = HostKeys(folder / NAMES[pool])
    (folder / NAMES[pool]).mkdir(exist_ok=True)
    for host in HOSTS:
        keys.make(host)
    backings = {0: NAMES[pool], 1: f"{NAMES[pool]}-1"}
    # The prefix that is configured is the service's, and so the same for both.
    return ExportPlan(kind, nqn_prefix_of(pool, "nqn.2026-11.x:y"), pool, backings, frozenset({TCP}), keys=keys)


def pairs(plan: ExportPlan, *hosts: str) -> set[tuple[str, str]]:
    return set(itertools.product(map(plan.host_nqn, hosts), plan.backings.values()))


def crossing(reachable: set[tuple[str, str]], plans: list[ExportPlan]) -> set[tuple[str, str]]:
    allowed: set[tuple[str, str]] = set()
    return reachable - allowed.union(*(pairs(plan, *HOSTS) for plan in plans))


# ---- SPDK ------------------------------------------------------------------------------------------------------------


class TwoOnSpdk:
    """``interleave``: called before each call of the red one."""

    def __init__(self, folder: Path) -> None:
        self.process = FakeSpdk()
        self.plans = [plan_of(TargetKind.SPDK, pool, folder) for pool in (RED, BLUE)]
        self.rpcs = [FakeRpc(), FakeRpc()]
        self.restart()
        self.interleave: Callable[[], None] = lambda: None
        self.rpcs[0].interfere = self._interfere
        self.targets = [self._target(rpc, plan) for rpc, plan in zip(self.rpcs, self.plans, strict=True)]

    def _target(self, rpc: FakeRpc, plan: ExportPlan) -> SpdkTarget:
        def attach(rpc: FakeRpc) -> None:
            there = rpc.call("bdev_get_bdevs", 1.0)
            for name in plan.backings.values():
                if name not in {bdev["name"] for bdev in there}:
                    rpc.call("bdev_malloc_create", 1.0, name=name, num_blocks=1, block_size=4096)

        settings = SpdkSettings(size(Machine(400 * MIB, 1, connections=4)), frozenset({"tcp"}), attach)  # type: ignore[arg-type]
        return SpdkTarget(rpc, settings, Export(plan.nqn_prefix))

    def _interfere(self, method: str) -> str:
        self.interleave()
        assert not crossing(self.process.reachable(), self.plans)
        return ""

    def restart(self) -> None:
        self.process = FakeSpdk()
        for rpc in self.rpcs:
            rpc.process = self.process

    def desire(self, which: int, *hosts: str) -> bool:
        return self.targets[which].desire(self.plans[which].export(hosts)).converged


@pytest.fixture
def spdk(tmp_path: Path) -> TwoOnSpdk:
    return TwoOnSpdk(tmp_path)


def test_spdk_gives_each_host_its_own_pool_and_again_after_a_restart(spdk: TwoOnSpdk) -> None:
    red, blue = spdk.plans
    assert spdk.desire(0, "1", "2")
    assert spdk.desire(1, "1")
    expected = pairs(red, "1", "2") | pairs(blue, "1")
    assert spdk.process.reachable() == expected
    assert spdk.desire(0, "1")  # red changes, blue stays
    assert spdk.process.reachable() == pairs(red, "1") | pairs(blue, "1")
    spdk.restart()
    for target in spdk.targets:
        while not target.reconcile().converged:  # the first notices that its connection is gone
            pass
    assert spdk.process.reachable() == pairs(red, "1") | pairs(blue, "1")
    assert len(spdk.process.keys) == 2


@pytest.mark.parametrize("after", range(0, 40, 3))
def test_spdk_between_any_two_calls_of_one_keeper_the_other_may_do_everything(spdk: TwoOnSpdk, after: int) -> None:
    """Also the start-up, and the removal of what the first has just seen."""
    red, blue = spdk.plans
    calls = itertools.count()

    def interleave() -> None:
        if next(calls) == after:
            while not spdk.desire(1, "1"):
                pass

    spdk.interleave = interleave
    for _ in range(2):
        is_converged = spdk.desire(0, "1", "2")
    assert is_converged
    while not spdk.desire(1, "1"):
        pass
    assert spdk.process.reachable() == pairs(red, "1", "2") | pairs(blue, "1")


def test_spdk_a_pool_whose_subsystem_is_busy_does_not_keep_the_others_hosts_waiting(spdk: TwoOnSpdk) -> None:
    """It is not known who is connected there, so that only fences wait."""
    red, blue = spdk.plans
    assert spdk.desire(1, "1")
    real_call = spdk.process.call
    (nqn,) = (subsystem.nqn for subsystem in blue.export(["1"]).subsystems)

    def busy(method: str, parameters: dict[str, object]) -> object:
        if method == "nvmf_subsystem_get_qpairs" and parameters["nqn"] == nqn:
            raise INTERNAL
        return real_call(method, parameters)

    spdk.process.call = busy  # type: ignore[method-assign]
    assert spdk.desire(0, "1")
    assert red.is_served(spdk.targets[0].read(red.export(["1"])), "1")
    verdict = spdk.targets[0].fence(red.host_nqn("1"))
    assert isinstance(verdict, NotYet)
    assert f"who is connected to {nqn} is not known" in verdict.reason
    assert not spdk.desire(1, "1"), "of its own it must know"
    spdk.process.call = real_call  # type: ignore[method-assign]
    assert spdk.targets[0].fence(red.host_nqn("1")) == Confirmed()
    assert spdk.process.reachable() == pairs(blue, "1")


# ---- nvmet -----------------------------------------------------------------------------------------------------------


class TwoOnNvmet:
    """``interleave``: called before each change by the red one."""

    def __init__(self, folder: Path) -> None:
        self.plans = [plan_of(TargetKind.NVMET, pool, folder) for pool in (RED, BLUE)]
        self.kernel = FakeKernel({backing for plan in self.plans for backing in plan.backings.values()})
        self.targets = [NvmetTarget(self.kernel, plan.export(()), patience_s=10.0) for plan in self.plans]
        self.interleave: Callable[[str], None] = lambda _change: None
        self._is_inside = False
        self.kernel.fault = self._fault
        self.kernel.watch = lambda: self._check()

    def _fault(self, change: str) -> None:
        if not self._is_inside:
            self._is_inside = True
            try:
                self.interleave(change)
            finally:
                self._is_inside = False

    def _check(self) -> None:
        assert not crossing(self.kernel.reachable(), self.plans)

    def desire(self, which: int, *hosts: str) -> bool:
        return self.targets[which].desire(self.plans[which].export(hosts)).converged


@pytest.fixture
def nvmet(tmp_path: Path) -> TwoOnNvmet:
    return TwoOnNvmet(tmp_path)


def test_nvmet_gives_each_host_its_own_pool_and_again_after_a_reboot(nvmet: TwoOnNvmet) -> None:
    red, blue = nvmet.plans
    assert nvmet.desire(0, "1", "2")
    assert nvmet.desire(1, "1")
    assert nvmet.kernel.reachable() == pairs(red, "1", "2") | pairs(blue, "1")
    assert len(nvmet.kernel.ports) == 1, "they listen at one address"
    assert nvmet.desire(0)
    assert nvmet.kernel.reachable() == pairs(blue, "1")
    assert len(nvmet.kernel.ports) == 1
    assert nvmet.desire(0, "1")
    nvmet.kernel.reboot()
    assert all(target.reconcile().converged for target in nvmet.targets)
    assert nvmet.kernel.reachable() == pairs(red, "1") | pairs(blue, "1")


@pytest.mark.parametrize("coming", [True, False])
@pytest.mark.parametrize("after", range(24))
def test_nvmet_between_any_two_changes_of_one_keeper_the_other_may_do_everything(
    nvmet: TwoOnNvmet, after: int, coming: bool
) -> None:
    """The port that both use is made, or is removed, by the other just then. Nobody needs to ask twice."""
    red, blue = nvmet.plans
    changes = itertools.count()
    assert coming or nvmet.desire(1, "1")

    def interleave(_change: str) -> None:
        if next(changes) == after:
            assert nvmet.desire(1, *(["1"] if coming else []))

    nvmet.interleave = interleave
    assert nvmet.desire(0, "1", "2")
    nvmet.interleave = lambda _change: None
    assert nvmet.desire(1, *(["1"] if coming else []))
    assert nvmet.kernel.reachable() == pairs(red, "1", "2") | (pairs(blue, "1") if coming else set())
    assert len(nvmet.kernel.ports) == 1, "no port is left that no subsystem is at"


def test_nvmet_a_port_that_cannot_be_had_is_told_and_not_left_behind(nvmet: TwoOnNvmet) -> None:
    def refuse(change: str) -> None:
        if change.startswith("link ports/"):
            raise os_error(errno.EADDRINUSE)

    nvmet.interleave = refuse
    report = nvmet.targets[0].desire(nvmet.plans[0].export(["1"]))
    assert "Address already in use" in "; ".join(report.reasons)
    assert nvmet.kernel.ports == {}


# ---- pools -----------------------------------------------------------------------------------------------------------


def test_two_exported_pools_come_and_go_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "b").mkdir()
    red, blue = Rig(tmp_path / "r"), Rig(tmp_path / "b")
    blue.pool.close()
    red.kernel.devices |= {blue.data}
    blue.kernel = red.kernel
    blue.open()
    try:
        for rig, incarnation in ((red, "r1"), (red, "r2"), (blue, "b1")):
            rig.connect(rig.attach(incarnation))
        assert (red.hosts_that_reach_it(), blue.hosts_that_reach_it()) == ({"r1", "r2"}, {"b1"})
        red.kernel.reboot()
        until(lambda: red.hosts_that_reach_it() == {"r1", "r2"} and blue.hosts_that_reach_it() == {"b1"})
        red.pool.close()
        blue.attach("b2")
        assert (red.hosts_that_reach_it(), blue.hosts_that_reach_it()) == ({"r1", "r2"}, {"b1", "b2"})
        keys = sorted(path.name for path in (tmp_path / "r" / "pool" / "holders").glob("*.key"))
        assert keys == ["r1.key", "r2.key"]
    finally:
        red.pool.close()
        blue.pool.close()
