"""What can come over the socket: late, broken, foreign and split answers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.export.errors import StepRefusedError, TargetUnreachableError
from meshfusion.dpu.export.spdk.client import SpdkClient
from tests.dpu.export.rpc_server import Answer, RpcServer, error, pieces, result


class Line:
    """A client and its server."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "spdk.sock"
        self.client = SpdkClient(self._path)
        self.server: RpcServer | None = None

    def serve(self, *answers: Answer) -> SpdkClient:
        self.server = RpcServer(self._path, *answers)
        assert self.client.connect(5.0) == 1
        return self.client

    def close(self) -> None:
        self.client.close()
        if self.server is not None:
            self.server.close()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    made = Line(tmp_path)
    yield made
    made.close()


def test_results_and_errors_with_their_codes(line: Line) -> None:
    client = line.serve(result([1]), error({"code": -32602, "message": "Invalid parameters"}), result(True))
    assert client.call("one", 5.0, nqn="x") == [1]
    with pytest.raises(StepRefusedError, match=r"refused two: Invalid parameters \(code -32602\)") as caught:
        client.call("two", 5.0)
    assert caught.value.code == -32602
    assert client.call("three", 5.0) is True
    assert line.server is not None
    assert line.server.connections == 1, "a refusal is an answer: the connection goes on"
    assert [(sent["method"], sent.get("params", {})) for sent in line.server.requests] == [
        ("one", {"nqn": "x"}),
        ("two", {}),
        ("three", {}),
    ]


def test_an_answer_may_be_false_or_nothing(line: Line) -> None:
    client = line.serve(result(False), result(None), result([]))
    assert [client.call("x", 5.0) for _ in range(3)] == [False, None, []]


@pytest.mark.parametrize(
    "answer",
    [
        result(1, id_offset=1),
        result(1, id_offset=-1),
        error("text"),
        error({"message": "no code"}),
        lambda request: json.dumps({"id": request["id"]}).encode(),
        lambda _request: b'"text"',
        lambda _request: b"[1]",
        pieces(b"\xff\xfe{"),
        pieces(b'{"id": 1, "res', b""),
        pieces(b""),
    ],
)
def test_an_answer_that_makes_no_sense_ends_the_connection(line: Line, answer: Answer) -> None:
    client = line.serve(answer, result("fresh"))
    with pytest.raises(TargetUnreachableError):
        client.call("x", 1.0)
    with pytest.raises(TargetUnreachableError, match="not connected"):
        client.call("x", 1.0)
    assert client.connect(5.0) == 2
    assert client.call("x", 5.0) == "fresh"


def test_a_late_answer_is_not_taken_for_the_next_ones(line: Line) -> None:
    def late(request: dict[str, Any]) -> list[bytes | float]:
        return [0.4, json.dumps({"id": request["id"], "result": "late"}).encode()]

    client = line.serve(late, result("in time"))
    with pytest.raises(TargetUnreachableError, match=r"did not answer x within 0\.2 s"):
        client.call("x", 0.2)
    assert client.connect(5.0) == 2
    assert client.call("y", 5.0) == "in time"


def test_the_deadline_is_that_of_a_wall_clock(line: Line) -> None:
    """A byte now and then: the package's own client would wait for as long as they come."""
    client = line.serve(pieces(*[part for _ in range(100) for part in (b" ", 0.05)]))
    begun_s = time.monotonic()
    with pytest.raises(TargetUnreachableError, match="did not answer"):
        client.call("x", 0.5)
    assert 0.4 < time.monotonic() - begun_s < 3.0


def test_characters_may_be_split_between_pieces(line: Line) -> None:
    def split(request: dict[str, Any]) -> list[bytes | float]:
        text = json.dumps({"id": request["id"], "result": "gr\u00fc\u00df \U0001f600"}, ensure_ascii=False).encode()
        return [part for byte in text for part in (bytes([byte]), 0.001)]

    assert line.serve(split).call("x", 10.0) == "gr\u00fc\u00df \U0001f600"


def test_nobody_listens(line: Line, tmp_path: Path) -> None:
    with pytest.raises(TargetUnreachableError, match="No such file") as caught:
        line.client.connect(1.0)
    assert "check that nvmf_tgt runs" in caught.value.next_step
    (tmp_path / "spdk.sock").touch()
    with pytest.raises(TargetUnreachableError, match="refused"):
        line.client.connect(1.0)


def test_reconnecting_does_not_pile_up_log_handlers(line: Line, tmp_path: Path) -> None:
    client = line.serve(pieces(b""))
    for _ in range(3):
        with pytest.raises(TargetUnreachableError):
            client.call("x", 1.0)
        client.connect(1.0)
    assert logging.getLogger(f"JSONRPCClient({tmp_path / 'spdk.sock'})").handlers == []
