"""Files that changed after the engine's process began say nothing about what it has loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from meshfusion.host.kv.freshness import first_changed_since, process_started_ns


def test_the_start_of_a_process() -> None:
    before_ns = time.time_ns()
    script = "from meshfusion.host.kv.freshness import process_started_ns; print(process_started_ns())"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert before_ns - 50_000_000 <= int(told.stdout) <= time.time_ns()
    assert process_started_ns() < before_ns


def test_content_rename_link_and_turned_back_mtime_are_noticed(tmp_path: Path) -> None:
    kept, written, replaced, other = (tmp_path / name for name in ("kept", "written", "replaced", "other"))
    link = tmp_path / "link"
    for path in (kept, written, replaced, other):
        path.write_text("old")
    link.symlink_to(kept)
    time.sleep(0.05)
    started_ns = time.time_ns()
    time.sleep(0.05)
    everything = [kept, written, replaced, link]
    assert first_changed_since(everything, started_ns) is None
    written.write_text("new")
    os.utime(written, ns=(1, 1))
    assert first_changed_since(everything, started_ns) == written
    other.rename(replaced)
    assert first_changed_since([kept, replaced, link], started_ns) == replaced
    link.unlink()
    link.symlink_to(kept)
    assert first_changed_since([kept, link], started_ns) == link
