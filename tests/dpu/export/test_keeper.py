"""A pool and the target that it is exported by: who may reach the data, and when somebody's space is free again."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.liveness import hold_liveness
from meshfusion.dpu.export.desired import Address, Export, Listener
from meshfusion.dpu.export.keeper import ExportKeeper
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.dpu.export.layout import host_subsystem_nqn
from meshfusion.dpu.export.nvmet.configfs import refused
from meshfusion.dpu.export.nvmet.target import NvmetTarget
from meshfusion.dpu.export.plan import ExportPlan, TargetKind, nqn_prefix_of
from meshfusion.dpu.pool import Pool, PoolOptions
from meshfusion.dpu.pool_create import add_drive, create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.jbof.errors import (
    ConfigError,
    MediaError,
    PoolBusyError,
    ServiceUnavailableError,
    StaleHolderError,
    UnsupportedError,
)
from meshfusion.jbof.nvme.auth_keys import parse_secret
from meshfusion.jbof.pool_addresses import drive_of_segment
from tests.dpu.export.fake_nvmet import FakeKernel, FakeSubsystem, os_error
from tests.dpu.pool_cases import IDENTITY, SEGMENT_BYTES, SIZE_BYTES, UNIT_BYTES, key, make_pool

PORTALS = (Address("rdma", "10.0.0.1"), Address("rdma", "10.0.1.1", 4421))
DEADLINE_S = 10.0
SILENCE_S = PoolOptions().holder_silence_s


class Rig:
    """One pool, its target's kernel, and a clock that tests turn."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pool"
        make_pool(self.path)
        self.data = str((self.path / "data").resolve())
        self.kernel = FakeKernel({self.data})
        self.now_s = 0.0
        self.prefix: str | None = None
        self.pool = self.open()

    def open(self) -> Pool:
        self.pool = Pool.open(self.path, clock=lambda: self.now_s, exports=partial(keeper, self.kernel, self.prefix))
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


def keeper(kernel: FakeKernel, prefix: str | None, pool_uuid: uuid.UUID, layout: PoolLayout) -> ExportKeeper:
    plan = ExportPlan(
        TargetKind.NVMET,
        nqn_prefix_of(pool_uuid, prefix),
        pool_uuid,
        {drive.number: str(drive.path.resolve()) for drive in find_drives(layout).here},
        frozenset(map(Listener, PORTALS)),
        keys=HostKeys(layout.holders),
    )
    return ExportKeeper(NvmetTarget(kernel, plan.export(()), patience_s=0.1), plan, period_s=0.05)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.pool.close()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


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


def test_a_target_that_lost_everything_is_told_anew(rig: Rig) -> None:
    attachment = rig.attach("one")
    rig.kernel.reboot()
    until(lambda: any(port.subsystems for port in rig.kernel.ports.values()))  # listeners come last
    rig.connect(attachment)
    assert rig.hosts_that_reach_it() == {"one"}


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


def test_a_target_that_refuses_admits_nobody(rig: Rig) -> None:
    def refuse(change: str) -> None:
        raise os_error(13)

    rig.kernel.fault = refuse
    with pytest.raises(ServiceUnavailableError, match=r"not exported to this host: .*refused"):
        rig.attach("one")
    assert rig.status().exports_problem
    rig.kernel.fault = lambda change: None
    until(lambda: rig.states() == {})
    until(lambda: rig.status().exports_problem == "")
    rig.connect(rig.attach("two"))


def test_a_service_without_exports_says_so(tmp_path: Path) -> None:
    make_pool(tmp_path / "pool")
    request = api.AttachRequest("one", "vllm", "1", "h", 7, IDENTITY, rank_count=1, access=api.Access.NVMEOF)
    with Pool.open(tmp_path / "pool") as pool, pytest.raises(UnsupportedError, match="exports nothing") as caught:
        pool.attach(request, deadline_s=DEADLINE_S)
    assert "exports" in caught.value.next_step


def test_a_keeper_survives_what_nobody_expected(rig: Rig) -> None:
    def crash(change: str) -> None:
        raise RuntimeError("a bug")

    rig.kernel.fault = crash
    with pytest.raises(ServiceUnavailableError):
        rig.attach("one")
    rig.kernel.fault = lambda change: None
    rig.connect(rig.attach("two"))


