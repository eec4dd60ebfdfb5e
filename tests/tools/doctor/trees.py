"""Files below a root, as a kernel shows a machine: a host, a DPU and a server of drives, well or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RELEASE = "6.14.0-35-generic"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\nGCC"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC"


@dataclass(frozen=True)
class Tree:
    root: Path

    def write(self, path: str, text: str | int) -> Tree:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return self

    def link(self, path: str, to: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(self.root / to)

    def pci(
        self, address: str, *, vendor: str, kind: str, way: str, node: int = 0, width: int = 16, most: int = 16,
        iommu: str | None = None,
    ) -> str:  # fmt: skip
        """``way``: the bridges above it. Returns its folder."""
        folder = f"sys/devices/{way}/{address}"
        attributes: dict[str, str | int] = {
            "vendor": vendor, "class": kind, "numa_node": node, "current_link_width": width, "max_link_width": most,
            "current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe",
        }  # fmt: skip
        for name, value in attributes.items():
            self.write(f"{folder}/{name}", value)
        if iommu is not None:
            self.write(f"{folder}/iommu_group/type", iommu)
        self.link(f"sys/bus/pci/devices/{address}", folder)
        return folder

    def gpu(self, address: str, way: str, *, node: int = 0) -> None:
        self.pci(address, vendor="0x10de", kind="0x030200", way=way, node=node)

    def nvme(self, name: str, address: str, way: str, *, node: int = 0, width: int = 4) -> None:
        folder = self.pci(address, vendor="0x144d", kind="0x010802", way=way, node=node, width=width, most=4)
        self.link(f"sys/class/nvme/{name}/device", folder)
        self.write(f"sys/class/nvme/{name}/model", "SAMSUNG MZWLO3T8HCLS").write(
            f"sys/class/nvme/{name}/firmware_rev", "OPPA4B5Q"
        ).write(f"sys/class/nvme/{name}/transport", "pcie")

    def rdma(
        self, device: str, interface: str, address: str, way: str, *, node: int = 0, state: str = "4: ACTIVE",
        physical: str = "5: LinkUp", mtu: int = 9000, layer: str = "Ethernet", gid: str | None = "RoCE v2",
        lost: int = 0, iommu: str | None = "identity", width: int = 16,
    ) -> None:  # fmt: skip
        folder = self.pci(address, vendor="0x15b3", kind="0x020000", way=way, node=node, iommu=iommu, width=width)
        self.link(f"sys/class/infiniband/{device}/device", folder)
        self.write(f"sys/class/infiniband/{device}/fw_ver", "28.43.1014")
        port = f"sys/class/infiniband/{device}/ports/1"
        self.write(f"{port}/state", state).write(f"{port}/phys_state", physical)
        self.write(f"{port}/rate", "400 Gb/sec (4X NDR)").write(f"{port}/link_layer", layer)
        self.write(f"{port}/hw_counters/out_of_sequence", lost).write(f"{port}/hw_counters/packet_seq_err", 0)
        if gid is not None:
            self.write(f"{port}/gid_attrs/types/0", "IB/RoCE v1").write(f"{port}/gid_attrs/types/1", gid)
        self.write(f"{folder}/net/{interface}/mtu", mtu).write(f"{folder}/net/{interface}/dev_port", 0)

    def modules(self, loaded: str, loadable: str = "", built_in: str = "") -> None:
        """Names with spaces in between; as the kernel and depmod write them."""
        self.write("proc/modules", "\n".join(f"{name} 40960 0 - Live 0x0" for name in loaded.split()))
        folder = f"lib/modules/{RELEASE}"
        paths = [f"kernel/drivers/{name.replace('_', '-')}.ko" for name in loadable.split()]
        self.write(f"{folder}/modules.dep", "\n".join(f"{path}.zst: kernel/other.ko.zst" for path in paths))
        self.write(f"{folder}/modules.builtin", "\n".join(f"kernel/{name}.ko" for name in built_in.split()))

    def hugepages(self, count: int) -> None:
        self.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", count)
        self.write("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", 0)

    def limits(self, locked: str) -> None:
        self.write(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max locked memory         {locked:<20} {locked:<20} bytes     ",
        )

    def listening(self, *, tcp: int | None = None, socket: str | None = None) -> None:
        head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid"
        rows = ["   0: 0100007F:1F90 0100007F:E1C2 01 00000000:00000000 00:00000000 00000000     0"]  # ESTABLISHED
        if tcp is not None:
            rows.append(f"   1: 00000000:{tcp:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0")
        self.write("proc/net/tcp", "\n".join([head, *rows])).write("proc/net/tcp6", head)
        lines = ["Num       RefCount Protocol Flags    Type St Inode Path"]
        lines += [f"0000000000000000: 00000002 00000000 00010000 0001 01 1 {socket}"] if socket else []
        self.write("proc/net/unix", "\n".join(lines))


def bare(root: Path, release: str = RELEASE) -> Tree:
    """Of every machine."""
    tree = Tree(root)
    tree.write("proc/sys/kernel/osrelease", release).write("sys/class/net/lo/mtu", 65536)
    tree.write("sys/devices/system/node/node0/cpulist", "0-31")
    tree.modules("", "ib_uverbs rdma_ucm nvme_rdma nvme_tcp nvmet nvmet_rdma nvmet_tcp dm_crypt vfio_pci", "nvme")
    tree.hugepages(0)
    tree.limits("unlimited")
    tree.listening()
    return tree


SWITCH = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
OTHER_SOCKET = "pci0000:ba/0000:ba:00.0"


def good_host(root: Path) -> Tree:
    """A GPU and a card below one switch, NVIDIA's open driver, all modules."""
    tree = bare(root)
    tree.modules("ib_uverbs rdma_ucm nvme_rdma nvme_tcp nvidia mlx5_core", "", "nvme")
    tree.gpu("0000:3c:00.0", f"{SWITCH}/0000:3b:01.0")
    tree.rdma("mlx5_0", "ens1f0np0", "0000:3d:00.0", f"{SWITCH}/0000:3b:02.0")
    tree.write("proc/driver/nvidia/version", OPEN_DRIVER).write("sys/module/nvidia/version", "580.95.05")
    tree.write("sys/module/mlx5_core/version", "25.07-0.9.7")
    tree.write("usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0", "")
    return tree


