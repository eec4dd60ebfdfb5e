"""A load that is given up while one of its spans is read and another one written: both halves have an outcome."""

from __future__ import annotations

from pathlib import Path

from meshfusion.jbof.digest import DigestKernels
from tests.host.support.staged_rig import into, rig, wait


def test_what_was_read_too_late_is_not_taken_for_loaded(tmp_path: Path, kernels: DigestKernels) -> None:
    with rig(tmp_path, kernels, load_threads=1) as r:
        reads = r.save([1, 2])
        r.file.may_read.clear()
        before = r.kv.memory.copy()
        job = r.path.load(into(reads, [7, 8]), abandon_after_s=60)
        assert r.file.waiting_readers.acquire(timeout=5)
        assert job.enter(), "as another thread that has come to its span"
        job.abandon("preempted")
        r.file.may_read.set()
        assert r.path.close()
        job.leave()
        assert [(f.index, f.reason) for f in wait(job).failures] == [(0, "preempted"), (1, "preempted")]
        assert r.kv.untouched_except(before, [])
