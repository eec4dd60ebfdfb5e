"""What a test of the virtual DPU works with: bundles, keys and certificates, the card itself, and who uses it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from meshfusion.tools.lab.commands import OutputTail
from meshfusion.tools.lab.guest import GuestRun, run_guest
from meshfusion.tools.lab.machine import OUT
from meshfusion.tools.lab.qemu import TcgMachine
from meshfusion.tools.vdpu.hardware import BOOT_SERIAL, drive_id, jbof_serial

ROOT: Final = Path(__file__).resolve().parents[2]
ADDRESS: Final = "192.168.100.2"
LOGIN: Final = f"root@{ADDRESS}"
PATIENCE: Final = ("copying=3600", "unpacking=3600", "switching=1800", "probing=1800", "rolling-back=1800")
"""An emulated card on a busy machine takes many times what a real one does."""
_CLIENT: Final = Path(__file__).parent / "guest_dpu_client.py"
_CLIENT_S: Final = 1800.0
_SERVED_S: Final = 120.0
_STEP_S: Final = 3600.0

SERVICE: Final = f"""\
listen: [unix:///run/meshfusion/meshfusion.sock, 0.0.0.0:7000]
tls:
  certificate: /etc/meshfusion/tls/service.pem
  key: /etc/meshfusion/tls/service.key
  client_ca: /etc/meshfusion/tls/ca.pem
access: [{{subject: engine-1, role: engine, tenant: default}}]
pool:
  path: /var/lib/meshfusion/pool
  create: true
  size: 256MiB
  segment_size: 2MiB
  data_path: [{drive_id(jbof_serial(0))}, {drive_id(jbof_serial(1))}]
exports: {{target: nvmet, portals: ["rdma://10.77.0.1:4420"], authenticate: false}}
leases: {{heartbeat_s: 5, holder_silence_s: 60, lease_ttl_s: 120, grant_ttl_s: 120}}
telemetry: {{listen: "127.0.0.1:9477"}}
"""
"""The kernel of Debian 12 has no DH-HMAC-CHAP in its target (CONFIG_NVME_TARGET_AUTH)."""


def run(*argv: str | Path, cwd: Path = ROOT, environment: dict[str, str] | None = None, data: bytes = b"") -> str:
    """What it printed; fails with all that it said."""
    words = [str(word) for word in argv]
    done = subprocess.run(
        words, cwd=cwd, env=environment, input=data, capture_output=True, timeout=_STEP_S, check=False
    )
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{' '.join(words)}\n{said}{done.stderr.decode(errors='replace')}"
    return said


@dataclass(frozen=True)
class Bench:
    """``folder``: for all that is made. Its ssh is OpenSSH's, with a key and known hosts of its own."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    @property
    def tls(self) -> Path:
        return self.folder / "tls"

    @property
    def key(self) -> Path:
        return self.folder / "bundle.pem"

    @property
    def public_key(self) -> Path:
        return self.folder / "bundle.pem.pub"

    @property
    def rshim(self) -> Path:
        return self.folder / "card" / "rshim0"

    def prepare(self) -> None:
        (self.folder / "bin").mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "id")
        (self.folder / "ssh_config").write_text(
            f"Host *\n  IdentityFile {self.folder}/id\n  UserKnownHostsFile {self.folder}/known_hosts\n"
            "  StrictHostKeyChecking accept-new\n"
        )
        ssh = self.folder / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        (self.folder / "service.yaml").write_text(SERVICE)
        make_certificates(self.tls)

    def mfctl(self, *arguments: str | Path) -> str:
        return run(sys.executable, "-m", "meshfusion.tools.mfctl.main", *arguments, environment=self.environment)

    def mfctl_fails(self, *arguments: str | Path) -> tuple[int, str]:
        """Exit status and what it said."""
        words = [sys.executable, "-m", "meshfusion.tools.mfctl.main", *map(str, arguments)]
        done = subprocess.run(
            words, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=_STEP_S, check=False
        )
        assert done.returncode != 0, done.stdout
        return done.returncode, done.stdout + done.stderr

    def ssh(self, script: str, data: bytes = b"") -> str:
        return run("ssh", LOGIN, script, environment=self.environment, data=data)

    def bundle(self, version: str, source: Path = ROOT) -> Path:
        folder = self.folder / f"bundle-{version}"
        self.mfctl(
            "image", "build", folder, "--config", self.folder / "service.yaml", "--version", version,
            "--device", drive_id(BOOT_SERIAL), "--ssh-key", self.folder / "id.pub", "--source", source,
        )  # fmt: skip
        self.mfctl("image", "sign", folder, "--key", self.key, *(() if self.key.exists() else ("--new-key",)))
        return folder

    def flash(self, bundle: Path, bfb: Path) -> str:
        return self.mfctl(
            "dpu", "flash", self.rshim, "--bundle", bundle, "--bfb", bfb, "--key", self.public_key, "--no-drain",
            "--yes", "--host-network-elsewhere", "--journal", self.folder / "journal",
        )  # fmt: skip

    def upgrade_arguments(self, bundle: Path) -> tuple[str | Path, ...]:
        deadlines = [word for deadline in PATIENCE for word in ("--deadline", deadline)]
        return ("dpu", "upgrade", LOGIN, "--bundle", bundle, "--key", self.public_key, "--yes", *deadlines)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.mfctl("dpu", "status", LOGIN, "--format", "json"))
        return status

    def client(self, machine: TcgMachine, case: str) -> dict[str, Any]:
        """What an engine on another machine saw, at the other end of the card's port."""
        tail = OutputTail(1 << 20)
        out = self.folder / "client"
        command = (sys.executable, str(_CLIENT), case, str(self.tls))
        guest = GuestRun(
            command, kind="tcg", directory=ROOT, output_directory=out, deadline_s=_CLIENT_S,
            environment={"NUMBA_CACHE_DIR": f"{OUT}/numba"},  # compiling there takes minutes: once
        )  # fmt: skip
        result = run_guest(guest, machine=replace(machine, wire=self.folder / "card" / "p0.sock"), sink=tail)
        assert result.exit_code == 0, tail.stdout + tail.stderr
        report: dict[str, Any] = json.loads(tail.stdout.splitlines()[-1])
        return report


