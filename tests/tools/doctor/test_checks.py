"""Single checks of the doctor: MTUs, modules, huge pages, ports, certificates, GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from meshfusion.dpu.config import ServiceConfig
from meshfusion.tools.doctor.certificates import check_context_files, check_service_files
from meshfusion.tools.doctor.clock import read_clock
from meshfusion.tools.doctor.kernel import check_hugepages, check_modules, kernel_version
from meshfusion.tools.doctor.listening import check_doors, doors_of
from meshfusion.tools.doctor.machine import Machine, UnseenError
from meshfusion.tools.doctor.needs import Needs, needs_of
from meshfusion.tools.doctor.pci import check_locality, gpus
from meshfusion.tools.doctor.rdma import check_gpu_direct, rdma_mtu
from meshfusion.tools.doctor.role import Role
from meshfusion.tools.mfctl.context_types import Access, Member, ServiceContext
from meshfusion.tools.mfctl.findings import Finding, State
from tests.dpu.security.authority import Authority
from tests.tools.doctor.trees import CLOSED_DRIVER, SWITCH, Tree, bare, good_host


def config_of(text: str) -> ServiceConfig:
    return ServiceConfig.model_validate(yaml.safe_load(text))


POOL = "pool: {path: /pool, size: 1GiB}\n"


def states(findings: Iterator[Finding]) -> dict[str, State]:
    return {finding.check: finding.state for finding in findings}


@pytest.mark.parametrize(
    ("interface", "of_rdma"), [(9000, 4096), (4200, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (256, 0)]
)
def test_the_mtu_of_rdma(interface: int, of_rdma: int) -> None:
    """As soft-RoCE has it on Linux: 9000 gives 4096, 1500 gives 1024. 96 bytes are for headers."""
    assert rdma_mtu(interface) == of_rdma


@pytest.mark.parametrize(
    ("release", "version"), [("6.1.0-18-amd64", (6, 1)), ("5.15.0-1049-bluefield", (5, 15)), ("next", None)]
)
def test_the_version_of_a_kernel(release: str, version: tuple[int, int] | None) -> None:
    assert kernel_version(release) == version


def test_what_a_configuration_needs_is_a_warning_where_it_cannot_be_had(tmp_path: Path) -> None:
    tree = bare(tmp_path)
    tree.modules("nvmet", "nvmet_rdma", "")
    exported = config_of(POOL + "listen: unix:///s\nexports: {target: nvmet, portals: ['rdma://10.0.0.1']}\n")
    needs = needs_of(exported)
    assert needs.modules == {"nvmet", "nvmet_rdma", "ib_uverbs", "rdma_ucm"}
    found = states(check_modules(Machine(tmp_path), Role.JBOF, needs))
    assert found["module nvmet"] is State.OK
    assert found["module nvmet_rdma"] is State.WARN, "it can be loaded, and is not"
    assert found["module ib_uverbs"] is State.WARN, "this kernel has none"
    assert found["module nvmet_tcp"] is State.INFO
    assert needs_of(None) == Needs()


def test_built_in_modules_are_there(tmp_path: Path) -> None:
    tree = bare(tmp_path)
    tree.modules("", "", "nvmet dm-crypt")
    found = states(check_modules(Machine(tmp_path), Role.DPU, Needs()))
    assert (found["module nvmet"], found["module dm_crypt"]) == (State.OK, State.OK)


def test_without_the_list_of_modules_what_is_not_loaded_is_unseen(tmp_path: Path) -> None:
    Tree(tmp_path).write("proc/modules", "nvmet 1 0 - Live 0x0").write("proc/sys/kernel/osrelease", "6.1.0")
    found = states(check_modules(Machine(tmp_path), Role.DPU, Needs()))
    assert found.pop("module nvmet") is State.OK
    assert set(found.values()) == {State.UNSEEN}


@pytest.mark.parametrize(("count", "state"), [(4096, State.OK), (4095, State.WARN), (0, State.WARN)])
def test_huge_pages_for_spdk(tmp_path: Path, count: int, state: State) -> None:
    spdk = "exports: {target: spdk, portals: ['rdma://10.0.0.1'], spdk: {socket: /spdk.sock, memory: 8GiB}}\n"
    needs = needs_of(config_of(POOL + "listen: unix:///s\n" + spdk))
    bare(tmp_path).hugepages(count)
    (finding,) = check_hugepages(Machine(tmp_path), Role.JBOF, needs)
    assert finding.state is state
    if state is State.WARN:
        assert finding.remedy == "sysctl vm.nr_hugepages=4096"


def test_huge_pages_matter_to_nobody_on_a_host(tmp_path: Path) -> None:
    bare(tmp_path)
    assert list(check_hugepages(Machine(tmp_path), Role.HOST, Needs())) == []
    (finding,) = check_hugepages(Machine(tmp_path), Role.DPU, Needs())
    assert finding.state is State.INFO


@pytest.mark.parametrize(
    ("is_open", "is_served", "state"),
    [
        (False, False, State.OK),
        (True, True, State.OK),
        (True, False, State.FAIL),
        (False, True, State.WARN),
    ],
)
def test_a_port_is_free_or_ours(tmp_path: Path, is_open: bool, is_served: bool, state: State) -> None:
    tree = bare(tmp_path)
    tree.listening(tcp=7000 if is_open else 7001)
    doors = doors_of(config_of(POOL + "listen: 127.0.0.1:7000\n"))
    (finding,) = check_doors(Machine(tmp_path), doors, is_served=is_served)
    assert (finding.check, finding.state) == ("port 127.0.0.1:7000", state)
    assert bool(finding.remedy) is (state is not State.OK)


def test_sockets_monitors_and_the_target_have_doors_too(tmp_path: Path) -> None:
    tree = bare(tmp_path)
    tree.listening(tcp=4420, socket="/run/s")
    config = config_of(
        POOL + "listen: unix:///run/s\ntelemetry: {listen: '127.0.0.1:9477'}\n"
        "exports: {target: nvmet, portals: ['tcp://10.0.0.1', 'tcp://[fd00::1]:4421']}\n"
    )
    found = {f.check: f for f in check_doors(Machine(tmp_path), doors_of(config), is_served=True)}
    assert found["socket /run/s"].state is State.OK
    assert found["port 127.0.0.1:9477"].state is State.WARN
    assert found["port 10.0.0.1:4420"].cause.startswith("somebody listens")
    assert found["port [fd00::1]:4421"].cause.startswith("nobody listens")
    of_rdma = config_of(POOL + "listen: unix:///s\nexports: {target: nvmet, portals: ['rdma://10.0.0.2']}\n")
    assert [door.key for door in doors_of(of_rdma)] == ["listen"], "of RDMA's ports no file tells"


def test_who_listens_is_unseen_without_the_kernels_list(tmp_path: Path) -> None:
    doors = doors_of(config_of(POOL + "listen: 127.0.0.1:7000\n"))
    with pytest.raises(UnseenError, match="proc/net"):
        list(check_doors(Machine(tmp_path), doors, is_served=False))


def test_certificates_of_the_service(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    text = f"{POOL}listen: 127.0.0.1:7000\ntls: {{certificate: {pair.certificate}, key: {pair.key}}}\n"
    config = config_of(text + f"tokens_file: {tmp_path}/tokens\n")
    now = datetime.now(UTC)
    found = {finding.check: finding for finding in check_service_files(config, now)}
    assert found["tls"].state is State.OK
    assert found["tokens_file"].state is State.FAIL, "it is not there"
    assert found["tokens_file"].remedy
    late = next(check_service_files(config, now + timedelta(days=36500)))
    assert (late.check, late.state) == ("tls", State.FAIL)
    pair.key.chmod(0o644)
    read_by_all = next(check_service_files(config, now))
    assert read_by_all.state is State.FAIL
    assert f"tls.key = {pair.key}" in read_by_all.cause


def test_certificates_of_a_context(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("operator")
    token = tmp_path / "token"
    good = Access(ca=authority.path, certificate=pair.certificate, key=pair.key)
    members = (
        Member("a", "a:1", good),
        Member("b", "b:1", Access(ca=authority.path, token_file=token)),
        Member("plain", "unix:///s"),
    )
    found = states(check_context_files(ServiceContext("fleet", members, is_cluster=True), datetime.now(UTC)))
    assert found == {"context fleet a": State.OK, "context fleet b": State.FAIL}


def test_gpus_are_told_from_the_graphics_of_a_console(tmp_path: Path) -> None:
    tree = good_host(tmp_path)
    tree.pci("0000:00:02.0", vendor="0x8086", kind="0x030000", way="pci0000:00")
    tree.pci("0000:04:00.0", vendor="0x1a03", kind="0x030000", way="pci0000:00")
    tree.pci("0000:05:00.0", vendor="0x1002", kind="0x120000", way="pci0000:00")
    assert [gpu.address for gpu in gpus(Machine(tmp_path))] == ["0000:05:00.0", "0000:3c:00.0"]


def test_ways_to_a_gpus_memory(tmp_path: Path) -> None:
    tree = good_host(tmp_path)
    tree.write("proc/driver/nvidia/version", CLOSED_DRIVER)
    assert states(check_gpu_direct(Machine(tmp_path))) == {"gpudirect": State.WARN}
    tree.write("sys/module/nvidia_peermem/version", "535")
    (finding,) = check_gpu_direct(Machine(tmp_path))
    assert finding.cause == "nvidia-peermem; NVIDIA UNIX x86_64 Kernel Module 535.183.01 Sun May 12 19:39:15 UTC 2024"
    (tmp_path / "proc/driver/nvidia/version").unlink()
    (finding,) = check_gpu_direct(Machine(tmp_path))
    assert (finding.state, "driver is not loaded" in finding.cause) == (State.WARN, True)


def test_how_near_a_gpu_is_without_numa_nodes_is_unseen(tmp_path: Path) -> None:
    tree = bare(tmp_path)
    tree.gpu("0000:3c:00.0", f"{SWITCH}/0000:3b:01.0", node=-1)
    tree.rdma("mlx5_0", "p0", "0000:bb:00.0", "pci0000:ba/0000:ba:00.0", node=-1)
    assert states(check_locality(Machine(tmp_path))) == {"pcie 0000:3c:00.0": State.UNSEEN}


def test_the_clock_of_this_machine_is_read() -> None:
    """And not set: what the kernel tells is the same a moment later, but for its growing error."""
    before = read_clock()
    time.sleep(0.01)
    after = read_clock()
    if before is None:
        return  # a sandbox may refuse the call: then nothing is told
    assert after is not None
    assert before.status == after.status
    assert 0 <= before.max_error_us <= 16_000_000, "adjtimex(2): it stops at 16 s"
