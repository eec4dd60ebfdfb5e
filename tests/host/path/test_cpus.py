"""Transfers run where the engine may, not only where its worker's main thread was bound to."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from meshfusion.host.path.cpus import engine_cpus
from meshfusion.host.path.staged import staged_path
from meshfusion.jbof.digest import load_kernels
from meshfusion.jbof.format import LBA_BYTES
from tests.host.support.data_files import open_new_file
from tests.host.support.kv_memory import layer_outermost

ALLOWED = os.sched_getaffinity(0)

two_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs hardware: two processors")


def _bound_child(pipe: Connection) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pipe.send((os.sched_getaffinity(0), engine_cpus()))


def test_a_process_of_its_own_has_its_own() -> None:
    assert engine_cpus() == ALLOWED


@two_cpus
def test_a_bound_child_may_use_what_its_engine_may() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_bound_child, args=(theirs,))
    child.start()
    bound, cpus = ours.recv()
    child.join(30)
    assert len(bound) == 1
    assert cpus == ALLOWED


@two_cpus
@pytest.mark.parametrize("is_given", [True, False])
def test_the_threads_of_a_path_run_there(tmp_path: Path, is_given: bool) -> None:
    kv = layer_outermost()
    bound = {min(ALLOWED)}
    os.sched_setaffinity(0, bound)
    try:
        path = staged_path(
            open_new_file(tmp_path / "data"),
            kv.memory,
            kv.layout,
            load_kernels(64 << 10),
            lba_bytes=LBA_BYTES,
            load_threads=2,
            read_bytes=LBA_BYTES,
            write_bytes=1 << 20,
            cpus=frozenset(ALLOWED) if is_given else None,
        )
        path.save([])
        path.load([], abandon_after_s=1)
        assert path.close()  # its threads have run
    finally:
        os.sched_setaffinity(0, ALLOWED)
    assert path.thread_cpus == ([frozenset(ALLOWED)] * 3 if is_given else [frozenset(bound)] * 3)
