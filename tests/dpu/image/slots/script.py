"""The real ``slotctl`` over a folder, with a stand-in for systemd that only notes what it was asked for."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from meshfusion.dpu.image.slots.card_state import CardState, parse_status

SLOTCTL = Path(str(files("meshfusion.dpu.image.slots").joinpath("data/slotctl")))
RUNNER = """#!/bin/sh
case $1 in state) cat "$NOTES/service" ;; *) echo "$*" >>"$NOTES/asked" ;; esac
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def layer(entries: dict[str, bytes | None]) -> bytes:
    """A gzipped tar; None is a folder."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in entries.items():
            member = tarfile.TarInfo(name)
            member.type, member.mode = (tarfile.DIRTYPE, 0o755) if data is None else (tarfile.REGTYPE, 0o755)
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return gzip.compress(packed.getvalue(), mtime=0)


@dataclass
class Script:
    """In ``folder``, of a machine that was up for ``up_s`` seconds in the boot named ``boot``."""

    folder: Path
    shell: tuple[str, ...] = ("sh",)
    path: str = ""

    def __post_init__(self) -> None:
        (self.folder / "proc/sys/kernel/random").mkdir(parents=True)
        runner = self.folder / "runner"
        runner.write_text(RUNNER)
        runner.chmod(0o755)
        self.at(0.0, "boot-0")
        self.service("stopped")

    def at(self, up_s: float, boot: str) -> None:
        (self.folder / "proc/uptime").write_text(f"{up_s:.2f} {up_s:.2f}\n")
        (self.folder / "proc/sys/kernel/random/boot_id").write_text(f"{boot}\n")

    def service(self, state: str) -> None:
        (self.folder / "service").write_text(f"{state}\n")

    def asked(self) -> list[str]:
        """Of systemd, since last asked here."""
        path = self.folder / "asked"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def run(self, *words: str, data: bytes = b"", check: bool = False) -> subprocess.CompletedProcess[bytes]:
        environment = {
            **os.environ,
            "MESHFUSION_SLOTS": str(self.folder / "slots"),
            "MESHFUSION_SLOT_RUNNER": str(self.folder / "runner"),
            "MESHFUSION_PROC": str(self.folder / "proc"),
            "NOTES": str(self.folder),
            "LC_ALL": "C",
        }
        if self.path:
            environment["PATH"] = f"{self.path}:{environment['PATH']}"
        command = (*self.shell, str(SLOTCTL), *words)
        return subprocess.run(command, input=data, capture_output=True, env=environment, timeout=60, check=check)

    def status(self) -> CardState:
        return parse_status(self.run("status", check=True).stdout.decode())

    def fill(self, slot: str, *layers: bytes, name: str = "one") -> str:
        """Puts and unpacks a tiny bundle; its digest."""
        manifest, config = f"manifest of {name}".encode(), b"{}"
        for blob in (manifest, config, *layers):
            self.run("put", sha256(blob), "0", str(len(blob)), data=blob, check=True)
        digests = [sha256(blob) for blob in (manifest, config, *layers)]
        self.run("unpack", slot, *digests, check=True)
        return digests[0]
