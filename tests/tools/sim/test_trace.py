"""Readers of the two public formats, on files of their shape."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from meshfusion.tools.sim.trace import Trace, TraceError, flat_blocks, read_traces

LINE = {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [7, 9, 4]}


def session(*requests: object, **changes: object) -> str:
    return json.dumps({"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": requests} | changes)


def turn(t: float, *ids: int, tokens: int = 640) -> dict[str, object]:
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": ids}


def read(*paths: Path) -> Trace:
    return read_traces(paths, 10.0)


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_mooncake(tmp_path: Path, name: str) -> None:
    later = LINE | {"timestamp": 2000, "hash_ids": [7, 5]}
    trace = read(write(tmp_path / name, json.dumps(LINE) + "\n\n" + json.dumps(later) + "\n"))
    assert trace.block_tokens == 512
    assert [r.time_s for r in trace.requests] == [1.5, 2.0]
    assert [r.blocks.tolist() for r in trace.requests] == [[0, 1, 2], [0, 3]]
    assert [r.input_tokens for r in trace.requests] == [1100, 1024]
    assert (trace.accesses, trace.unique_blocks, trace.duration_s) == (5, 4, 0.5)


def test_a_sub_agents_times_count_from_its_start(tmp_path: Path) -> None:
    agent = {"t": 5.0, "type": "subagent", "agent_id": "x", "requests": [turn(0.0, 8), turn(2.0, 8, 9)]}
    trace = read(write(tmp_path / "s.json", session(turn(0.0, 1), agent, turn(6.0, 1, 2))))
    assert [r.time_s for r in trace.requests] == [0.0, 5.0, 6.0, 7.0]
    assert flat_blocks(trace.requests).tolist() == [0, 1, 0, 2, 1, 3]


def test_sessions_are_interleaved_and_share_no_blocks(tmp_path: Path) -> None:
    one = write(tmp_path / "1.json.gz", session(turn(0.0, 1, 2), turn(15.0, 1)))
    two = write(tmp_path / "2.json", session(turn(0.0, 1)))
    trace = read(one, two)
    assert [(r.time_s, r.blocks.tolist()) for r in trace.requests] == [(0.0, [0, 1]), (10.0, [2]), (15.0, [0])]


def test_files_of_global_ids_share_blocks(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", json.dumps(LINE))
    two = write(tmp_path / "2.jsonl", json.dumps(LINE | {"timestamp": 9}))
    assert read(one, two).unique_blocks == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["line 2", "column", "JSON"]),
        ("[1]", ["line 2", "list", "JSON object"]),
        (json.dumps(LINE | {"timestamp": "1"}), ["line 2", "timestamp", "'1'", "number"]),
        (json.dumps(LINE | {"timestamp": True}), ["line 2", "timestamp", "True"]),
        (json.dumps(LINE | {"timestamp": -1}), ["line 2", "timestamp", "-1"]),
        ('{"timestamp": NaN, "input_length": 1, "hash_ids": []}', ["line 2", "timestamp", "nan"]),
        (json.dumps(LINE | {"input_length": 1.5}), ["line 2", "input_length", "1.5", "whole number"]),
        (json.dumps({"timestamp": 1, "input_length": 1}), ["line 2", "hash_ids", "ids of its blocks"]),
        (json.dumps(LINE | {"hash_ids": [1, "2"]}), ["line 2", "hash_ids"]),
        (json.dumps(LINE | {"hash_ids": [-1]}), ["line 2", "hash_ids"]),
        (json.dumps(LINE | {"hash_ids": [2**70]}), ["line 2", "hash_ids"]),
    ],
)
def test_bad_lines_are_refused_by_place_and_fix(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps(LINE) + "\n" + text)
    with pytest.raises(TraceError) as caught:
        read(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{\n\n]", ["line 3", "JSON"]),
        (session(turn(0, 1), hash_id_scope="global"), ["hash_id_scope", "'global'", '"local"']),
        (session(turn(0, 1), block_size=0), ["block_size", "0"]),
        (session(requests=None), ["requests", "NoneType"]),
        (
            session(turn(0, 1), {"t": 1, "requests": [{"t": 0, "in": -3, "hash_ids": []}]}),
            ["request 1 request 0", "in"],
        ),
        (session(turn(0, 1), {"requests": []}), ["request 1", "t is None"]),
    ],
)
def test_bad_sessions_are_refused_by_place_and_fix(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path / "a.json", text)
    with pytest.raises(TraceError) as caught:
        read(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(LINE).encode() * 100)
    for name, content, word in (
        ("a.txt", b"", "neither"),
        ("a.jsonl.gz", b"plain", "gzip"),
        ("b.jsonl.gz", whole[:-9], "gzip"),
        ("a.jsonl", b"\xff\xfe", "UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=word):
            read(tmp_path / name)


def test_blocks_of_two_sizes_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"512 tokens and .* of 64"):
        read(write(tmp_path / "1.jsonl", json.dumps(LINE)), write(tmp_path / "2.json", session(turn(0, 1))))
