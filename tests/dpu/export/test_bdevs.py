"""The aio bdevs of drives that come, go, and come back as something else; by a fake and by a real nvmf_tgt alike."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.export.desired import Export, Host, Namespace
from meshfusion.dpu.export.errors import ExportError, StepRefusedError
from meshfusion.dpu.export.fence import Confirmed, NotYet
from meshfusion.dpu.export.layout import Tenant
from meshfusion.dpu.export.spdk.bdevs import drop_bdev, keep_bdev, make_bdev
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.dpu.export.spdk.sizing import MIB, Machine, size
from meshfusion.dpu.export.spdk.start import Timeouts
from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget
from tests.dpu.export.cases import PREFIX, export, host_nqn, nqn_of
from tests.dpu.export.conftest import Spdk
from tests.dpu.export.fake_rpc import FakeRpc

SIZE_BYTES = 8 << 20
TIMEOUTS = Timeouts(read_s=60.0, change_s=60.0, start_s=60.0)  # a busy machine is no failure
SETTINGS = SpdkSettings(
    size(Machine(memory_bytes=400 * MIB, cores=1, connections=4)),
    frozenset({"tcp"}),
    timeouts=TIMEOUTS,
    make=partial(make_bdev, None),
    drop=drop_bdev,
)


def drive(file: Path) -> Path:
    with file.open("xb") as opened:
        os.truncate(opened.fileno(), SIZE_BYTES)
    return file


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return drive(tmp_path / "zero"), drive(tmp_path / "one")


def namespace(number: int, file: Path) -> Namespace:
    identity = uuid.uuid5(uuid.NAMESPACE_URL, str(number))
    return Namespace(number + 1, identity, identity.hex, f"mf-{number}", str(file))


def shown(*namespaces: Namespace, hosts: str = "a-1") -> Export:
    return export(Tenant("a", frozenset(namespaces), frozenset(Host(host_nqn(host)) for host in hosts.split())))


def target_of(spdk: Spdk) -> SpdkTarget:
    """As a service has it that has just started."""
    return SpdkTarget(spdk.rpc, SETTINGS, Export(PREFIX))


def bdevs(rpc: SpdkRpc) -> dict[str, dict[str, Any]]:
    return {bdev["name"]: bdev for bdev in rpc.call("bdev_get_bdevs", 60.0)}


def file_of(spdk: Spdk, name: str) -> str:
    return str(bdevs(spdk.rpc)[name]["driver_specific"]["aio"]["filename"])


def namespaces(spdk: Spdk) -> dict[int, str]:
    (report,) = [one for one in spdk.rpc.call("nvmf_get_subsystems", 60.0) if one["nqn"] == nqn_of("a")]
    return {one["nsid"]: one["bdev_name"] for one in report["namespaces"]}


def test_each_drive_has_a_bdev_of_its_file_and_keeps_it(spdk: Spdk, files: tuple[Path, Path]) -> None:
    wanted = shown(namespace(0, files[0]), namespace(1, files[1]))
    assert target_of(spdk).desire(wanted).converged
    before = bdevs(spdk.rpc)
    assert [file_of(spdk, f"mf-{number}") for number in (0, 1)] == list(map(str, files))
    spdk.rpc.close()
    again = target_of(spdk).desire(wanted)
    assert (again.converged, again.applied) == (True, 0)
    assert {name: bdev["uuid"] for name, bdev in bdevs(spdk.rpc).items()} == {n: b["uuid"] for n, b in before.items()}


@pytest.mark.parametrize("how", ["another file in its place", "another place", "made by an earlier version"])
def test_a_bdev_that_has_something_else_open_is_made_anew(spdk: Spdk, files: tuple[Path, Path], how: str) -> None:
    """While the service was down, and hosts were connected: they see the namespace go and come."""
    target = target_of(spdk)
    wanted = shown(namespace(0, files[0]), namespace(1, files[1]))
    assert target.desire(wanted).converged
    spdk.connect_host(nqn_of("a"), host_nqn("a-1"))
    stale = bdevs(spdk.rpc)["mf-1"]["uuid"]
    match how:
        case "another file in its place":
            files[1].rename(files[1].with_name("elsewhere"))
            drive(files[1])
        case "another place":
            moved = drive(files[1].with_name("elsewhere"))  # a copy; the former one may be another pool's by now
            wanted = shown(namespace(0, files[0]), namespace(1, moved))
        case _:
            drop_bdev(spdk.rpc, "mf-1")
            other = str(uuid.uuid4())
            options = {"filename": str(files[1]), "block_size": 4096, "fallocate": True, "uuid": other}
            spdk.rpc.call("bdev_aio_create", 60.0, name="mf-1", **options)
            stale = other
    kept = bdevs(spdk.rpc)["mf-0"]["uuid"]
    spdk.rpc.close()
    report = target_of(spdk).desire(wanted)
    assert report.converged, report.reasons
    assert namespaces(spdk) == {1: "mf-0", 2: "mf-1"}
    there = bdevs(spdk.rpc)
    assert there["mf-1"]["uuid"] != stale
    assert there["mf-0"]["uuid"] == kept, "nothing is wrong with it"
    by_nsid = {one.nsid: one.file for subsystem in wanted.subsystems for one in subsystem.namespaces}
    assert file_of(spdk, "mf-1") == by_nsid[2]


def test_a_drive_is_confirmed_to_be_out_only_when_nobody_is_shown_it(spdk: Spdk, files: tuple[Path, Path]) -> None:
    """A host writes to it, and to the other."""
    target = target_of(spdk)
    zero, one = namespace(0, files[0]), namespace(1, files[1])
    assert target.desire(shown(zero, one)).converged
    spdk.connect_host(nqn_of("a"), host_nqn("a-1"))
    refused = target.withdraw(2, "mf-1")
    assert isinstance(refused, NotYet)
    assert "still shows it as namespace 2" in refused.reason
    assert "mf-1" in bdevs(spdk.rpc)
    assert target.desire(shown(zero)).converged
    assert target.withdraw(2, "mf-1") == Confirmed()
    assert (namespaces(spdk), list(bdevs(spdk.rpc))) == ({1: "mf-0"}, ["mf-0"])
    assert target.withdraw(2, "mf-1") == Confirmed(), "asked again"


@pytest.mark.parametrize("ana_group", [1, 7])
def test_a_drive_that_somebody_else_shows_is_not_out(spdk: Spdk, files: tuple[Path, Path], ana_group: int) -> None:
    """Though it is in no form that this service knows."""
    target = target_of(spdk)
    zero, one = namespace(0, files[0]), namespace(1, files[1])
    assert target.desire(shown(zero, one)).converged
    stranger = "nqn.2026-11.x:by-hand"
    options = {
        "serial_number": "X",
        "model_number": "Y",
        "allow_any_host": False,
        "ana_reporting": True,
        "max_namespaces": 8,
    }
    spdk.rpc.call("nvmf_create_subsystem", 60.0, nqn=stranger, **options)
    theirs = {"nsid": 7, "bdev_name": "mf-1", "uuid": str(one.uuid), "nguid": one.nguid, "anagrpid": ana_group}
    assert target.desire(shown(zero)).converged
    spdk.rpc.call("nvmf_subsystem_add_ns", 60.0, nqn=stranger, namespace=theirs)
    refused = target.withdraw(2, "mf-1")
    how = "shows it as namespace 7" if ana_group == 1 else "has it behind a namespace"
    assert refused == NotYet(f"{stranger} still {how}")
    assert "mf-1" in bdevs(spdk.rpc)


def test_a_drive_whose_file_is_not_there_is_told(spdk: Spdk, files: tuple[Path, Path]) -> None:
    target = target_of(spdk)
    assert target.desire(shown(namespace(0, files[0]))).converged
    files[1].unlink()
    report = target.desire(shown(namespace(0, files[0]), namespace(1, files[1])))
    assert not report.converged
    (reason,) = report.reasons
    assert f"{files[1]} cannot be shown: No such file or directory" in reason
    assert namespaces(spdk) == {1: "mf-0"}
    with pytest.raises(ExportError) as refused:
        make_bdev(None, spdk.rpc, namespace(1, files[1]))
    assert "mfctl jbof drives" in refused.value.next_step


def test_a_bdev_that_the_configuration_names_is_neither_made_nor_dropped(files: tuple[Path, Path]) -> None:
    rpc = FakeRpc()
    make_bdev(None, rpc, replace(namespace(0, files[0]), file=""))
    keep_bdev(rpc, "mf-0")
    assert rpc.calls == []


@pytest.mark.parametrize("method", ["bdev_aio_create", "bdev_aio_delete"])
def test_what_spdk_refuses_is_told(files: tuple[Path, Path], method: str) -> None:
    """Not taken for one that is there, or for one that has gone."""
    rpc = FakeRpc()
    rpc.connect(1.0)
    rpc.interfere = lambda called: "refuse" if called == method else ""
    call = partial(make_bdev, None, rpc, namespace(0, files[0])) if "create" in method else partial(drop_bdev, rpc, "b")
    with pytest.raises(StepRefusedError):
        call()
