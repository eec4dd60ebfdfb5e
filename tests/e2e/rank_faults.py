"""The connector, with trouble for one rank of an engine: its reads or writes are stuck, fail, or bring other bytes.

An engine starts its ranks as fresh processes, so that nothing a test changes in its own is inherited: they read what to
do from a file that is named in their environment. For tests only.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from meshfusion.host.connector.vllm import connector
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.media.file import DataFile

FAULTS_VARIABLE = "MESHFUSION_TEST_RANK_FAULTS"
MODULE = "tests.e2e.rank_faults"
LONGEST_S = 300.0


class RankFaults:
    """What a test says: from now on loads or saves of ``rank`` are ``blocked``, ``failing`` or ``wrong``."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._reached = file.with_suffix(".reached")
        self.clear()

    @property
    def environment(self) -> dict[str, str]:
        return {FAULTS_VARIABLE: str(self._file)}

    def set(self, rank: int, *, reads: str = "", writes: str = "") -> None:
        self._reached.unlink(missing_ok=True)
        made = self._file.with_suffix(".new")
        made.write_text(json.dumps({"rank": rank, "meshfusion-load": reads, "meshfusion-save": writes}))
        made.replace(self._file)

    def clear(self) -> None:
        self.set(-1)

    def wait_reached(self, timeout_s: float = LONGEST_S) -> None:
        """Until that rank has met it."""
        end_s = time.monotonic() + timeout_s
        while not self._reached.exists():
            assert time.monotonic() < end_s, self._file.read_text()
            time.sleep(0.02)


class MeshFusionConnector(connector.MeshFusionConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            _meet_faults(Path(os.environ[FAULTS_VARIABLE]), vllm_config.parallel_config.rank)


def _meet_faults(file: Path, rank: int) -> None:
    read_into, write_from = DataFile.read_into, DataFile.write_from

    def way() -> str:
        faults = json.loads(file.read_text())
        thread = threading.current_thread().name
        met = next((what for prefix, what in faults.items() if thread.startswith(prefix)), "")
        if faults["rank"] != rank or not met:
            return ""
        file.with_suffix(".reached").touch()
        end_s = time.monotonic() + LONGEST_S
        while met == "blocked" and json.loads(file.read_text()) == faults and time.monotonic() < end_s:
            time.sleep(0.02)
        if met == "failing":
            raise MediaError(f"rank {rank} fails, simulated", next_step="-")
        return str(met)

    def read(data: DataFile, lba: int, buffer: Any) -> None:
        way()
        read_into(data, lba, buffer)

    def write(data: DataFile, lba: int, buffer: Any) -> None:
        if way() != "wrong":
            write_from(data, lba, buffer)
            return
        other = memoryview(mmap.mmap(-1, len(buffer)))  # aligned as the medium wants it
        other[:] = bytes(buffer)
        other[-100] ^= 0xFF  # in the last unit of the shard, after its digest was taken
        write_from(data, lba, other)

    DataFile.read_into = read  # type: ignore[method-assign, assignment]
    DataFile.write_from = write  # type: ignore[method-assign, assignment]
