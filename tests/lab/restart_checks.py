"""What must be true of the reports of ``guest_restarts.py`` and ``guest_silent_writer.py``, with either target."""

from __future__ import annotations

from typing import Any

# With a silence of 6 s, beside other jobs, in a guest that got a third to a half of a processor, two engines in it. The
# kernel's target: hits after 1 to 17 s, all exported after 0.1 to 4.3 s. SPDK, which polls there all the time:
# 12 to 78 s, and 4 to 54 s.
BACK_S = {"nvmet": 45.0, "spdk": 120.0}
SETTLED_S = 40.0  # silent incarnations of before are cut off one after the other
REFUSED = ("StaleHolderError", "ServiceError")


def check_restarts(report: dict[str, Any], rounds: int, *, target: str) -> None:
    for restart in report["restarts"]:
        assert restart["exported_s"] <= BACK_S[target], restart
        assert restart["hits_s"] <= BACK_S[target], restart
    kinds = [restart["kind"] for restart in report["restarts"]]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("target_killed", "service_killed", "both_killed", "service_stopped"), rounds
    )
    assert report["with_hits"] >= 10 * len(kinds), "it was not under load"
    assert report["counters"].get("digest_mismatches", 0) == 0, "something wrong was offered"
    for name, holders in (("idle", 2), ("alone", 0)):
        settled = report[name]
        assert settled["adds_up"], settled
        assert settled["took_s"] <= SETTLED_S, settled
        assert settled["saves_stopped"] == ""
        assert settled["is_as_wanted"], settled
        assert settled["hosts"] == holders
    assert report["alone"]["connected"] == 0
    assert report["committed"] > 0
    assert (report["lost"], report["dropped"]) == (0, 0), "what was committed is offered"
    assert (report["twice"], report["overlaps"]) == (0, 0)
    assert report["alone"]["chunks"] == report["listed"]
    reread = report["reread"]
    assert reread["mismatches"] == 0
    assert reread["whole"] > 0
    for name in ("check_served", "check_stopped"):
        code, found = report[name]
        assert code == 0, found
        assert found["chunks_checked"] >= report["listed"]
        assert (found["damaged"], found["index_damaged"], found["segments_damaged"]) == ([], 0, [])


def check_silent_writers(report: dict[str, Any], count: int) -> None:
    assert len(report["scenarios"]) == count
    for scenario in report["scenarios"]:
        check_silent_writer(scenario, report["silence_s"])
    assert report["settled"]["adds_up"]


def check_silent_writer(seen: dict[str, Any], silence_s: float) -> None:
    assert seen["under_way"] > 0
    assert seen["grants"] == 10
    assert seen["fenced_s"] >= silence_s - 1.0, "its last heartbeat was less than a second before"
    assert (seen["grants_after"], seen["quarantined_after"]) == (0, 0)
    assert seen["reused"]["new_generations"], seen
    assert seen["silent_s"] > seen["fenced_s"]
    went_on = seen["went_on"]
    assert sum(went_on["at_once"].values()) == sum(went_on["again"].values()) == 10
    assert "done" not in {*went_on["at_once"], *went_on["again"]}, went_on
    assert not any(outcome.startswith("done") for outcome in seen["connected_again"]), seen
    assert all(outcome.startswith(REFUSED) for outcome in seen["asked"].values()), seen
    assert seen["target_shows"] == [False] * 4, "the target still knows it"
    judged = seen["judged"]
    assert judged["chunks"] > 0
    assert judged["on_medium"] == {"right": judged["chunks"]}
    assert judged["loaded"] == {"right": judged["chunks"]}


def check_unfenced(report: dict[str, Any]) -> None:
    """Without a fence the same writer does damage, and what is looked at above shows it."""
    (seen,) = report["scenarios"]
    assert seen["went_on"]["at_once"].get("done", 0) > 0
    judged = seen["judged"]
    assert judged["on_medium"].get("the silent writer's", 0) > 0
    assert judged["loaded"].get("mismatch", 0) > 0, "its bytes were never proven to be a chunk's"
    assert "WRONG BYTES" not in judged["loaded"], "digests tell in any case (rule 4)"