def test_for_spdk_a_tenant_has_one_subsystem() -> None:
    pool_uuid = uuid.uuid4()
    plan = ExportPlan(TargetKind.SPDK, nqn_prefix_of(pool_uuid), pool_uuid, {0: "bdev0"}, frozenset())
    export: Export = plan.export(["one", "two"])
    (subsystem,) = export.subsystems
    assert {host.nqn for host in subsystem.hosts} == {plan.host_nqn("one"), plan.host_nqn("two")}
    assert plan.reach("one").subsystem_nqn == plan.reach("two").subsystem_nqn == subsystem.nqn


def test_a_target_that_hangs_holds_up_nobody_else_and_not_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hang = threading.Event()

    def wait(path: str) -> None:
        hang.wait(20)

    rig.kernel.look = wait
    begun_s = time.monotonic()
    with pytest.raises(ServiceUnavailableError, match="not exported to this host"):
        rig.attach("one", deadline_s=0.3)
    monkeypatch.setattr(ExportKeeper.close, "__kwdefaults__", {"deadline_s": 0.3})
    rig.pool.close()
    assert time.monotonic() - begun_s < 5
    assert "the target has not answered" in caplog.text
    with pytest.raises(PoolBusyError):  # what it was asked may still be done
        rig.open()
    hang.set()


def test_a_target_that_cannot_be_read_is_not_asked_for_each_host_that_must_go(rig: Rig) -> None:
    """Each question may take as long as the target takes not to answer."""
    for name in ("one", "two"):
        rig.attach(name)
    reads: list[str] = []

    def fail(path: str) -> None:
        if path == "ports":
            reads.append(path)
            raise refused("list", path, os_error(5))

    rig.kernel.look = fail
    rig.now_s += SILENCE_S
    until(lambda: len(reads) >= 20)
    keeper = rig.pool._parts.taken.exports
    assert keeper is not None
    before, rounds = len(reads), keeper._rounds_done
    until(lambda: keeper._rounds_done >= rounds + 10)
    assert len(reads) - before <= 12, "once a round"
    assert set(rig.states().values()) == {"condemned"}
    rig.kernel.look = lambda path: None
    until(lambda: rig.states() == {})


def test_who_cannot_be_admitted_is_not_listed_again_and_again(rig: Rig) -> None:
    """Engines ask every few seconds, each time as another incarnation, and a target may be stuck for hours."""
    attachment = rig.attach("one")
    rig.connect(attachment)
    assert attachment.export is not None
    writing = rig.kernel.hold[attachment.export.subsystem_nqn, "1"] = threading.Event()
    rig.pool.detach(api.DetachRequest("one"), deadline_s=DEADLINE_S)
    until(lambda: rig.status().exports_problem != "")
    for i in range(3):
        with pytest.raises(ServiceUnavailableError, match="the kernel has been at it"):
            rig.attach(f"again-{i}")
    assert rig.states() == {"one": "condemned"}
    writing.set()
    rig.connect(rig.attach("two"))


def test_the_time_that_admission_takes_is_not_silence(rig: Rig) -> None:
    """A target may take most of ``holder_silence_s``, and a host's first heartbeat comes only after it was answered."""
    rig.attach("one")
    slow = threading.Event()

    def wait(change: str) -> None:
        rig.now_s += SILENCE_S - 1 if not slow.is_set() else 0
        slow.set()

    rig.kernel.fault = wait
    rig.attach("two")
    assert slow.is_set()
    rig.now_s += 2
    time.sleep(1.5)  # a tick
    assert rig.states().get("two") == "live"


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


def test_what_keeps_the_target_is_told_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    attachment = rig.attach("one")
    rig.connect(attachment)
    assert attachment.export is not None
    writing = rig.kernel.hold[attachment.export.subsystem_nqn, "1"] = threading.Event()
    rig.pool.detach(api.DetachRequest("one"), deadline_s=DEADLINE_S)
    time.sleep(2.5)
    told = [record.getMessage() for record in caplog.records if "not as they should be" in record.getMessage()]
    writing.set()
    until(lambda: rig.states() == {})
    assert 1 <= len(told) <= 2, told


def test_what_others_remove_while_it_is_read_costs_nobody_an_admission(rig: Rig) -> None:
    """Services share the kernel's target, and its tree has no moment in which it stands still."""
    comes = iter(range(6))

    def go_while_read(path: str) -> None:
        if path == "subsystems":
            nqn = f"nqn.2026-11.io.others:{next(comes, 'gone')}"
            rig.kernel.subsystems[nqn] = FakeSubsystem()
        if path.startswith("subsystems/nqn.2026-11.io.others:") and not path.split(":")[1].startswith("gone"):
            rig.kernel.subsystems.pop(path.split("/")[1], None)

    rig.kernel.look = go_while_read
    rig.attach("one")
    assert rig.status().exports_problem == ""


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


