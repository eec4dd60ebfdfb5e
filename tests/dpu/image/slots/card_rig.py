"""Cards as folders: a stand-in for ssh that runs what it is told here, and one for systemd that runs a card's service
and its deadman as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from tests.host.support.waiting import until

SSH = """#!/bin/sh
# The machine is the folder of the host's name beside this.
while [ $# -gt 0 ]; do
    case "$1" in
        -o|-p) shift 2 ;;
        -W) forward=$2; shift 2 ;;
        -O) exit 0 ;;
        *) break ;;
    esac
done
card=$(dirname "$0")/../${1#*@}; shift
card=$(cd "$card" && pwd) || { echo "ssh: Could not resolve hostname" >&2; exit 255; }
[ -e "$card/down" ] && { echo "ssh: connect to host port 22: Connection refused" >&2; exit 255; }
. "$card/environment"
[ -n "$forward" ] && exec PYTHON -S "$card/../bin/relay" "${forward%:*}" "${forward##*:}"
script=$(printf %s "$*" | sed -e "s#/usr/lib/meshfusion#$card&#g" -e "s#/etc/[ms]#$card&#g" -e "s#/var/lib#$card&#g")
exec sh -c "$script"
"""
RELAY = """
import socket, sys, threading
try:
    there = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
except OSError as error:
    sys.exit(f"channel 0: open failed: connect failed: {error}\\nstdio forwarding failed")
there.sendall(sys.stdin.buffer.read1(65536))
while data := there.recv(65536):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
"""
CLIENT = """#!PYTHON -S
# Stands for systemctl and systemd-run: asks the card's init.
import json, os, socket, sys
there = socket.socket(socket.AF_UNIX)
there.connect(os.environ["INIT"])
there.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode() + b"\\n")
code, said = json.loads(there.makefile().read())
sys.stdout.write(said)
sys.exit(code)
"""
RESTART_S, BURST = 0.2, 5


def make_programs(folder: Path) -> Path:
    """Where the stand-ins are, for PATH."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in {"ssh": SSH, "relay": RELAY, "systemctl": CLIENT, "systemd-run": CLIENT}.items():
        (bin_folder / name).write_text(text.replace("PYTHON", sys.executable))
        (bin_folder / name).chmod(0o755)
    return bin_folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Card:
    """Its Linux is up from the beginning of the block to its end, and nothing of it lives on after that."""

    def __init__(self, folder: Path, name: str, tree: Path) -> None:
        self.name, self.folder = name, folder / name
        self.port = free_port()
        for path in ("proc/sys/kernel/random", "etc/meshfusion", "var/lib", "usr/lib/meshfusion"):
            (self.folder / path).mkdir(parents=True)
        (self.folder / "proc/uptime").symlink_to("/proc/uptime")
        self.boots = 0
        self._new_boot()
        socket_path = folder / f"{name}.s"
        self.environment = {
            **os.environ,
            "MESHFUSION_SLOTS": str(self.slots),
            "MESHFUSION_SLOT_RUNNER": str(self.folder / "usr/lib/meshfusion/slot-runner"),
            "MESHFUSION_SLOTCTL": str(self.slotctl),
            "MESHFUSION_PROC": str(self.folder / "proc"),
            "INIT": str(socket_path),
            "CARD": str(self.folder),
            "PORT": str(self.port),
            "TREE": str(tree),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        mine = {
            name: self.environment[name] for name in self.environment if os.environ.get(name) != self.environment[name]
        }
        (self.folder / "environment").write_text("".join(f"export {name}='{value}'\n" for name, value in mine.items()))
        self.configure(f"telemetry: {{listen: '127.0.0.1:{self.port}'}}\n")
        self.state, self.starts = "inactive", 0
        self.process: subprocess.Popen[str] | None = None
        self._wants_start = self._wants_stop = False
        self._deadman: threading.Timer | None = None
        self._mutex = threading.RLock()
        self._is_closed = threading.Event()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(socket_path))
        self._server.listen(16)
        self._threads = [threading.Thread(target=call, daemon=True) for call in (self._serve, self._live)]

    @property
    def slots(self) -> Path:
        return self.folder / "var/lib/meshfusion/slots"

    @property
    def slotctl(self) -> Path:
        return self.folder / "usr/lib/meshfusion/slotctl"

    def configure(self, text: str) -> None:
        (self.folder / "etc/meshfusion/service.yaml").write_text(text)

    def started(self) -> list[str]:
        """Versions of the stand-in's starts, in their order."""
        path = self.folder / "starts"
        return path.read_text().split() if path.exists() else []

    def lose_power(self) -> None:
        """And boot again."""
        with self._mutex:
            self._disarm()
            self._wants_start = self._wants_stop = False
            if self.process is not None:
                self.process.kill()
                self.process.wait()
                self.process = None
            self._new_boot()
            self.starts, self._wants_start = 0, True

    def __enter__(self) -> Card:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_closed.set()
        self._disarm()
        self._server.close()
        self._threads[1].join(30)
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _new_boot(self) -> None:
        self.boots += 1
        (self.folder / "proc/sys/kernel/random/boot_id").write_text(f"boot-{self.name}-{self.boots}\n")

    # What it is asked for.

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            try:
                there, _ = self._server.accept()
            except OSError:
                return
            with there, there.makefile("rw") as file:
                words = json.loads(file.readline())
                with self._mutex:
                    file.write(json.dumps(self._asked(words)))

    def _asked(self, words: list[str]) -> tuple[int, str]:
        match words:
            case ["systemctl", "--no-block", "restart", "meshfusion.service"]:
                self.starts, self._wants_start = 0, True
            case ["systemctl", "--no-block", "stop", "meshfusion.service"]:
                self._wants_start, self._wants_stop = False, True
            case ["systemctl", "show", "--property=ActiveState", "--value", "meshfusion.service"]:
                return 0, f"{'activating' if self._wants_start and self.process is None else self.state}\n"
            case ["systemctl", "show", "--property=LoadState", "--value", "meshfusion"]:
                return 0, "loaded\n"
            case ["systemctl", "stop", "meshfusion-deadman.timer"]:
                self._disarm()
            case ["systemctl", "reset-failed", _] | ["systemctl", "daemon-reload"]:
                pass
            case ["systemd-run", "--quiet", "--collect", "--unit=meshfusion-deadman", after, _, *command]:
                self._arm(float(after.removeprefix("--on-active=")), command)
            case _:
                return 1, f"no such thing: {words}\n"
        return 0, ""

    def _arm(self, seconds: float, command: list[str]) -> None:
        self._deadman = threading.Timer(
            seconds, lambda: subprocess.run(command, env=self.environment, timeout=60, check=False)
        )
        self._deadman.daemon = True
        self._deadman.start()

    def _disarm(self) -> None:
        if self._deadman is not None:
            self._deadman.cancel()

    # What happens by itself.

    def _live(self) -> None:
        while not self._is_closed.wait(0.02):
            with self._mutex:
                self._step()

    def _step(self) -> None:
        process = self.process
        if process is not None and (self._wants_start or self._wants_stop) and self.state != "deactivating":
            self.state = "deactivating"
            process.send_signal(signal.SIGTERM)
        if process is not None and process.poll() is not None:
            was_asked, self.process = self.state == "deactivating", None
            self._wants_stop = False
            if was_asked or process.returncode == 0:
                self.state = "inactive"
            elif process.returncode in (2, 4):
                self.state = "failed"
            else:
                self._again()
        elif process is None and self._wants_stop:
            self.state, self._wants_stop = "inactive", False
        elif process is None and self._wants_start:
            self._wants_start = False
            self.state = "activating"
            threading.Thread(target=self._start, daemon=True).start()

    def _again(self) -> None:
        self.starts += 1
        if self.starts >= BURST:
            self.state = "failed"
        else:
            self.state = "activating"
            timer = threading.Timer(RESTART_S, self._start_again)
            timer.daemon = True
            timer.start()

    def _start_again(self) -> None:
        with self._mutex:
            if self.process is None and self.state == "activating" and not self._is_closed.is_set():
                self._wants_start = True

    def _start(self) -> None:
        """Outside of the lock: slotctl asks for the state while it is locked itself."""
        picked = subprocess.run(
            [str(self.slotctl), "pick"], env=self.environment, capture_output=True, timeout=60, check=False
        )
        with self._mutex:
            if self._is_closed.is_set():
                return
            if picked.returncode != 0:
                self._again()
                return
            program = self.slots / "current/root/usr/bin/meshfusion"
            log = (self.folder / "log").open("a")
            with log:
                self.process = subprocess.Popen(
                    [str(program.resolve())], env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True
                )
            threading.Thread(target=self._hear, args=(self.process,), daemon=True).start()

    def _hear(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        with self._mutex:
            if line.startswith("ready") and self.process is process and self.state == "activating":
                self.state = "active"
        with contextlib.suppress(ValueError):
            for _ in process.stdout:
                pass


def wait_until_active(card: Card, limit_s: float = 30.0) -> None:
    until(lambda: card.state == "active", limit_s=limit_s, what=f"for the service of {card.name}")
