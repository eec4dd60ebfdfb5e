"""How the two kinds of guest are started: their arguments, their boot folders, the initramfs."""

from __future__ import annotations

import lzma
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.tools.lab.errors import LabError
from meshfusion.tools.lab.guest import ready_machine
from meshfusion.tools.lab.machine import Boot, boot_folder, boot_script
from meshfusion.tools.lab.qemu import EmulatedDrive, TcgMachine, drive_arguments
from meshfusion.tools.lab.tcg_image import ArchiveEntry, TcgImage, cpio_archive, read_module, unpacked_kernel
from meshfusion.tools.lab.uml import UmlMachine, memory_directory, one_processor

BOOT = Boot(Path("/boot-folder"), line_fd=7, memory_mib=512, output_directory=Path("/data/out,1"))
IMAGE = TcgImage(Path("/image/vmlinux"), Path("/image/initrd"), Path("/image/modules/6.1"))


def test_uml_arguments() -> None:
    launch = UmlMachine(Path("/cache/linux")).launch(BOOT)
    assert "/cache/linux" in launch.argv[:4]
    assert launch.argv[: launch.argv.index("/cache/linux")] == one_processor()
    assert {"mem=512M", "rootfstype=hostfs", "rootflags=/", "ro", "con1=fd:7", "con0=null,fd:1"} < set(launch.argv)
    assert {"init=/boot-folder/init", "lab=/boot-folder", "uml_dir=/boot-folder/uml/"} < set(launch.argv)
    assert launch.argv.index("con=null") < launch.argv.index("con1=fd:7"), "the last one counts"
    assert set(launch.environment) == {"HOME", "TMPDIR"}