@contextlib.contextmanager
def served(bench: Bench) -> Iterator[None]:
    """The card, with nothing on its drives, as ``mfctl lab dpu serve`` keeps it."""
    log = bench.folder / "serve.log"
    command = (sys.executable, "-m", "meshfusion.tools.mfctl.main", "lab", "dpu", "serve", str(bench.folder / "card"))
    with log.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as process:
        try:
            end_s = time.monotonic() + _SERVED_S
            while not (bench.rshim / "misc").exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end_s, log.read_text()
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(60)


def make_certificates(folder: Path) -> None:
    """A CA, the service's certificate and an engine's, by OpenSSL."""
    folder.mkdir()
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    ca = ("-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    run("openssl", "req", "-x509", *curve, *ca, cwd=folder)
    for name, names in (("service", f"IP:{ADDRESS},IP:10.77.0.1"), ("engine-1", "DNS:engine-1")):
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        run("openssl", "req", *curve, *request, cwd=folder)
        (folder / f"{name}.ext").write_text(f"subjectAltName={names}\n")
        run(
            "openssl", "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem", cwd=folder,
        )  # fmt: skip


def broken_source(folder: Path) -> Path:
    """A checkout whose last commit has a service that cannot start."""
    run("git", "clone", "--quiet", "--shared", ROOT, folder)
    with (folder / "tools" / "mfctl" / "service_life.py").open("a") as file:
        file.write('\nraise RuntimeError("broken on purpose")\n')
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    run("git", *identity, "commit", "--quiet", "--all", "--message", "Break it", cwd=folder)
    return folder
