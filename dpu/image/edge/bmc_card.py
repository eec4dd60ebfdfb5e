"""A card reached over its BMC: Redfish pushes, ssh to the BMC reads the log of its rshim."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final

from meshfusion.dpu.image.edge.image_server import ImageServer
from meshfusion.dpu.image.edge.redfish import Redfish, Reply
from meshfusion.dpu.image.edge.rshim import Rshim, SshRshim
from meshfusion.dpu.image.edge.shell import LocalShell, Shell
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.flash_types import PushEnded, PushMoved
from meshfusion.dpu.image.flash_words import OWNED_ELSEWHERE
from meshfusion.dpu.image.misc import Misc
from meshfusion.dpu.image.preflight import CardFacts
from meshfusion.dpu.image.readiness import Observation
from meshfusion.dpu.image.stream import Stream

_ROOT: Final = "/redfish/v1"
_ENABLE_AGAIN_S: Final = 10.0
_POLL_S: Final = 2.0
_MAY_BE_SILENT_S: Final = 120.0
_MODES: Final = {"DpuMode": "DPU mode", "NicMode": "NIC mode"}
_CHIP: Final = re.compile(r"BlueField[- ]?(\d)", re.IGNORECASE)
_RUNNING: Final = frozenset({"New", "Starting", "Running", "Pending", "Service"})
_WRONG_IMAGE: Final = re.compile(r"invalid fw package|checksum", re.IGNORECASE)
_BMC_FOLDER: Final = "/dev/rshim0"


class RedfishRshim:
    """The rshim of the card at ``redfish``, owned by its BMC. ``log``: its driver's files there.

    ``serve_at``: address of this machine that the BMC can reach, "" for the one it sees; ``port`` 0 for any.
    """

    def __init__(
        self, redfish: Redfish, log: Rshim, *, serve_at: str = "", port: int = 0,
        now_s: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._redfish, self._log = redfish, log
        self._serve_at, self._port = serve_at, port
        self._now_s, self._sleep = now_s, sleep
        self._enabled_s: float | None = None
        self._server: ImageServer | None = None
        self._task = ""
        self._heard_s = 0.0
        self._total_bytes = 0

    def take(self) -> None:
        path = self._manager()
        if self._is_enabled(path):
            return
        if self._enabled_s is None or self._now_s() - self._enabled_s >= _ENABLE_AGAIN_S:
            self._enabled_s = self._now_s()
            _accepted(self._redfish, self._redfish.patch(path, {"BmcRShim": {"BmcRShimEnabled": True}}), "its rshim")
        if not self._is_enabled(path):
            problem = f"BMC {self._redfish.host}: its rshim stays off, since the host has it"
            raise CardError(FaultKind.OWNED_ELSEWHERE, problem, next_step=OWNED_ELSEWHERE[1])

    def read_misc(self) -> Misc:
        return self._log.read_misc()

    def set_misc(self, key: str, value: int) -> None:
        self._log.set_misc(key, value)

    def begin_push(self, stream: Stream) -> None:
        action, target = self._action(), self._inventory()
        self._serve(stream)
        assert self._server is not None
        body = {"TransferProtocol": "HTTP", "ImageURI": self._server.uri, "Targets": [target]}
        try:
            reply = self._redfish.post(action, body)
            if reply.status == 400 and "in progress" in reply.message:
                step = "Wait until the BMC has ended its other update; then run the same command again."
                raise CardError(FaultKind.BUSY, f"BMC {self._redfish.host}: {reply.message}", next_step=step)
            _accepted(self._redfish, reply, "SimpleUpdate")
            self._task = str(reply.body.get("@odata.id") or reply.location)
        except CardError:
            self.abandon_push()
            raise
        self._total_bytes, self._heard_s = stream.total_bytes, self._now_s()

    def continue_push(self) -> PushMoved | PushEnded:
        assert self._server is not None
        self._sleep(_POLL_S)
        try:
            task = _accepted(self._redfish, self._redfish.get(self._task), f"task {self._task}").body
        except CardError as error:
            if error.kind is not FaultKind.UNREACHABLE or self._now_s() - self._heard_s > _MAY_BE_SILENT_S:
                raise
            return PushMoved(self._server.taken_bytes, self._total_bytes)  # it is busy with the transfer, or restarts
        self._heard_s = self._now_s()
        state, status = str(task.get("TaskState", "")), str(task.get("TaskStatus", "OK"))
        if state in _RUNNING:
            percent = task.get("PercentComplete")
            told_bytes = self._total_bytes * percent // 100 if isinstance(percent, int) else 0
            return PushMoved(max(self._server.taken_bytes, told_bytes), self._total_bytes)
        if state == "Completed" and status == "OK":
            self.abandon_push()
            return PushEnded()
        raise _task_failed(self._redfish, state, status, task)

    def abandon_push(self) -> None:
        """What the BMC has begun to fetch ends where this stops to serve it."""
        if self._server is not None:
            server, self._server = self._server, None
            server.close()

    def _serve(self, stream: Stream) -> None:
        address = self._serve_at or self._redfish.own_address
        try:
            self._server = ImageServer(stream, address, self._port)
        except OSError as error:
            problem = f"nothing can be served at {address} port {self._port}: {error.strerror}"
            step = "Name an address of this machine that the BMC can reach with --serve-at."
            raise CardError(FaultKind.REFUSED, problem, next_step=step) from error

    def _manager(self) -> str:
        """Where the switch of the BMC's rshim is."""
        for manager in _members(self._redfish, f"{_ROOT}/Managers"):
            path = f"{manager}/Oem/Nvidia"
            if "BmcRShim" in self._redfish.get(path).body:
                return path
        step = "Update the BMC's firmware, or flash the card from its host."
        raise CardError(FaultKind.REFUSED, f"BMC {self._redfish.host}: has no rshim to switch on", next_step=step)

    def _is_enabled(self, path: str) -> bool:
        switch = self._redfish.get(path).body.get("BmcRShim")
        return isinstance(switch, dict) and switch.get("BmcRShimEnabled") is True

    def _action(self) -> str:
        service = _accepted(self._redfish, self._redfish.get(f"{_ROOT}/UpdateService"), "UpdateService").body
        action = service.get("Actions", {}).get("#UpdateService.SimpleUpdate", {})
        protocols = action.get("TransferProtocol@Redfish.AllowableValues", ["HTTP"])
        if "target" not in action or "HTTP" not in protocols:
            step = "Update the BMC's firmware, or flash the card from its host."
            problem = f"BMC {self._redfish.host}: SimpleUpdate is not there for HTTP, only for {', '.join(protocols)}"
            raise CardError(FaultKind.REFUSED, problem, next_step=step)
        return str(action["target"])

    def _inventory(self) -> str:
        """What of the card a BFB replaces; the names differ between generations."""
        found = _members(self._redfish, f"{_ROOT}/UpdateService/FirmwareInventory")
        named = {path.rpartition("/")[2]: path for path in found}
        wanted = next((name for name in named if name == "DPU_OS"), None)
        wanted = wanted or next((name for name in named if name.endswith("_OS")), None)
        if wanted is None:
            step = "Flash the card from its host."
            problem = f"BMC {self._redfish.host}: no DPU_OS among what it can update: {', '.join(sorted(named))}"
            raise CardError(FaultKind.REFUSED, problem, next_step=step)
        return named[wanted].lstrip("/")


