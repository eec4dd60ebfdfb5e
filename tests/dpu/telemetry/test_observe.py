"""Events over gRPC: a real server and a real client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshfusion.dpu.api.codec_events import event_from_pb, event_to_pb
from meshfusion.dpu.api.event_client import GrpcEventSource
from meshfusion.dpu.api.event_types import Event, Severity
from meshfusion.dpu.api.limits import MalformedMessageError
from meshfusion.dpu.api.running_server import RunningServer
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.dpu.telemetry.event_log import MAX_WATCHERS, EventLog
from meshfusion.jbof.errors import ServiceUnavailableError, UnsupportedError
from tests.dpu.api.fake_service import FakeChunkService
from tests.dpu.telemetry.fakes import wait_until


@pytest.fixture
def log() -> EventLog:
    return EventLog(kept=20)


@pytest.fixture
def server(log: EventLog, tmp_path: Path) -> Iterator[RunningServer]:
    running = serve(FakeChunkService(), f"unix://{tmp_path}/s", events=log)
    yield running
    log.close()
    running.stop(0.0)


@pytest.fixture
def source(server: RunningServer) -> Iterator[GrpcEventSource]:
    source = GrpcEventSource(server.address)
    yield source
    source.close()


def test_the_same_as_in_process(log: EventLog, source: GrpcEventSource) -> None:
    log.tell("drive_state", "drive 0 is gone", severity=Severity.ERROR, drive=0, state="gone")
    log.of_pool("red").tell("saves_stopped", "é \N{SNOWMAN}")
    assert tuple(source.events(0, follow=False)) == log.recent(5)
    assert tuple(source.events(1, follow=False)) == log.recent(1)


def test_following_until_the_service_ends(log: EventLog, source: GrpcEventSource) -> None:
    log.tell("saves_stopped", "a")
    watcher = source.events(0, follow=True)
    assert next(watcher).text == "a"
    log.tell("saves_resumed", "b")
    assert next(watcher).text == "b"
    log.tell("service_stops", "c")
    log.close()
    assert [event.text for event in watcher] == ["c"]


def test_a_watcher_that_leaves_makes_room(log: EventLog, source: GrpcEventSource) -> None:
    log.tell("saves_stopped", "a")
    watchers = [source.events(0, follow=True) for _ in range(MAX_WATCHERS)]
    for watcher in watchers:
        next(watcher)
    with pytest.raises(ServiceUnavailableError, match=f"{MAX_WATCHERS} watchers follow the events already"):
        next(source.events(0, follow=True))
    watchers[0].close()  # type: ignore[attr-defined]
    wait_until(lambda: log.watcher_count == MAX_WATCHERS - 1, "the one that left is noticed")
    assert next(source.events(0, follow=True)).text == "a"


def test_one_that_takes_nothing_is_cut_off_and_its_thread_is_free(log: EventLog, server: RunningServer) -> None:
    """What is sent to it fills the connection's window, and then its thread waits for it."""
    channel = grpc.insecure_channel(server.address.replace("unix://", "unix:"))
    stream: Any = channel.unary_stream(
        "/meshfusion.v1.Observe/Events", request_serializer=pb.EventsRequest.SerializeToString
    )
    log.tell("saves_stopped", "x" * 4000)
    replies = stream(pb.EventsRequest(follow=True))
    next(replies)
    wait_until(lambda: log.watcher_count == 1, "it watches")
    done = threading.Event()

    def tell() -> None:
        while not done.is_set() and log.watcher_count:
            log.tell("saves_stopped", "x" * 4000)
            done.wait(0.0005)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        wait_until(lambda: log.watcher_count == 0, "it is cut off")
    finally:
        done.set()
        teller.join()
        channel.close()


def test_a_service_without_events_says_so(tmp_path: Path) -> None:
    server = serve(FakeChunkService(), f"unix://{tmp_path}/other")
    source = GrpcEventSource(server.address)
    with pytest.raises(UnsupportedError, match="does not know the call Events"):
        next(source.events(0, follow=False))
    source.close()
    server.stop(0.0)


def test_no_service_at_all(tmp_path: Path) -> None:
    source = GrpcEventSource(f"unix://{tmp_path}/none")
    with pytest.raises(ServiceUnavailableError, match="cannot be reached"):
        next(source.events(0, follow=True))
    source.close()
    with pytest.raises(ServiceUnavailableError, match="closed"):
        next(source.events(0, follow=False))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sequence": 0}, "event.sequence"),
        ({"time_s": -1.0}, "event.time_s"),
        ({"kind": ""}, "event.kind"),
        ({"severity": "fatal"}, "event.severity"),
        ({"text": "x" * 5000}, "event.text"),
        ({"pool": "x" * 5000}, "event.pool"),
        ({"fields": [pb.EventField(name="n")] * 65}, "event.fields"),
    ],
)
def test_malformed_events_are_refused(change: dict[str, object], field: str) -> None:
    event = Event(1, 2.0, "saves_stopped", Severity.ERROR, "t", (("a", "b"),))
    message = event_to_pb(event)
    assert event_from_pb(message) == event
    for name, value in change.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(MalformedMessageError, match=field):
        event_from_pb(message)
