"""The slots of a card, over ssh to its Linux: ``slotctl`` is put there and asked, its service is probed through ssh."""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import yaml

from meshfusion.dpu.api.address import TcpAddress, parse_address
from meshfusion.dpu.image.edge.shell import Shell
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.slots.card_state import PROTOCOL, CardState, parse_status
from meshfusion.dpu.image.slots.preflight import CardFacts
from meshfusion.dpu.image.slots.readiness import judged
from meshfusion.dpu.image.slots.service_image import formats_of_config
from meshfusion.dpu.image.slots.types import Blob, Probed, Wanted
from meshfusion.jbof.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are on a card."""

    programs: str = "/usr/lib/meshfusion"
    drop_in: str = "/etc/systemd/system/meshfusion.service.d/slots.conf"
    config: str = "/etc/meshfusion/service.yaml"
    reload_units: str = "systemctl daemon-reload"


class SlotCard:
    """Calls raise CardError. ``read``: bytes of a blob that is copied."""

    def __init__(
        self, shell: Shell, read: Callable[[Blob, int, int], bytes] | None = None, places: Places = Places()
    ) -> None:
        self.shell, self._read, self._places = shell, read, places
        self._telemetry = ""

    def facts(self) -> CardFacts:
        """Changes nothing. A card without slotctl is one without slots."""
        state = self.look()
        self._telemetry = self._telemetry_address()
        former = formats_of_config(self._slotctl("show", state.committed, "image")) if state.committed else None
        return CardFacts(state, former, self._telemetry)

    def config_of(self, slot: str) -> bytes:
        """The configuration of the image in a slot that is whole."""
        return self._slotctl("show", slot, "image")

    def manifest_of(self, slot: str) -> bytes:
        return self._slotctl("show", slot, "manifest")

    def look(self) -> CardState:
        return parse_status(self._slotctl("status").decode(errors="replace"))

    def install(self) -> None:
        """slotctl as this release has it, unless there is a later one, which is refused. Each file is replaced as a
        whole, and what runs is not disturbed: until a slot is picked, nothing reads them."""
        own = {name: _own(name) for name in ("slotctl", "slot-runner", "slots.conf")}
        there = self._run(f"cat {shlex.quote(self._places.programs)}/slotctl 2>/dev/null || true", "slotctl")
        found = re.search(rb"^PROTOCOL=(\d+)$", there, re.MULTILINE)
        if found is not None and int(found[1]) > PROTOCOL:
            raise CardError(
                FaultKind.REFUSED,
                f"the slotctl of {self.shell.where} speaks version {int(found[1])}, this mfctl version {PROTOCOL}",
                next_step="Use the mfctl that last upgraded this card, or a later one.",
            )
        programs = self._places.programs
        for name, path in (
            ("slot-runner", f"{programs}/slot-runner"), ("slots.conf", self._places.drop_in),
            ("slotctl", f"{programs}/slotctl"),
        ):  # fmt: skip
            self._run(_replacing(path, "644" if name == "slots.conf" else "755"), name, data=own[name])
        self._run(self._places.reload_units, "systemd")

    @property
    def is_installed(self) -> bool:
        path = shlex.quote(f"{self._places.programs}/slotctl")
        return self._run(f"[ -x {path} ] && echo yes || true", "slotctl").strip() == b"yes"

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
            self._telemetry = self._telemetry_address()
        if not self._telemetry:
            return Probed(is_ready=False, has_written=False, version="", reason="telemetry.listen is not set")
        ready = self._get("/readyz")
        return judged(ready, self._get("/status.json") if ready is not None else None)

    def close(self) -> None:
        self.shell.close()

    def _telemetry_address(self) -> str:
        text = self._run(f"cat {shlex.quote(self._places.config)} 2>/dev/null || true", self._places.config)
        try:
            document = yaml.safe_load(text)
            listen = document["telemetry"]["listen"]
            parse_address(listen)
        except (yaml.YAMLError, KeyError, TypeError, ConfigError):
            return ""  # told by whoever needs it
        return str(listen)

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

    def _slotctl(self, verb: str, *words: str, data: bytes = b"", timeout_s: float = 30.0) -> bytes:
        words_text = " ".join(map(shlex.quote, (f"{self._places.programs}/slotctl", verb, *words)))
        try:
            return self.shell.run(words_text, about=f"slotctl {verb}", data=data, timeout_s=timeout_s)
        except CardError as error:
            raise _as_slotctl_says(error, self.shell.where) from None

    def _run(self, script: str, about: str, data: bytes = b"") -> bytes:
        return self.shell.run(script, about=about, data=data)


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
    quoted = shlex.quote(path)
    return (
        f'set -e; mkdir -p "$(dirname {quoted})"; cat >{quoted}.new; '
        f"if cmp -s {quoted}.new {quoted}; then rm -f {quoted}.new; exit 0; fi; "
        f"chmod {mode} {quoted}.new; sync {quoted}.new 2>/dev/null || sync; mv -f {quoted}.new {quoted}"
    )
