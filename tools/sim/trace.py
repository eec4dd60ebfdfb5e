"""Request traces in memory, and the readers of two public formats.

- Mooncake (``*.jsonl``): one request a line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
  ``hash_ids``, global ids of blocks of 512 tokens.
- kv-cache-tester (``*.json``): one coding session a file with ``block_size``, ``hash_id_scope: local`` and
  ``requests``, each with ``t`` (s), ``in`` (tokens) and ``hash_ids``; a sub-agent is a request that has ``requests``
  of its own, whose times count from its ``t``.

Either may be compressed (``.gz``). What cannot be read is refused by file, line, field and what to write there.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshfusion.jbof.errors import MeshFusionError

MOONCAKE_BLOCK_TOKENS = 512
SESSION_GAP_S = 10.0
_MAX_ID = 1 << 62

Ids = npt.NDArray[np.int64]


class TraceError(MeshFusionError):
    """A trace file is not what its format says."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """``blocks``: ids from the prompt's start, each standing for the tokens up to its end."""

    time_s: float
    input_tokens: int
    blocks: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their time. Ids of blocks are 0 to ``unique_blocks - 1``, in order of first use."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]
    unique_blocks: int

    @property
    def accesses(self) -> int:
        return sum(len(request.blocks) for request in self.requests)

    @property
    def duration_s(self) -> float:
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0


def read_traces(paths: Sequence[Path], session_gap_s: float, progress: Callable[[], None] = lambda: None) -> Trace:
    """All files as one trace; blocks of different files are different ones, unless both are of the Mooncake format.

    The k-th session (from 0, in the order of ``paths``) begins ``session_gap_s * k`` after the first; files of the
    Mooncake format keep their times. ``progress`` is called after each file. Raises :class:`TraceError`.
    """
    assert paths, "no trace"
    scopes: dict[int, list[Request]] = {}
    block_tokens: dict[int, Path] = {}
    for index, path in enumerate(paths):
        found = _read_file(path)
        block_tokens.setdefault(found.block_tokens, path)
        if len(block_tokens) > 1:
            (first, first_path), (other, other_path) = list(block_tokens.items())[:2]
            raise TraceError(
                f"{first_path} has blocks of {first} tokens and {other_path} of {other}",
                next_step="Run them apart: one trace has blocks of one size.",
            )
        scope = index if found.is_local else -1
        start_s = session_gap_s * index if found.is_local else 0.0
        moved = [Request(r.time_s + start_s, r.input_tokens, r.blocks) for r in found.requests]
        scopes.setdefault(scope, []).extend(moved)
        progress()
    name = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    return _joined(name, next(iter(block_tokens)), list(scopes.values()))


def _joined(name: str, block_tokens: int, scopes: list[list[Request]]) -> Trace:
    """One trace of requests whose ids are apart for each scope."""
    requests = [
        (r.time_s, scope, number, r) for scope, members in enumerate(scopes) for number, r in enumerate(members)
    ]
    requests.sort(key=lambda item: item[:3])
    numbers: list[dict[int, int]] = [{} for _ in scopes]
    total = 0
    renamed: list[Request] = []
    for time_s, scope, _, request in requests:
        known = numbers[scope]
        blocks = np.empty(len(request.blocks), np.int64)
        for position, block in enumerate(request.blocks.tolist()):
            number = known.get(block)
            if number is None:
                number = known[block] = total
                total += 1
            blocks[position] = number
        renamed.append(Request(time_s, request.input_tokens, blocks))
    return Trace(name, block_tokens, tuple(renamed), total)


