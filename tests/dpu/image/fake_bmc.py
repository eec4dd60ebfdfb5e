"""A BlueField's BMC, as far as a flash sees it: accounts, the switch of its rshim, SimpleUpdate and its tasks.

Modelled on NVIDIA's description of BFB updates over Redfish (github.com/NVIDIA/nvbmc-docs) and on what the tool
github.com/Mellanox/dpu-update sends and expects.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.dpu.security.authority import Pair

ROOT = "/redfish/v1"
MANAGER = f"{ROOT}/Managers/Bluefield_BMC/Oem/Nvidia"
ACTION = f"{ROOT}/UpdateService/Actions/UpdateService.SimpleUpdate"
TASK = f"{ROOT}/TaskService/Tasks/7"


def message(text: str, *, severity: str = "OK", resolution: str = "None.") -> dict[str, str]:
    return {"Message": text, "Severity": severity, "Resolution": resolution}


@dataclass
class FakeBmc:
    """``boot``: the file that it writes to. ``answers``: status and body to give instead, by method and path.

    ``seen``: requests, ``passwords``: those that were sent. ``host_has_rshim``: so that its own stays off.
    """

    boot: Path | None = None
    user: str = "root"
    password: str = "secret"
    is_rshim_on: bool = False
    host_has_rshim: bool = False
    mode: str | None = "DpuMode"
    inventory: tuple[str, ...] = ("BMC_Firmware", "DPU_ATF", "DPU_OS")
    ends_with: dict[str, Any] | None = None
    answers: dict[tuple[str, str], tuple[int, dict[str, Any]]] = field(default_factory=dict)
    seen: list[tuple[str, str, Any]] = field(default_factory=list)
    passwords: list[str] = field(default_factory=list)
    fetched_bytes: int = 0
    port: int = 0
    _task: dict[str, Any] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        self.seen.append((method, path, body))
        if (method, path) in self.answers:
            return self.answers[method, path]
        match method, path:
            case "GET", "/redfish/v1/Managers":
                return 200, _collection("Managers", ("Bluefield_BMC",))
            case "GET", "/redfish/v1/Managers/Bluefield_BMC/Oem/Nvidia":
                return 200, {"BmcRShim": {"BmcRShimEnabled": self.is_rshim_on}}
            case "PATCH", "/redfish/v1/Managers/Bluefield_BMC/Oem/Nvidia":
                self.is_rshim_on = body["BmcRShim"]["BmcRShimEnabled"] and not self.host_has_rshim
                return 200, {}
            case "GET", "/redfish/v1/UpdateService":
                action = {"target": ACTION, "TransferProtocol@Redfish.AllowableValues": ["SCP", "HTTP", "HTTPS"]}
                return 200, {"Actions": {"#UpdateService.SimpleUpdate": action}}
            case "GET", "/redfish/v1/UpdateService/FirmwareInventory":
                return 200, _collection("UpdateService/FirmwareInventory", self.inventory)
            case "GET", "/redfish/v1/Systems/Bluefield/Oem/Nvidia":
                return (404, {}) if self.mode is None else (200, {"Mode": self.mode})
            case "GET", "/redfish/v1/Chassis":
                return 200, _collection("Chassis", ("Bluefield_BMC", "Card1"))
            case "GET", "/redfish/v1/Chassis/Bluefield_BMC":
                return 200, {"Name": "Bluefield_BMC", "PartNumber": None}
            case "GET", "/redfish/v1/Chassis/Card1":
                return 200, {"Model": "BlueField-3 DPU", "PartNumber": "900-9D3B6-00CV-AA0  "}
            case "POST", "/redfish/v1/UpdateService/Actions/UpdateService.SimpleUpdate":
                return self._update(body)
            case "GET", "/redfish/v1/TaskService/Tasks/7":
                return 200, dict(self._task)
        return 404, {"error": {"message": f"The resource at {path} was not found."}}

    def _update(self, body: Any) -> tuple[int, dict[str, Any]]:
        self._task = _task("Running", 0, [message("The task with Id '7' has started.")])
        threading.Thread(target=self._fetch, args=(f"http://{body['ImageURI']}",), daemon=True).start()
        return 202, {"@odata.id": TASK, "TaskState": "Running"}

    def _fetch(self, url: str) -> None:
        if self.ends_with is not None:
            self._task = self.ends_with
            return
        assert self.boot is not None
        try:
            boot = os.open(self.boot, os.O_WRONLY)
            try:
                with urllib.request.urlopen(url, timeout=20) as answer:
                    wanted = int(answer.headers["Content-Length"])
                    while piece := answer.read(65_536):
                        os.write(boot, piece)
                        self.fetched_bytes += len(piece)
            finally:
                os.close(boot)
        except OSError as error:
            self._task = failed_task(f"Transfer of image to '/dev/rshim0/boot' failed: {error}.", "Retry the transfer.")
            return
        if self.fetched_bytes < wanted:
            self._task = failed_task("Transfer of image to '/dev/rshim0/boot' failed.", "Retry the transfer.")
        else:
            self._task = _task("Completed", 100, [message("The task with Id '7' has completed.")])


def failed_task(text: str, resolution: str) -> dict[str, Any]:
    told = [
        message("The task with Id '7' has started."),
        message("The task with Id '7' has completed with errors.", severity="Critical"),
        message(text, severity="Critical", resolution=resolution),
    ]
    return _task("Exception", 0, told) | {"TaskStatus": "Critical"}


def _task(state: str, percent: int, messages: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "@odata.id": TASK,
        "Messages": messages,
        "PercentComplete": percent,
        "TaskState": state,
        "TaskStatus": "OK",
    }


def _collection(path: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {"Members": [{"@odata.id": f"{ROOT}/{path}/{name}"} for name in names]}


@contextlib.contextmanager
def served(bmc: FakeBmc, pair: Pair) -> Iterator[FakeBmc]:
    """Over TLS on a port of this machine, in ``bmc.port``."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            given = self.headers.get("Authorization", "").removeprefix("Basic ")
            bmc.passwords.append(base64.b64decode(given).decode())
            if bmc.passwords[-1] != f"{bmc.user}:{bmc.password}":
                status, answer = 401, {"error": {"message": "Invalid username or password"}}
            else:
                status, answer = bmc.answer(self.command, self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    bmc.port = server.server_address[1]
    try:
        yield bmc
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
