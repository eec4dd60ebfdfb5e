"""A real nvmf_tgt on this machine, over NVMe/TCP; spdk_nvme_perf beside it is the host that writes."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from meshfusion.dpu.export.errors import TargetUnreachableError
from meshfusion.dpu.export.spdk.client import SpdkClient
from tests.dpu.export.cases import PORT

START_S = 60.0


class RealSpdk:
    """``binary``: nvmf_tgt's path."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self._binary, self._folder = binary, folder
        self._socket = folder / "spdk.sock"
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._target = self._start()
        self.rpc = SpdkClient(self._socket)

    def restart(self) -> None:
        self._target.kill()
        self._target.wait()
        self._target = self._start()

    def connect_host(
        self,
        nqn: str,
        host_nqn: str,
        *,
        key: Path | None = None,
        psk: Path | None = None,
        start_s: float = START_S,
    ) -> None:
        """It writes until it is cut off. Returns when it has its queues."""
        before = self._queue_count(nqn, host_nqn)
        self._perf(nqn, host_nqn, key, psk, work="randwrite", run_s=300)
        deadline_s = time.monotonic() + start_s
        while self._queue_count(nqn, host_nqn) <= before:
            assert time.monotonic() < deadline_s, f"{host_nqn} has no I/O queue"
            time.sleep(0.1)

    def can_read(self, nqn: str, host_nqn: str, *, key: Path | None = None, psk: Path | None = None) -> bool:
        log = self._perf(nqn, host_nqn, key, psk, work="randread", run_s=1)
        assert self._hosts[-1].wait(START_S) in (0, 1)
        told = log.read_text()  # the exit status is 0 also when nothing was reached
        is_refused, has_read = "No valid NVMe controllers found" in told, "Total" in told
        assert is_refused != has_read, told
        return has_read

    def _queue_count(self, nqn: str, host_nqn: str) -> int:
        """Of its queues for I/O."""
        pairs = self.rpc.call("nvmf_subsystem_get_qpairs", START_S, nqn=nqn)
        return sum(pair["hostnqn"] == host_nqn and pair["qid"] > 0 for pair in pairs)

    def _perf(self, nqn: str, host_nqn: str, key: Path | None, psk: Path | None, *, work: str, run_s: int) -> Path:
        """A host begins. Returns its log."""
        where = f"trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{PORT} subnqn:{nqn} hostnqn:{host_nqn}"
        command = [self._binary.parent / "spdk_nvme_perf", "--no-huge", "-s", "256", "-q", "4", "-o", "4096"]
        command += ["-w", work, "-t", str(run_s), "-c", "0x2", "-r", where]
        command += [] if key is None else ["--dhchap-key", key]
        command += [] if psk is None else ["-S", "ssl", "--psk-path", psk]
        path = self._folder / f"perf-{len(self._hosts)}.log"
        with path.open("wb") as log:
            self._hosts.append(subprocess.Popen(list(map(str, command)), stdout=log, stderr=log))
        return path

    def slow_down(self, bdev: str, host_nqn: str) -> None:
        # SPDK gives up removing a host after 15 s; see Timeouts.
        for kind in ("avg_write", "p99_write"):
            options = {"delay_bdev_name": bdev, "latency_type": kind, "latency_us": 24_000_000}
            self.rpc.call("bdev_delay_update_latency", START_S, **options)

    def finish(self, host_nqn: str) -> None:
        """Its writes end by themselves."""

    until_writing_s = 2.0

    def stop(self) -> None:
        self.rpc.close()
        for process in (*self._hosts, self._target):
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._socket.unlink(missing_ok=True)
        command = [self._binary, "--no-huge", "-s", "512", "-m", "0x1", "--no-pci", "--wait-for-rpc"]
        with (self._folder / "nvmf_tgt.log").open("ab") as log:
            target = subprocess.Popen([*map(str, command), "-r", str(self._socket)], stdout=log, stderr=log)
        client = SpdkClient(self._socket)
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                client.connect(5.0)
                client.close()
                return target
            except TargetUnreachableError:
                assert target.poll() is None, f"nvmf_tgt ended; see {self._folder}/nvmf_tgt.log"
                assert time.monotonic() < deadline_s, "nvmf_tgt does not listen"
                time.sleep(0.1)
