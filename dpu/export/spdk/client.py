"""JSON-RPC calls to SPDK: the ``spdk`` package's client, with what it lacks.

It matches no response ids, has error codes in texts only, counts processor time as timeout (see ``deadline_socket``),
leaves a late answer in the stream for the next call, and turns a mistyped method into a call. Here every call has a
wall-clock deadline, an answer must carry the call's id, errors carry their code, and after anything doubtful the
connection is closed. Only ``connect`` makes a new one, so that calls between two connects are to one process.

SPDK reads its connections in the order in which they were made, each until it is empty, and drops what it has not read
of one it cannot answer (lib/jsonrpc/jsonrpc_server_tcp.c, spdk_jsonrpc_server_poll). A request whose answer was lost is
therefore begun before the first request of the next connection, or never.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from spdk.rpc.client import JSONRPCClient, JSONRPCException

from meshfusion.dpu.export.errors import StepRefusedError, TargetUnreachableError
from meshfusion.dpu.export.spdk.deadline_socket import DeadlineSocket

METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
INVALID_STATE = -1
"""SPDK: the method exists but not in this state, before or after framework_start_init (lib/rpc/rpc.c)."""


class _PackageClient(JSONRPCClient):
    """Connects through a socket that keeps deadlines."""

    def __init__(self, path: Path, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        super().__init__(str(path))
        self.get_logger().handlers.clear()  # it adds one with every instance, to a logger they share

    def _connect(self, addr: str, port: None) -> None:
        self.sock = DeadlineSocket(Path(addr), self._deadline_s)


class SpdkClient:
    """For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._client: _PackageClient | None = None
        self._connection = 0

    def connect(self, timeout_s: float, /) -> int:
        if self._client is None:
            try:
                self._client = _PackageClient(self._path, time.monotonic() + timeout_s)
            except (OSError, JSONRPCException) as error:
                raise self._unreachable("a connection", timeout_s, error) from error
            self._connection += 1
        return self._connection

    def call(self, method: str, timeout_s: float, /, **params: object) -> Any:
        client = self._client
        try:
            if client is None:
                raise ConnectionError("not connected")
            client.sock.set_deadline(time.monotonic() + timeout_s)
            request_id = client.send(method, params)
            response = client.recv()
        except (OSError, JSONRPCException, UnicodeDecodeError) as error:
            self.close()
            raise self._unreachable(method, timeout_s, error) from error
        except BaseException:  # an interrupted call leaves its answer in the stream
            self.close()
            raise
        if not isinstance(response, dict) or response.get("id") != request_id:
            self.close()
            raise self._senseless(method, f"the answer is not to request {request_id}: {str(response)[:200]}")
        if "error" in response:
            raise self._refused(method, response["error"])
        if "result" not in response:
            self.close()
            raise self._senseless(method, f"the answer has neither result nor error: {str(response)[:200]}")
        return response["result"]

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and client.sock is not None:
            with contextlib.suppress(OSError):
                client.close()

    def _unreachable(self, method: str, timeout_s: float, error: Exception) -> TargetUnreachableError:
        message = str(getattr(error, "message", error)).strip() or type(error).__name__
        return TargetUnreachableError(
            f"SPDK at {self._path} did not answer {method} within {timeout_s:g} s: {message}",
            next_step="check that nvmf_tgt runs and listens there (its option -r), and what its log says",
        )

    def _senseless(self, method: str, problem: str) -> TargetUnreachableError:
        return TargetUnreachableError(
            f"SPDK at {self._path} answered {method} in a way that cannot be trusted: {problem}",
            next_step="check that nothing but SPDK listens there",
        )

    def _refused(self, method: str, error: object) -> Exception:
        if not isinstance(error, dict) or not isinstance(error.get("code"), int):
            self.close()
            return self._senseless(method, f"error {str(error)[:200]}")
        return StepRefusedError(
            f"SPDK refused {method}: {error.get('message', 'no message')} (code {error['code']})",
            code=error["code"],
            next_step="see nvmf_tgt's log for the reason",
        )