class DrivesRig(Rig):
    """A pool of three drives."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pool"
        create_pool_of_drives(self.path, size_bytes=SIZE_BYTES, segment_bytes=SEGMENT_BYTES, data_paths=[None] * 3)
        self.devices = {nsid: str((self.path / name).resolve()) for nsid, name in enumerate(DRIVE_FILES, start=1)}
        self.kernel = FakeKernel(set(self.devices.values()))
        self.now_s = 0.0
        self.prefix = None
        self.pool = self.open()

    def exported(self, attachment: api.Attachment) -> dict[int, str]:
        """The devices behind the namespaces of its subsystem."""
        assert attachment.export is not None
        folder = f"subsystems/{attachment.export.subsystem_nqn}/namespaces"
        return {int(nsid): self.kernel.read(f"{folder}/{nsid}/device_path") for nsid in self.kernel.entries(folder)}


DRIVE_FILES = ("data", "data.1", "data.2")


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[DrivesRig]:
    rig = DrivesRig(tmp_path)
    yield rig
    rig.pool.close()


def test_every_drive_is_a_namespace_of_each_host(drives: DrivesRig) -> None:
    one, two = drives.attach("one"), drives.attach("two")
    for attachment in (one, two):
        assert [namespace.nsid for namespace in attachment.namespaces] == [1, 2, 3]
        assert drives.exported(attachment) == drives.devices
        drives.connect(attachment)
    assert {device for _, device in drives.kernel.reachable()} == set(drives.devices.values())
    assert one.export is not None
    folder = f"subsystems/{one.export.subsystem_nqn}/namespaces"
    identities = [drives.kernel.read(f"{folder}/{nsid}/device_uuid") for nsid in (1, 2, 3)]
    assert identities[0] == one.pool_uuid, "as a pool of one drive shows itself"
    assert len(set(identities)) == 3


def test_extents_name_the_namespaces(drives: DrivesRig) -> None:
    attachment = drives.attach("one")
    extents = [extent for chunk in range(12) for extent in drives.reserve(attachment, chunk).extents]
    assert len({extent.namespace for extent in extents}) >= 2
    assert all(extent.namespace == drive_of_segment(extent.segment) + 1 for extent in extents)


def test_a_host_that_goes_loses_every_drive_and_waits_for_each(drives: DrivesRig) -> None:
    attachment = drives.attach("one")
    drives.connect(attachment)
    assert drives.reserve(attachment).outcome is api.ReserveOutcome.GRANTED
    assert attachment.export is not None
    writing = drives.kernel.hold[attachment.export.subsystem_nqn, "3"] = threading.Event()
    drives.now_s += SILENCE_S
    until(lambda: drives.states() == {"one": "condemned"})
    time.sleep(0.3)
    assert drives.status().grant_count == 1, "its write to the last drive may still land"
    writing.set()
    until(lambda: drives.states() == {})
    assert drives.status().grant_count == 0
    assert drives.kernel.reachable() == set()


def test_a_drive_that_is_away_is_not_exported_and_is_again_when_it_is_back(drives: DrivesRig) -> None:
    first = drives.attach("one")
    drives.pool.close()
    away = drives.path / "data.1"
    away.rename(drives.path / "elsewhere")
    drives.open()
    assert first.export is not None
    attachment = drives.attach("two")
    assert [namespace.nsid for namespace in attachment.namespaces] == [1, 3]
    assert drives.exported(attachment).keys() == {1, 3}
    until(lambda: drives.exported(first).keys() == {1, 3})
    drives.pool.close()
    (drives.path / "elsewhere").rename(away)
    drives.open()
    attachment = drives.attach("three")
    assert drives.exported(attachment) == drives.devices


def test_a_pool_that_was_exported_gets_another_drive(drives: DrivesRig) -> None:
    drives.attach("one")
    drives.pool.close()
    add_drive(drives.path, size_bytes=SIZE_BYTES)
    device = str((drives.path / "data.3").resolve())
    drives.kernel.devices.add(device)
    drives.open()
    assert drives.exported(drives.attach("two")) == {**drives.devices, 4: device}
