"""The frames of the line: round trips in any cut, hand-made bytes, and everything that is no frame."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.tools.lab.guest_agent.frames import (
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameDecoder,
    FrameError,
    Kind,
    Request,
    decode_size,
    encode_frame,
    encode_size,
)

frames = st.builds(Frame, st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=200))
texts = st.text(max_size=40)
requests = st.builds(
    Request,
    command=st.lists(texts, min_size=1, max_size=4).map(tuple),
    directory=texts,
    environment=st.dictionaries(texts, texts, max_size=3),
    terminal=st.none() | st.tuples(st.integers(0, 500), st.integers(0, 500)),
)


@given(sent=st.lists(frames, max_size=5), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_round_trip_in_any_cut(sent: list[Frame], cuts: list[int]) -> None:
    data = b"".join(encode_frame(frame) for frame in sent)
    decoder = FrameDecoder()
    received: list[Frame] = []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        received += decoder.feed(data[start:end])
    assert received == sent


def test_bytes_by_hand() -> None:
    data = b"LF" + b"\x06" + b"\x02\x01\x00\x00" + b"\x03\x00\x00\x00" + b"abc"
    assert encode_frame(Frame(Kind.OUTPUT, 0x102, b"abc")) == data
    assert list(FrameDecoder().feed(data)) == [Frame(Kind.OUTPUT, 0x102, b"abc")]


@pytest.mark.parametrize(
    "data",
    [
        b"login: ",
        b"LX",
        b"\n",
        b"LF\x00" + bytes(8),
        b"LF\x0a" + bytes(8),
        b"LF\x06" + bytes(4) + (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little"),
    ],
)
def test_what_is_no_frame_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameDecoder().feed(data))


def test_frames_before_a_bad_byte_are_given() -> None:
    decoder = FrameDecoder()
    given_frames = decoder.feed(encode_frame(Frame(Kind.READY)) + b"x")
    assert next(given_frames) == Frame(Kind.READY)
    with pytest.raises(FrameError, match="out of step"):
        next(given_frames)


@given(requests)
def test_request_round_trip(request: Request) -> None:
    assert Request.decode(request.encode()) == request


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"{}", b"\xff", json.dumps({"command": 1, "directory": "/", "environment": {}}).encode()],
)
def test_what_is_no_request_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        Request.decode(payload)


def test_terminal_size() -> None:
    assert encode_size(24, 0x102) == b"\x18\x00\x02\x01"
    assert decode_size(b"\x18\x00\x02\x01") == (24, 0x102)
    assert decode_size(encode_size(10**6, 80)) == (0xFFFF, 80)
    with pytest.raises(FrameError):
        decode_size(b"\x18\x00\x02")
