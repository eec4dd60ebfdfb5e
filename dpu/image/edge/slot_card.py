"""The slots of a card, over ssh to its Linux: ``slotctl`` is put there and asked, its service is probed through ssh."""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import shlex
from collections.abc import Callable
from importlib.resources import files
from typing import Final

import yaml

from meshfusion.dpu.api.address import TcpAddress, parse_address
from meshfusion.dpu.image.edge.shell import ANSWER_S, Shell
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.slots.card_state import PROTOCOL, CardState, ServiceRuns, parse_status
from meshfusion.dpu.image.slots.preflight import CardFacts
from meshfusion.dpu.image.slots.readiness import judged
from meshfusion.dpu.image.slots.service_image import formats_of_config
from meshfusion.dpu.image.slots.types import Blob, Probed, Wanted
from meshfusion.jbof.errors import ConfigError

CONFIG: Final = "/etc/meshfusion/service.yaml"
_PROGRAMS: Final = "/usr/lib/meshfusion"
_SLOTCTL: Final = f"{_PROGRAMS}/slotctl"
_FILES: Final = (
    ("slot-runner", f"{_PROGRAMS}/slot-runner", "755"),
    ("slot-pod", f"{_PROGRAMS}/slot-pod", "755"),
    ("slotctl", _SLOTCTL, "755"),
)
"""Name here, place on a card, and permissions; in the order in which they are put there."""
_DROP_IN: Final = ("slots.conf", "/etc/systemd/system/meshfusion.service.d/slots.conf", "644")
_IS_POD: Final = "grep -qs slot-pod /etc/systemd/system/meshfusion.service && echo yes || true"
_WITHOUT_SLOTS: Final = "uname -m; df -Pk /var/lib | tail -n 1; systemctl show --property=LoadState --value meshfusion"
_PROBE_S: Final = 10.0
_PUT_S: Final = 120.0
_UNPACK_S: Final = 900.0
_STOP_S: Final = 120.0
_MAX_ANSWER_BYTES: Final = 4 << 20
_SAID: Final = re.compile(r": slotctl: (?:(busy|damaged): )?(.*)$")
_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_STEPS: Final = {
    FaultKind.BUSY: "Wait for the other upgrade of this card to end; then run the same command again.",
    FaultKind.REFUSED: "Look at the card: mfctl dpu status CARD; then run the same command again.",
    FaultKind.BROKEN: "Look at the card's log and at the free space of its drives; then run the same command again.",
    FaultKind.DAMAGED: "Look at the network and the drive of the card; then run the same command again.",
}


