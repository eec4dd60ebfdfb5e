"""kill -9, again and again: of the service, and of the worker that saves through it; and what must be true then."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from meshfusion.dpu.api import types as api
from meshfusion.dpu.pool_inspect import ChunkChecker, all_chunks, open_data, open_for_reading
from tests.dpu.kill_writer import CHUNKS
from tests.dpu.pool_cases import key

ROOT = Path(__file__).parents[2]
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Saved:
    """What a chunk is, and where its segment is of which generation."""

    digests: tuple[str, ...]
    segment: int
    generation: int


@dataclass(slots=True)
class Model:
    """``acknowledged``: what each chunk must be, unless its segment was reclaimed. ``possible``: or one of these, None
    standing for gone: steps that nobody was told the end of."""

    acknowledged: dict[int, Saved] = field(default_factory=dict)
    possible: dict[int, list[Saved | None]] = field(default_factory=dict)
    commits: int = 0

    def take(self, line: dict[str, Any]) -> None:
        i = line["i"]
        if line.get("do") == "commit":
            saved = Saved(tuple(line["digests"]), line["segment"], line["generation"])
            self.possible.setdefault(i, []).append(saved)
        elif line.get("do") == "drop":
            self.possible.setdefault(i, []).append(None)
        elif line["done"] == "nothing":
            self.possible[i].pop()
        else:
            last = self.possible.pop(i)[-1]
            self.acknowledged.pop(i, None)
            if last is not None:
                self.acknowledged[i] = last
                self.commits += 1

    def problem(self, i: int, found: Saved | None, generations: dict[int, int]) -> str:
        """Nobody saves now."""
        expected = self.acknowledged.get(i)
        if found == expected or found in self.possible.get(i, []):
            return ""
        if found is not None:
            return f"chunk {i} is {found}, not {expected}"
        assert expected is not None
        reclaimed = generations[expected.segment] > expected.generation
        return "" if reclaimed else f"chunk {i} is lost: {expected}"


class Told:
    """Lines of a child, as they come."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.append(json.loads(line))

    @property
    def count(self) -> int:
        return len(self._lines)

    def all(self) -> list[dict[str, Any]]:
        """Of a child that has ended."""
        self._thread.join()
        return self._lines


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class KillLoop:
    """``pool``: its directory; the service is configured anew in ``work``."""

    def __init__(self, pool: Path, work: Path, seed: int) -> None:
        self.pool = pool
        self.model = Model()
        self._address = f"unix://{work}/s"
        self._config = work / "service.yaml"
        self._config.write_text(
            f"listen: {self._address}\npool: {{path: {pool}}}\nlog: {{level: error}}\n"
            "leases: {heartbeat_s: 0.5, lease_ttl_s: 2, holder_silence_s: 1, grant_ttl_s: 2}\n"
        )
        self._rng = random.Random(seed)

    def run(self, rounds: int) -> None:
        """One service and one worker at a time; each round kills one of them, and looks at all there is."""
        with contextlib.ExitStack() as children:
            service = children.enter_context(self._service())
            writer, told = self._writer(children)
            taken = 0
            for number in range(rounds):
                self._wait_for_more(told)
                time.sleep(self._rng.uniform(0.0, 0.3))
                if number % 2:
                    writer.kill()
                    writer.wait()
                    lines = told.all()
                else:
                    service.kill()
                    service.wait()
                    self._wait_for_silence(told)
                    lines = told._lines[:]
                for line in lines[taken:]:
                    self.model.take(line)
                taken = len(lines)
                self.check()
                if number % 2:
                    writer, told = self._writer(children)
                    taken = 0
                else:
                    service = children.enter_context(self._service())

    def check(self) -> None:
        """Everything that was acknowledged is there and right, and nothing else is, while nobody saves."""
        with open_for_reading(self.pool) as (_, drives, index):
            totals = index.scan()
            records = {record.key: record for record in all_chunks(index)}
            generations = {record.segment: record.generation for record in index.segment_records()}
            assert (totals.damaged_count, totals.chunk_count) == (0, len(records))
            assert totals.payload_bytes == index.payload_bytes
            checker = ChunkChecker(drives.here[0].label)
            with open_data(drives) as data:
                wrong = [problem for record in records.values() if (problem := checker.problem_of(record, data))]
            assert not wrong, wrong
            assert_apart(drives.here[0].geometry.segments, records.values())
        found = {i: saved_of(records.pop(key(i), None)) for i in range(CHUNKS)}
        assert not records, "chunks that nobody saved"
        problems = [problem for i in found if (problem := self.model.problem(i, found[i], generations))]
        assert not problems, problems

    @contextlib.contextmanager
    def _service(self) -> Iterator[subprocess.Popen[str]]:
        code = "from meshfusion.tools.mfctl.main import service_main; service_main()"
        with child("-c", code, "--config", str(self._config)) as process:
            assert process.stdout is not None
            timer = threading.Timer(START_S, process.kill)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            assert line.startswith("ready "), line
            yield process

    def _writer(self, children: contextlib.ExitStack) -> tuple[subprocess.Popen[str], Told]:
        seed = str(self._rng.getrandbits(30))
        writer = children.enter_context(child("-m", "tests.dpu.kill_writer", self._address, seed))
        assert writer.stdout is not None
        return writer, Told(writer.stdout)

    def _wait_for_more(self, told: Told) -> None:
        """So that each round has work under way: whoever was killed costs a pause."""
        before, end_s = told.count, time.monotonic() + START_S
        while told.count < before + 4:
            assert time.monotonic() < end_s, "the worker does nothing"
            time.sleep(0.01)

    def _wait_for_silence(self, told: Told) -> None:
        """Of a worker whose service is gone: what it was told before is on its way through the pipe."""
        before = -1
        while told.count != before:
            before = told.count
            time.sleep(0.2)


def saved_of(record: api.ChunkRecord | None) -> Saved | None:
    if record is None:
        return None
    (shard,) = record.shards
    digests = tuple(digest.hex() for digest in shard.unit_digests)
    return Saved(digests, shard.extent.segment, shard.extent.generation)


def assert_apart(segments: range, records: Any) -> None:
    """No two chunks share a block."""
    extents = sorted((shard.extent.lba, shard.extent.lba_count) for record in records for shard in record.shards)
    for (lba, lba_count), (next_lba, _) in pairwise(extents):
        assert lba + lba_count <= next_lba
    assert all(shard.extent.segment in segments for record in records for shard in record.shards)