class BmcCard:
    """``bmc_shell``: to the BMC. ``address``: of the card, from here; "" where it is not known."""

    def __init__(
        self, redfish: Redfish, bmc_shell: Shell, *, address: str = "", serve_at: str = "", port: int = 0,
        folder: str = _BMC_FOLDER,
    ) -> None:  # fmt: skip
        self._redfish, self._shell, self._address = redfish, bmc_shell, address
        self.rshim = RedfishRshim(redfish, SshRshim(bmc_shell, folder), serve_at=serve_at, port=port)
        self.how_taken = f"switch on the rshim of the BMC {redfish.host}"
        self.how_pushed = f"have the BMC {redfish.host} fetch it from this machine (SimpleUpdate, HTTP)"

    def facts(self) -> CardFacts:
        system = self._redfish.get(f"{_ROOT}/Systems/Bluefield/Oem/Nvidia").body
        mode = str(system.get("Mode", ""))
        chassis = [self._redfish.get(path).body for path in _members(self._redfish, f"{_ROOT}/Chassis")]
        texts = [str(body.get(key, "")) for body in chassis for key in ("Model", "Name", "Description")]
        chips = {f"BlueField-{found.group(1)}" for text in texts if (found := _CHIP.search(text))}
        parts = {str(body.get("PartNumber") or "").strip() for body in chassis} - {""}
        return CardFacts(
            chip_family=chips.pop() if len(chips) == 1 else "",
            mode=_MODES.get(mode, mode),
            part_number=parts.pop() if len(parts) == 1 else "",
        )

    def observe(self) -> Observation:
        if not self._address:
            return Observation()
        return Observation(ssh_banner=LocalShell().banner(self._address, 22))

    def close(self) -> None:
        self.rshim.abandon_push()
        self._shell.close()


def _members(redfish: Redfish, path: str) -> list[str]:
    body = _accepted(redfish, redfish.get(path), path).body
    members = body.get("Members", [])
    return [str(entry["@odata.id"]) for entry in members if isinstance(entry, dict) and "@odata.id" in entry]


def _accepted(redfish: Redfish, reply: Reply, what: str) -> Reply:
    if reply.status in (200, 202, 204):
        return reply
    kind = FaultKind.UNREACHABLE if reply.status >= 500 else FaultKind.REFUSED
    step = "Look at the BMC's log; then run the same command again."
    raise CardError(kind, f"BMC {redfish.host}: {what}: {reply.message}", next_step=step)


def _task_failed(redfish: Redfish, state: str, status: str, task: dict[str, Any]) -> CardError:
    messages = [entry for entry in task.get("Messages", []) if isinstance(entry, dict)]
    said = " ".join(str(entry.get("Message", "")) for entry in messages if entry.get("Severity") != "OK")
    resolutions = [str(entry.get("Resolution", "")) for entry in messages if entry.get("Severity") != "OK"]
    problem = f"BMC {redfish.host}: the update ended as {state} ({status}): {said or 'without a word'}"
    step = next((text for text in reversed(resolutions) if text and text != "None."), "")
    kind = FaultKind.REFUSED if _WRONG_IMAGE.search(said) else FaultKind.BROKEN
    step = step or "See that the BMC can reach this machine over HTTP; then run the same command again."
    return CardError(kind, problem, next_step=step)