def bad_host(root: Path) -> Tree:
    """Nothing fits: an old kernel, a card of another socket that is down, a small MTU, a closed driver, the IOMMU."""
    tree = bare(root, "5.4.0-150-generic")
    tree.write("sys/devices/system/node/node1/cpulist", "32-63")
    tree.limits("8388608")
    tree.gpu("0000:3c:00.0", f"{SWITCH}/0000:3b:01.0")
    tree.rdma(
        "mlx5_0", "ens1f0np0", "0000:bb:00.0", OTHER_SOCKET, node=1, state="1: DOWN", physical="3: Disabled",
        mtu=1500, gid="IB/RoCE v1", lost=17, iommu="DMA-FQ", width=8,
    )  # fmt: skip
    tree.write("proc/driver/nvidia/version", CLOSED_DRIVER)
    return tree


def good_dpu(root: Path) -> Tree:
    tree = bare(root)
    tree.write("sys/class/dmi/id/product_name", "BlueField-3 SmartNIC Main Card")
    tree.write("etc/mlnx-release", "bf-bundle-3.2.1-34_25.11_ubuntu-24.04_prod")
    tree.modules("ib_uverbs rdma_ucm nvmet nvmet_rdma nvmet_tcp dm_crypt vfio_pci", "", "nvme")
    tree.hugepages(4096)
    tree.rdma("mlx5_0", "p0", "0000:03:00.0", "pci0000:00/0000:00:00.0")
    tree.nvme("nvme0", "0000:06:00.0", "pci0000:00/0000:00:02.0")
    return tree


def good_jbof(root: Path) -> Tree:
    """A server with two sockets, a card and a drive at each."""
    tree = bare(root)
    tree.write("sys/devices/system/node/node1/cpulist", "32-63")
    tree.modules("ib_uverbs rdma_ucm nvmet nvmet_rdma", "nvmet_tcp dm_crypt vfio_pci", "nvme")
    tree.rdma("mlx5_0", "ens1np0", "0000:03:00.0", "pci0000:00/0000:00:01.0", node=0)
    tree.rdma("mlx5_1", "ens2np0", "0000:83:00.0", "pci0000:80/0000:80:01.0", node=1)
    tree.nvme("nvme0", "0000:06:00.0", "pci0000:00/0000:00:02.0", node=0)
    tree.nvme("nvme1", "0000:86:00.0", "pci0000:80/0000:80:02.0", node=1)
    return tree


def bad_jbof(root: Path) -> Tree:
    """Its card is at one socket, its drives at the other, one of them with half its lanes."""
    tree = bare(root)
    tree.write("sys/devices/system/node/node1/cpulist", "32-63")
    tree.rdma("mlx5_0", "ens1np0", "0000:03:00.0", "pci0000:00/0000:00:01.0", node=0)
    tree.nvme("nvme0", "0000:86:00.0", "pci0000:80/0000:80:01.0", node=1)
    tree.nvme("nvme1", "0000:87:00.0", "pci0000:80/0000:80:02.0", node=1, width=2)
    return tree
