"""Runs in the guest, as ``python guest_encryption.py CASE``: a service whose pool lies on an encrypted slice.

``local``: saves and loads on the machine, is killed and starts again, stops, is refused with what is not its own, is
given another key, and erased. ``exported``: over the kernel's target. Prints what it saw as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.encryption.note import EncryptionNote, KeyPlace, read_note
from meshfusion.dpu.encryption.slices import open_slices
from meshfusion.dpu.export.opening import keeper_of
from meshfusion.dpu.pool import Pool
from meshfusion.dpu.pool_create import create_pool_of_drives
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.jbof.drives.system.luks import CRYPTSETUP
from meshfusion.jbof.format import LBA_BYTES
from meshfusion.jbof.media.buffer import AlignedBuffer
from meshfusion.jbof.media.file import DirectMode, open_data_file
from meshfusion.tools.lab.guest_setup.block import MemoryDevice, make_memory_device, remove_devices
from meshfusion.tools.lab.guest_setup.links import soft_roce_on_dummy
from meshfusion.tools.lab.guest_setup.nvmet import remove_exports
from tests.dpu.pool_cases import DEADLINE_S, Holder, key
from tests.lab.guest_initiator import take_down
from tests.lab.guest_path import memory, wait
from tests.lab.guest_pool_drives import SEGMENT_BYTES, attached, exports, opened, reads, store
from tests.lab.guest_pool_drives import key as exported_key

SIZE_MIB = 24
KNOWN = bytes(range(1, 251)) * 20
"""Written beside a chunk; nothing else has it."""


class Case:
    """A device, and the folder that all else lies in."""

    def __init__(self) -> None:
        os.umask(0o077)
        self.device = make_memory_device(MemoryDevice("mf0", SIZE_MIB))
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "headers").mkdir()
        self.key_file = self.new_key("key")
        self.layout = PoolLayout(self.folder / "pool")
        self.socket = f"unix://{self.folder}/service.sock"

    def new_key(self, name: str) -> Path:
        path = self.folder / name
        path.write_bytes(os.urandom(64))
        return path

    @property
    def place(self) -> KeyPlace:
        return KeyPlace(self.folder / "headers", self.key_file)

    @property
    def note(self) -> EncryptionNote:
        note = read_note(self.layout)
        assert note is not None
        return note

    @property
    def header(self) -> Path:
        return self.note.header(self.note.slices[0])

    @property
    def mapping(self) -> Path:
        return CRYPTSETUP.path_of(self.note.slices[0].name)

    def config(self, **changes: object) -> Path:
        pool = {
            "path": str(self.layout.directory),
            "create": True,
            "size": f"{SIZE_MIB}MiB",
            "segment_size": "2MiB",
            "data_path": str(self.device),
            "encryption": {"header_dir": str(self.place.header_dir), "key_file": str(self.key_file)},
        }
        file = self.folder / "service.yaml"
        file.write_text(yaml.safe_dump({"listen": self.socket, "pool": pool | changes}))
        return file

    def start(self, **changes: object) -> tuple[subprocess.Popen[str], str]:
        """And the line that tells that it is ready, "" where it is not."""
        words = ("service", "run", "--config", str(self.config(**changes)))
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(_mfctl(*words), stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline()

    def refusal(self, **changes: object) -> str:
        """What a service that does not start says."""
        (self.folder / "log").write_text("")
        process, line = self.start(**changes)
        assert not line, "it started"
        process.wait()
        return (self.folder / "log").read_text()

    def raw_has(self, content: bytes) -> bool:
        with self.device.open("rb") as raw:
            os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return content in raw.read()


def _mfctl(*words: str) -> list[str]:
    return [sys.executable, "-m", "meshfusion.tools.mfctl.main", *words]


def mfctl(*words: object) -> str:
    """What it printed. Raises CalledProcessError."""
    done = subprocess.run(_mfctl(*map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def local() -> dict[str, object]:
    case = Case()
    report: dict[str, object] = {}
    process, _ = case.start()
    with contextlib.closing(GrpcChunkService(case.socket)) as service:
        _put(service)
    report["mapping_is_open"] = case.mapping.is_block_device()
    report["known_is_read"] = _on_mapping(case)
    report["raw_is_noise"] = not case.raw_has(KNOWN) and not case.raw_has(case.note.slices[0].uuid.bytes)
    report["raw_in_use"] = _error(lambda: mfctl("pool", "create", case.folder / "q", "--size", "20MiB",
                                                "--segment-size", "1MiB", "--data-path", case.device))  # fmt: skip
    process.send_signal(signal.SIGKILL)
    process.wait()
    report["left_open"] = case.mapping.is_block_device()
    process, line = case.start()
    report["found_after_kill"] = _found(case, line)
    report["rekeyed"] = mfctl("pool", "rekey", case.layout.directory, "--new-key-file", case.new_key("new"))
    report["refused_while_served"] = _error(lambda: mfctl("pool", "erase-key", case.layout.directory, "--yes"))
    process.terminate()
    process.wait()
    report["closed"] = not case.mapping.exists()
    report["old_key"] = case.refusal()
    case.key_file = case.folder / "new"
    report["without"] = case.refusal(encryption=None)
    report["checked"] = mfctl("pool", "check", case.layout.directory)
    report["closed_after_check"] = not case.mapping.exists()
    report["header_of_another"] = _with_header_of_another(case)
    report["other_device"] = _on_another_device(case)
    report["erased"] = mfctl("pool", "erase-key", case.layout.directory, "--yes")
    report["headers_left"] = len(list(case.place.header_dir.iterdir()))
    report["after_erase"] = case.refusal()
    shutil.rmtree(case.layout.directory)
    process, line = case.start()  # the slice is blank: another tenant has it, with another key
    report["slice_again"] = bool(line)
    process.terminate()
    process.wait()
    return report | {"left": remove_devices()}


def _put(service: api.ChunkService) -> None:
    """Chunk 1, with units that hold what is known."""
    holder = Holder(service)
    result = holder.reserve(1)
    (namespace,) = holder.attachment.namespaces
    digests = holder.write(1, result)
    (extent,) = result.extents
    with open_data_file(Path(namespace.path), writable=True, direct=DirectMode.OFF) as data:
        # behind the units that are proven: the rest of the extent's segment is nobody's yet
        with AlignedBuffer(2 * LBA_BYTES) as buffer:
            buffer.view[: len(KNOWN)] = KNOWN
            data.write_from(extent.lba + extent.lba_count, buffer.view)
        data.flush()
    assert holder.commit(result, digests)
    holder.leave()


def _on_mapping(case: Case) -> bool:
    with case.mapping.open("rb") as data:
        return KNOWN in data.read()


def _found(case: Case, line: str) -> bool:
    if not line:
        return False
    with contextlib.closing(GrpcChunkService(case.socket)) as service, Holder(service) as holder:
        return len(holder.match(1).chunks) == 1 and service.get_chunk(key(1), deadline_s=DEADLINE_S) is not None


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except AssertionError as error:
        return str(error)
    return ""


def _with_header_of_another(case: Case) -> str:
    other = make_memory_device(MemoryDevice("mf1", SIZE_MIB))
    create_pool_of_drives(
        case.folder / "other",
        size_bytes=20 << 20,
        segment_bytes=1 << 20,
        data_paths=(other,),
        encryption=case.place,
    )
    note = read_note(PoolLayout(case.folder / "other"))
    assert note is not None
    kept = case.header.read_bytes()
    shutil.copy(note.header(note.slices[0]), case.header)
    try:
        return case.refusal()
    finally:
        case.header.write_bytes(kept)
        note.header(note.slices[0]).unlink()


def _on_another_device(case: Case) -> str:
    """The header is right, and what it decrypts is not what it encrypted."""
    file = case.layout.directory / "encryption"
    kept = file.read_text()
    file.write_text(kept.replace(str(case.device), "/dev/mf1"))
    try:
        return case.refusal()
    finally:
        file.write_text(kept)


def exported() -> dict[str, object]:
    case = Case()
    link = soft_roce_on_dummy()
    create_pool_of_drives(
        case.layout.directory,
        size_bytes=SIZE_MIB << 20,
        segment_bytes=SEGMENT_BYTES,
        data_paths=(case.device,),
        encryption=case.place,
    )
    slices = open_slices(case.layout, CRYPTSETUP, case.place)
    kv = memory()
    kv.fill(5)
    with exports("nvmet", link.address) as config:
        with Pool.open(case.layout.directory, exports=partial(keeper_of, config)) as pool:
            attachment = attached(pool)
            path = opened(kv, attachment)
            expected = [kv.unit(block) for block in range(2)]
            store(pool, attachment, path, kv, 0)
            group = api.GroupKeys(0, (exported_key(0),), (0,))
            found = pool.match(api.MatchRequest("one", "r", 16, (group,)), deadline_s=DEADLINE_S)
            kv.fill(6)
            result = wait(path.load(reads(found), abandon_after_s=20))
            arrived = [kv.unit(12 + i) for i in range(2)]
            path.close()
        slices.close()
        still_open = case.mapping.is_block_device()
        busy = _error(lambda: mfctl("pool", "erase-key", case.layout.directory, "--yes"))
    left = remove_exports()
    erased = mfctl("pool", "erase-key", case.layout.directory, "--yes")
    return {
        "arrived": arrived == expected,
        "failures": len(result.failures),
        "raw_is_noise": not any(case.raw_has(unit[:4096]) for unit in expected),
        "stays_open_while_exported": still_open,
        "erase_while_exported": busy,
        "erased": erased,
        "closed": not case.mapping.exists(),
        "left": [*left, *take_down()],
    }


if __name__ == "__main__":
    print(json.dumps({"local": local, "exported": exported}[sys.argv[1]]()))
