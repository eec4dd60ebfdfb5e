"""A small client of a BMC's Redfish: JSON over HTTPS, with the certificate checked. What it says others judge."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from meshfusion.dpu.image.errors import CardError, FaultKind

_ANSWER_S: Final = 20.0
_MAX_ANSWER_BYTES: Final = 4 << 20
_UNREACHABLE_STEP: Final = "See that the BMC answers: curl --cacert CA https://HOST/redfish/v1/."


@dataclass(frozen=True, slots=True)
class Credentials:
    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """``body``: {} where there was none. ``location``: of what was made."""

    status: int
    body: dict[str, Any]
    location: str = ""

    @property
    def message(self) -> str:
        """What the BMC says of it, as far as it is found where Redfish has it."""
        error = self.body.get("error", {})
        extended = error.get("@Message.ExtendedInfo") or self.body.get("@Message.ExtendedInfo") or []
        texts = [str(entry.get("Message", "")) for entry in extended if isinstance(entry, dict)]
        return " ".join(filter(None, [*texts, str(error.get("message", ""))])) or f"status {self.status}"


class Redfish:
    """``ca``: file with the authority of the BMC's certificate; ``fingerprint``: of that certificate itself, SHA-256 in
    hex, instead of an authority and a name. Without either, the system's authorities. One request at a time."""

    def __init__(
        self, host: str, credentials: Credentials, *, port: int = 443, ca: Path | None = None, fingerprint: str = ""
    ) -> None:
        self.host, self._port = host, port
        self._fingerprint = fingerprint.replace(":", "").lower()
        token = base64.b64encode(f"{credentials.user}:{credentials.password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {token}", "Accept": "application/json"}
        self._context = ssl.create_default_context(cafile=ca)
        if self._fingerprint:
            self._context.check_hostname = False
            self._context.verify_mode = ssl.CERT_NONE
        self.own_address = ""
        """Of this machine, as the BMC sees it; "" before the first request."""

    def get(self, path: str) -> Reply:
        return self._request("GET", path, None)

    def patch(self, path: str, body: dict[str, Any]) -> Reply:
        return self._request("PATCH", path, body)

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Reply:
        """Raises CardError for what is no answer, and for credentials that are refused."""
        connection = http.client.HTTPSConnection(self.host, self._port, timeout=_ANSWER_S, context=self._context)
        try:
            connection.connect()
            self._check_certificate(connection)  # before the password is sent
            data = None if body is None else json.dumps(body).encode()
            headers = self._headers | ({"Content-Type": "application/json"} if data is not None else {})
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            reply = Reply(answer.status, _json(answer.read(_MAX_ANSWER_BYTES)), answer.headers.get("Location") or "")
        except ssl.SSLCertVerificationError as error:
            step = "Name its authority with --bmc-ca, or its certificate with --bmc-fingerprint."
            raise CardError(FaultKind.DENIED, f"BMC {self.host}: {error.verify_message}", next_step=step) from error
        except (OSError, http.client.HTTPException) as error:
            step = _UNREACHABLE_STEP.replace("HOST", self.host)
            raise CardError(FaultKind.UNREACHABLE, f"BMC {self.host}: {error}", next_step=step) from error
        finally:
            connection.close()
        self._check_access(reply)
        return reply

    def _check_certificate(self, connection: http.client.HTTPSConnection) -> None:
        assert isinstance(connection.sock, ssl.SSLSocket | socket.socket)
        self.own_address = connection.sock.getsockname()[0]
        if not self._fingerprint:
            return
        assert isinstance(connection.sock, ssl.SSLSocket)
        found = hashlib.sha256(connection.sock.getpeercert(binary_form=True) or b"").hexdigest()
        if found != self._fingerprint:
            step = "Compare it with the BMC's own: openssl x509 -noout -fingerprint -sha256. It may be another machine."
            problem = f"BMC {self.host}: its certificate has the fingerprint {found}, not {self._fingerprint}"
            raise CardError(FaultKind.DENIED, problem, next_step=step)

    def _check_access(self, reply: Reply) -> None:
        if reply.status == 401:
            step = "Correct the credentials. After several wrong ones the BMC locks the account for a while."
            raise CardError(FaultKind.DENIED, f"BMC {self.host}: {reply.message}", next_step=step)
        if reply.status == 403:
            step = "Change the password of the BMC's account (a new BMC demands it), and write the new one to the file."
            raise CardError(FaultKind.DENIED, f"BMC {self.host}: {reply.message}", next_step=step)


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
