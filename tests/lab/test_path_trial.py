"""``mfctl path`` over two soft-RoCE paths to the kernel's target, in a guest, without any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]

CONNECT_AND_LEAVE_S = 40.0
"""More than enough for Python, the attachment, and the time that a path has to connect in."""


def test_each_path_is_read_over_and_one_that_is_cut_is_told(run_script: RunScript) -> None:
    report = run_script("guest_path_trial.py", "both")
    for name in ("good", "back"):
        seen = report[name]
        assert (seen["exit_code"], seen["stderr"]) == (0, ""), name
        for path, (host, target), sent in zip(seen["paths"], report["expected"], seen["sent_bytes"], strict=True):
            assert path["local_port"].split()[1] == host
            assert path["portal"] == f"rdma://{target}:4420"
            assert path["error"] == ""
            assert 0 < path["read_bytes"] <= sent, "the bytes did not go over this path's wire"
            assert path["bytes_per_s"] > 0
            assert 0 < path["median_s"] <= path["p99_s"]
        assert seen["written_sectors"] == 0
    cut, works = report["cut"]["paths"]
    assert report["cut"]["exit_code"] == 1
    assert cut["error"]
    assert cut["next_step"]
    assert (works["error"], works["read_bytes"] > 0) == ("", True)
    assert '"next_step"' in report["cut"]["stderr"]
    assert report["cut"]["seconds"] < CONNECT_AND_LEAVE_S
    assert report["cut"]["written_sectors"] == 0


def test_a_workers_paths_are_listed_and_a_disabled_one_carries_nothing(run_script: RunScript) -> None:
    report = run_script("guest_path_trial.py", "board")
    load_bytes = report["load_bytes"]
    engine = report["engine"]
    assert (engine["pid"], engine["pool_uuid"]) == (report["pid"], report["pool_uuid"])
    assert [path["state"] for path in engine["paths"]] == ["live", "live"]
    assert sum(path["read_bytes"] for path in engine["paths"]) >= load_bytes
    assert sum(report["all"]) > load_bytes, "the bytes did not go over the wire"
    assert report["exit_codes"] == [0, 0, 0]
    nothing_bytes = load_bytes // 50  # keep-alives and the like
    first, second = report["without first"]
    assert (first < nothing_bytes, second > load_bytes) == (True, True)
    first, second = report["without second"]
    assert (first > load_bytes, second < nothing_bytes) == (True, True)
    assert report["closed"] == []