class SlotCard:
    """Calls raise CardError. ``read``: bytes of a blob that is copied."""

    def __init__(self, shell: Shell, read: Callable[[Blob, int, int], bytes] | None = None) -> None:
        self.shell, self._read = shell, read
        self._telemetry = ""

    def facts(self) -> CardFacts:
        """Changes nothing. A card without slotctl is one without slots."""
        is_there = self._run(f"test -x {_SLOTCTL} && echo yes || true", "slotctl").strip() == b"yes"
        state = self.look() if is_there else self._without_slots()
        is_probed = self._read_telemetry()
        former = formats_of_config(self._slotctl("show", state.committed, "image")) if state.committed else None
        return CardFacts(state, former, self._telemetry, is_probed)

    def config_of(self, slot: str) -> bytes:
        """The configuration of the image in a slot that is whole."""
        return self._slotctl("show", slot, "image")

    def manifest_of(self, slot: str) -> bytes:
        return self._slotctl("show", slot, "manifest")

    def look(self) -> CardState:
        return parse_status(self._slotctl("status").decode(errors="replace"))

    def _without_slots(self) -> CardState:
        lines = self._run(_WITHOUT_SLOTS, "systemd").decode(errors="replace").splitlines()
        try:
            machine, free_kib, loaded = lines[0], int(lines[1].split()[3]), lines[2]
        except (IndexError, ValueError):
            step = "See that it is the card's Linux, with systemd, that ssh leads to."
            raise CardError(FaultKind.REFUSED, f"{self.shell.where}: is no card", next_step=step) from None
        if loaded != "loaded":
            step = f"Flash the card with a service bundle, or put the bundle's units onto {self.shell.where}."
            raise CardError(FaultKind.REFUSED, f"{self.shell.where}: has no meshfusion.service", next_step=step)
        return CardState(machine, "", ServiceRuns.STOPPED, "", "", free_kib * 1024)

    def install(self) -> None:
        """slotctl as this release has it, unless there is a later one, which is refused. Each file is replaced as a
        whole, and what runs is not disturbed: until a slot is picked, nothing reads them."""
        there = self._run(f"cat {_SLOTCTL} 2>/dev/null || true", "slotctl")
        found = re.search(rb"^PROTOCOL=(\d+)$", there, re.MULTILINE)
        if found is not None and int(found[1]) > PROTOCOL:
            raise CardError(
                FaultKind.REFUSED,
                f"the slotctl of {self.shell.where} speaks version {int(found[1])}, this mfctl version {PROTOCOL}",
                next_step="Use the mfctl that last upgraded this card, or a later one.",
            )
        is_pod = self._run(_IS_POD, "meshfusion.service").strip() == b"yes"
        for name, path, mode in _FILES if is_pod else (*_FILES, _DROP_IN):
            self._run(_replacing(path, mode), name, data=_own(name))
        self._run("systemctl daemon-reload", "systemd")

    def forget(self, names: tuple[str, ...]) -> None:
        self._slotctl("forget", *names)

    def put(self, blob: Blob, offset_bytes: int, length_bytes: int) -> None:
        assert self._read is not None, "nothing to copy"
        try:
            data = self._read(blob, offset_bytes, length_bytes) if length_bytes else b""
        except OSError as error:
            step = "See that the bundle is there and can be read; then run the same command again."
            raise CardError(FaultKind.BROKEN, f"{error.filename}: {error.strerror}", next_step=step) from error
        self._slotctl("put", blob.digest, str(offset_bytes), str(blob.size_bytes), data=data, timeout_s=_PUT_S)

    def unpack(self, slot: str, wanted: Wanted) -> None:
        assert wanted.manifest is not None
        assert wanted.config is not None
        digests = (blob.digest for blob in (wanted.manifest, wanted.config, *wanted.layers))
        self._slotctl("unpack", slot, *digests, timeout_s=_UNPACK_S)

    def arm(self, slot: str, token: str, within_s: float, digest: str) -> None:
        self._slotctl("arm", slot, token, str(int(within_s)), digest)

    def switch(self, token: str) -> None:
        self._slotctl("switch", token, timeout_s=_STOP_S)

    def commit(self, token: str) -> None:
        self._slotctl("commit", token)

    def abort(self, token: str, how: str) -> None:
        self._slotctl("abort", token, how, timeout_s=_STOP_S)

    def probe(self) -> Probed:
        """What the service says of itself; that it says nothing is no error."""
        if not self._telemetry:
            self._read_telemetry()
        if not self._telemetry:
            return Probed(is_ready=False, has_written=False, version="", reason="telemetry.listen is not set")
        ready = self._get("/readyz")
        return judged(ready, self._get("/status.json") if ready is not None else None)

    def close(self) -> None:
        self.shell.close()

    def _read_telemetry(self) -> bool:
        """Where it is; and whether it looks."""
        text = self._run(f"cat {CONFIG} 2>/dev/null || true", CONFIG)
        try:
            section = yaml.safe_load(text)["telemetry"]
            parse_address(section["listen"])
        except (yaml.YAMLError, KeyError, TypeError, AttributeError, ConfigError):
            self._telemetry = ""  # told by whoever needs it
            return True
        self._telemetry = str(section["listen"])
        return section.get("probe", True) is not False

    def _get(self, path: str) -> bytes | None:
        address = parse_address(self._telemetry)
        if not isinstance(address, TcpAddress):
            return None  # refused before: ssh forwards to addresses only
        host = _ANYWHERE.get(address.host, address.host)
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        answer = self.shell.exchange(host, address.port, request, within_s=_PROBE_S, most_bytes=_MAX_ANSWER_BYTES)
        with contextlib.suppress(http.client.HTTPException, OSError, ValueError):
            response = http.client.HTTPResponse(_Said(answer))  # type: ignore[arg-type]
            response.begin()
            return response.read()
        return None

    def _slotctl(self, verb: str, *words: str, data: bytes = b"", timeout_s: float = ANSWER_S) -> bytes:
        script = " ".join(map(shlex.quote, (_SLOTCTL, verb, *words)))
        return self._run(script, f"slotctl {verb}", data, timeout_s)

    def _run(self, script: str, about: str, data: bytes = b"", timeout_s: float = ANSWER_S) -> bytes:
        try:
            return self.shell.run(script, about=about, data=data, timeout_s=timeout_s)
        except CardError as error:
            raise _as_slotctl_says(error, self.shell.where) from None


class _Said:
    """As a socket, for who reads an answer."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _as_slotctl_says(error: CardError, where: str) -> CardError:
    """What ssh itself says stays as it is."""
    if error.kind in (FaultKind.UNREACHABLE, FaultKind.DENIED):
        return error
    found = _SAID.search(error.message)
    if found is None:
        return CardError(FaultKind.BROKEN, error.message, next_step=_STEPS[FaultKind.BROKEN])
    kind = {"busy": FaultKind.BUSY, "damaged": FaultKind.DAMAGED, None: FaultKind.REFUSED}[found[1]]
    return CardError(kind, f"{where}: {found[2]}", next_step=_STEPS[kind])


def _own(name: str) -> bytes:
    return files("meshfusion.dpu.image.slots").joinpath(f"data/{name}").read_bytes()


def _replacing(path: str, mode: str) -> str:
    return (
        f"set -e; mkdir -p {path.rpartition('/')[0]}; cat >{path}.new; "
        f"if cmp -s {path}.new {path}; then rm -f {path}.new; exit 0; fi; "
        f"chmod {mode} {path}.new; sync {path}.new 2>/dev/null || sync; mv -f {path}.new {path}"
    )
