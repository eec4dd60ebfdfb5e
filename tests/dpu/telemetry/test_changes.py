"""What two looks at a pool that differ come to."""

from __future__ import annotations

from typing import Any

import pytest

from meshfusion.dpu.api import types as t
from meshfusion.dpu.api.event_types import Severity
from meshfusion.dpu.telemetry.changes import tell_changes, tell_first
from meshfusion.dpu.telemetry.snapshot import Snapshot
from tests.dpu.api.fake_service import make_status
from tests.dpu.telemetry.fakes import Told, make_drive


def holder(holder_id: str, state: str = "live") -> t.HolderStatus:
    return t.HolderStatus(holder_id, "vllm", "1", "box", 1, 0, 0, 0.0, state)


def look(*drives: Any, stopped_s: float = 0.0, **changes: Any) -> Snapshot:
    status = make_status(**{"holders": (), "counters": (), "segments_quarantined": 0, **changes})
    return Snapshot(0.0, status, drives or (make_drive(),), stopped_s)


def holders(*found: t.HolderStatus, fenced: int = 0) -> Snapshot:
    return look(holders=found, counters=(("holders_fenced", fenced),))


CASES = {
    "nothing": (look(), look(), []),
    "comes": (holders(), holders(holder("a")), ["holder_attached"]),
    "silent": (holders(holder("a")), holders(holder("a", "silent")), ["holder_silent"]),
    "back": (holders(holder("a", "silent")), holders(holder("a")), ["holder_back"]),
    "comes silent": (holders(), holders(holder("a", "silent")), ["holder_attached", "holder_silent"]),
    "former re-asserts": (holders(holder("a", "former")), holders(holder("a")), ["holder_attached"]),
    "former condemned": (holders(holder("a", "former")), holders(holder("a", "condemned")), ["holder_condemned"]),
    "leaves": (holders(holder("a")), holders(), ["holder_detached"]),
    "fenced": (holders(holder("a", "silent")), holders(fenced=1), ["holder_fenced"]),
    "one leaves, one is fenced": (
        holders(holder("a"), holder("b", "condemned"), fenced=4),
        holders(fenced=5),
        ["holder_fenced", "holder_detached"],
    ),
    "saves stop": (look(), look(saves_stopped_reason="full"), ["saves_stopped"]),
    "another reason": (look(saves_stopped_reason="a (for 1 s)"), look(saves_stopped_reason="a (for 2 s)"), []),
    "saves again": (look(saves_stopped_reason="full", stopped_s=12.0), look(), ["saves_resumed"]),
    "exports": (look(), look(exports_problem="gone"), ["exports_problem"]),
    "exports otherwise": (look(exports_problem="gone"), look(exports_problem="other"), ["exports_problem"]),
    "exports again": (look(exports_problem="gone"), look(), ["exports_restored"]),
    "quarantine": (look(), look(segments_quarantined=2), ["quarantine_grew"]),
    "less quarantine": (look(segments_quarantined=2), look(segments_quarantined=1), []),
    "no quarantine": (look(segments_quarantined=1), look(), ["quarantine_ended"]),
    "damage": (look(), look(counters=(("dropped_chunks", 2),)), ["chunk_damaged"]),
    "failed": (
        look(counters=(("transactions_failed", 2),)),
        look(counters=(("transactions_failed", 3),)),
        ["transaction_failed"],
    ),
    "drive fails": (look(), look(make_drive(0, state="failing")), ["drive_state"]),
    "drive comes": (look(), look(make_drive(0), make_drive(1)), ["drive_added", "drive_state"]),
    "drive leaves": (look(make_drive(0), make_drive(1)), look(make_drive(1)), ["drive_removed"]),
}


@pytest.mark.parametrize("name", CASES)
def test_change(name: str) -> None:
    before, now, kinds = CASES[name]
    told = Told()
    tell_changes(before, now, told)
    assert told.take() == kinds


def test_severity_of_drives() -> None:
    told = Told()
    for state in ("draining", "gone", "online"):
        tell_changes(look(make_drive(0, state="slow")), look(make_drive(0, state=state)), told)
    assert [severity for _, severity, _ in told.events] == [Severity.INFO, Severity.ERROR, Severity.INFO]


def test_first_look_tells_what_is_not_as_it_should_be() -> None:
    told = Told()
    tell_first(look(), "1.2.3", told)
    assert told.take() == ["epoch_began"]
    bad = look(
        make_drive(0),
        make_drive(1, state="gone"),
        saves_stopped_reason="full",
        exports_problem="x",
        counters=(("index_entries_damaged", 3),),
    )
    tell_first(bad, "1.2.3", told)
    assert told.take() == ["epoch_began", "drive_state", "saves_stopped", "exports_problem", "index_damaged"]