def test_uml_memory_lies_in_shared_memory_only_if_it_fits(tmp_path: Path) -> None:
    about = os.statvfs(tmp_path)
    fits = about.f_bavail * about.f_frsize >> 20
    boot = Boot(Path("/boot-folder"), 7, fits // 2, None)
    assert memory_directory(boot, tmp_path) == tmp_path
    assert memory_directory(Boot(Path("/boot-folder"), 7, fits + 1000, None), tmp_path) == Path("/boot-folder")
    assert memory_directory(boot, tmp_path / "none") == Path("/boot-folder")


def value_of(argv: tuple[str, ...] | list[str], option: str) -> list[str]:
    return [argv[at + 1] for at, word in enumerate(argv) if word == option]


def test_tcg_arguments() -> None:
    argv = TcgMachine(IMAGE, (EmulatedDrive(256),)).launch(BOOT).argv
    assert argv[0].endswith("qemu-system-x86_64")
    assert value_of(argv, "-m") == ["512M"]
    assert value_of(argv, "-kernel") == ["/image/vmlinux"]
    assert value_of(argv, "-append")[0].split()[-1] == "lab=/boot-folder"
    assert value_of(argv, "-chardev") == ["socket,id=line,fd=7"]
    root, out = value_of(argv, "-virtfs")
    assert "path=/,mount_tag=host" in root
    assert "readonly=on" in root
    assert "path=/data/out,,1,mount_tag=out" in out, "a comma is doubled for QEMU"
    assert value_of(argv, "-drive") == ["file=/boot-folder/drive0.img,if=none,id=image0,format=raw,discard=unmap"]


def test_a_zoned_drive() -> None:
    argv = drive_arguments(EmulatedDrive(256, block_bytes=512, zone_mib=16), 2, Path("/image"))
    (namespace,) = [word for word in argv if word.startswith("nvme-ns,")]
    assert "bus=drive2,nsid=1,drive=image2,logical_block_size=512,physical_block_size=512" in namespace
    assert namespace.endswith(",zoned=true,zoned.zone_size=16M,zoned.zone_capacity=16M")


def test_a_wire_is_a_network_interface_whose_driver_is_loaded() -> None:
    machine = TcgMachine(IMAGE, wire=Path("/card/p0,1.sock"))
    argv = machine.launch(BOOT).argv
    assert value_of(argv, "-netdev") == ["stream,id=wire,server=off,addr.type=unix,addr.path=/card/p0,,1.sock"]
    assert "virtio-net-pci,netdev=wire,romfile=" in value_of(argv, "-device")
    assert machine.settings["LAB_DRIVERS"] == "virtio_net"
    both = TcgMachine(IMAGE, (EmulatedDrive(256),), Path("/card/p0.sock"))
    assert both.settings["LAB_DRIVERS"] == "nvme virtio_net"
    assert "LAB_DRIVERS" not in TcgMachine(IMAGE).settings


def test_drives_need_tcg() -> None:
    with pytest.raises(LabError, match="no PCI"):
        ready_machine("uml", (EmulatedDrive(256),))


def test_boot_folder(tmp_path: Path, temporary: Path) -> None:
    out = tmp_path / "with 'odd' name"
    with boot_folder(UmlMachine(Path("/cache/linux")), out) as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        assert os.access(folder / "init", os.X_OK)
        assert len((folder / "seed").read_bytes()) == 64
        script = f'. {folder}/settings; echo "$LAB_HOST_OUT|$LAB_LINE|$LAB_PYTHON"'
        said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
        assert said == f"{out}|/dev/tty1|{sys.executable}\n"
        argv = [sys.executable, "-S", "-s", "-m", "meshfusion.tools.lab.guest_agent", "--help"]
        subprocess.run(argv, env={"PYTHONPATH": f"{folder}/python"}, cwd="/", capture_output=True, check=True)
    assert not folder.exists()


def test_boot_folder_with_a_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / "a blank"
    parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    with pytest.raises(LabError, match="command line"), boot_folder(UmlMachine(Path("/cache/linux")), None):
        pass
    assert not list(parent.iterdir())


def test_tcg_drives_are_sparse_and_named_ones_are_kept(tmp_path: Path, temporary: Path) -> None:
    own = tmp_path / "own.img"
    own.write_bytes(b"kept")
    with boot_folder(TcgMachine(IMAGE, (EmulatedDrive(64), EmulatedDrive(1, image=own))), None) as folder:
        made = (folder / "drive0.img").stat()
        assert (made.st_size, made.st_blocks) == (64 << 20, 0)
    content = own.read_bytes()
    assert (content[:4], len(content)) == (b"kept", 1 << 20)


@pytest.mark.parametrize("name", ["main.sh", "uml_init.sh", "tcg_init.sh"])
def test_boot_scripts_are_shell(name: str) -> None:
    subprocess.run(["sh", "-n"], input=boot_script(name).encode(), check=True)
    assert "\t" not in boot_script(name)
    assert shlex.split(boot_script(name), comments=True)


def test_cpio_by_hand() -> None:
    """The format's fields are 8 hexadecimal digits each; names and contents end on multiples of four."""
    archive = cpio_archive([ArchiveEntry("dev/console", 0o20600, device=(5, 1)), ArchiveEntry("a", 0o100644, b"hello")])
    console = b"07070100000001000021800000000000000000000000010000000000000000"
    console += b"000000000000000000000005000000010000000C00000000dev/console\0"
    assert len(console) % 4 == 2
    assert archive.startswith(console + b"\0\0" + b"07070100000002000081A4")
    assert b"a\0hello\0\0\0" in archive
    assert archive.rstrip(b"\0").endswith(b"TRAILER!!!")


@given(st.lists(st.tuples(st.text("abc/", min_size=1, max_size=9), st.binary(max_size=9)), max_size=5))
def test_cpio_can_be_read(files: list[tuple[str, bytes]]) -> None:
    archive = cpio_archive(ArchiveEntry(name, 0o100644, data) for name, data in files)
    at, found = 0, []
    while True:
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name_start, name_bytes, data_bytes = at + 110, fields[11], fields[6]
        name = archive[name_start : name_start + name_bytes - 1].decode()
        data_start = -(-(name_start + name_bytes) // 4) * 4
        if name == "TRAILER!!!":
            break
        found.append((name, archive[data_start : data_start + data_bytes]))
        at = -(-(data_start + data_bytes) // 4) * 4
    assert found == files


def test_kernel_in_an_image() -> None:
    elf = b"\x7fELF" + bytes(range(256)) * 10
    image = b"boot sector \xfd7zXZ\0 no stream" + lzma.compress(b"other") + b"\1\2" + lzma.compress(elf) + b"tail"
    assert unpacked_kernel(image) == elf
    assert unpacked_kernel(b"no kernel" * 100) is None


def test_modules_are_uncompressed(tmp_path: Path) -> None:
    (tmp_path / "a.ko").write_bytes(b"module")
    (tmp_path / "b.ko.xz").write_bytes(lzma.compress(b"module"))
    assert read_module(tmp_path / "a.ko") == ("a.ko", b"module")
    assert read_module(tmp_path / "b.ko.xz") == ("b.ko", b"module")


def test_a_guest_stays_on_one_processor_that_it_may_use() -> None:
    taskset, option, cpu = one_processor()
    assert (Path(taskset).name, option) == ("taskset", "-c")
    assert int(cpu) in os.sched_getaffinity(0)