# ---- files -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    block_tokens: int
    is_local: bool
    requests: list[Request]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value stands, for messages."""

    path: Path
    line: int
    inside: str = ""

    def error(self, field: str, problem: str, fix: str) -> TraceError:
        where = f"{self.path}, line {self.line}" + (f", {self.inside}" if self.inside else "")
        return TraceError(f"{where}: {field} {problem}", next_step=f"{fix}, or leave the request out.")


def _read_file(path: Path) -> _File:
    text = _text(path)
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return _File(MOONCAKE_BLOCK_TOKENS, False, list(_mooncake(path, text)))
    if name.endswith(".json"):
        return _session(path, text)
    raise TraceError(
        f"{path}: the format is told by the name, and this is neither *.jsonl nor *.json",
        next_step="Rename the file: .jsonl for Mooncake's requests, .json for a coding session; .gz may follow.",
    )


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode()
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise TraceError(f"{path}: not a whole gzip file: {e}", next_step="Fetch the file again.") from e
    except UnicodeDecodeError as e:
        raise TraceError(f"{path}: not UTF-8 at byte {e.start}", next_step="Fetch the file again.") from e


def _mooncake(path: Path, text: str) -> Iterator[Request]:
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        place = _Place(path, line)
        body = _object(_parsed(place, content), place, "the line")
        yield _request(body, place, "timestamp", 1e-3, "input_length", MOONCAKE_BLOCK_TOKENS)


def _session(path: Path, text: str) -> _File:
    place = _Place(path, 1)
    body = _object(_parsed(place, text), place, "the file")
    block_tokens = _whole(body, place, "block_size", 1)
    scope = body.get("hash_id_scope")
    if scope != "local":
        raise place.error("hash_id_scope", f"is {scope!r}", 'Write "local", ids that are those of this file alone')
    return _File(block_tokens, True, list(_members(body, place, block_tokens, 0.0)))


def _members(body: dict[str, Any], place: _Place, block_tokens: int, start_s: float) -> Iterator[Request]:
    requests = body.get("requests")
    if not isinstance(requests, list):
        raise place.error("requests", f"is {type(requests).__name__}", "Write a list of requests")
    for number, member in enumerate(requests):
        inside = f"{place.inside} " * bool(place.inside) + f"request {number}"
        here = _Place(place.path, place.line, inside)
        item = _object(member, here, "it")
        if "requests" in item:
            yield from _members(item, here, block_tokens, start_s + _number(item, here, "t"))
        else:
            found = _request(item, here, "t", 1.0, "in", block_tokens)
            yield Request(start_s + found.time_s, found.input_tokens, found.blocks)


# ---- fields ------------------------------------------------------------------------------------------------------


def _parsed(place: _Place, content: str) -> object:
    try:
        return json.loads(content)
    except json.JSONDecodeError as e:
        there = _Place(place.path, place.line + e.lineno - 1)
        raise there.error(f"column {e.colno}", f"is not JSON ({e.msg})", "Write one JSON object") from e
    except (RecursionError, ValueError) as e:
        raise place.error("the text", f"cannot be read ({e})", "Write one JSON object") from e


def _object(value: object, place: _Place, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise place.error(what, f"is {type(value).__name__}", "Write a JSON object")
    return value


def _request(
    body: dict[str, Any], place: _Place, time_field: str, time_unit_s: float, input_field: str, block_tokens: int
) -> Request:  # fmt: skip
    time_s = _number(body, place, time_field) * time_unit_s
    input_tokens = _whole(body, place, input_field, 0)
    ids = body.get("hash_ids")
    if not isinstance(ids, list) or not all(_is_id(block) for block in ids):
        raise place.error("hash_ids", "is not a list of whole numbers from 0 to 2^62", "Write the ids of its blocks")
    # The public sessions count tokens and blocks by different tokenizers: the blocks decide.
    return Request(time_s, min(input_tokens, len(ids) * block_tokens), np.array(ids, np.int64))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID


def _number(body: dict[str, Any], place: _Place, field: str) -> float:
    value = body.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise place.error(field, f"is {value!r}", "Write a number, 0 or more")
    return float(value)


def _whole(body: dict[str, Any], place: _Place, field: str, least: int) -> int:
    value = body.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise place.error(field, f"is {value!r}", f"Write a whole number, {least} or more")
    return value


def flat_blocks(requests: Iterable[Request]) -> Ids:
    """The ids of all accesses, in order."""
    return np.concatenate([np.empty(0, np.int64), *(request.blocks for request in requests)])
