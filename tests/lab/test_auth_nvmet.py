"""DH-HMAC-CHAP against the kernel's NVMe-oF target, over soft-RoCE in a guest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]

SCRIPT = "guest_auth.py"


def test_right_keys_of_every_kind_open_all_queues(run_script: RunScript) -> None:
    rows = run_script(SCRIPT, "right_keys")["rows"]
    assert len(rows) == 3 * 4 * 2
    assert all(row["same"] and row["queues"] > 1 for row in rows)
    assert [row["authentication"] for row in rows] == ["host", "mutual"] * 12


def test_refusals_say_what_is_wrong(run_script: RunScript) -> None:
    said = run_script(SCRIPT, "refusals")["said"]
    assert said["no key"][0] == "UnsupportedError"
    assert "no key is set here" in said["no key"][1]
    assert said["wrong key"][0] == "NvmeAuthenticationError"
    assert "response is wrong" in said["wrong key"][1] or "because that is wrong" in said["wrong key"][1]
    assert said["wrong controller key"][0] == "NvmeAuthenticationError"
    assert "its response is wrong" in said["wrong controller key"][1]
    assert said["right after all"] == ["none", ""]
    assert said["no controller key"][0] == "NvmeAuthenticationError"
    assert said["group"][0] == "UnsupportedError"
    assert "only the group null" in said["group"][1]


def test_a_key_that_the_target_does_not_ask_for(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "idle_key")
    assert report["moved"]["same"]
    assert report["moved"]["authentication"] == "none"
    assert sum("does not ask for authentication" in line for line in report["lines"]) == 1
    assert report["refused"][0] == "NvmeAuthenticationError"


def test_reconnection_authenticates_again_and_is_patient(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "reconnection")
    assert 1 <= report["refused"] <= report["retries"] <= 8


def test_a_new_key_ends_no_connection_and_is_used_for_the_next(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "new_key")
    assert report["lost"] == 0
    assert report["said"]["former key"][0] == "NvmeAuthenticationError"
    assert report["said"]["new key"] == ["none", ""]
    assert report["refused_state"] != "live"
    assert report["back_s"] < 30.0, "the next attempt by itself would be later"
