"""What has happened between two looks at the pool. Pure functions.

What came and went between two looks is not seen: a drive that is gone for half a second, an engine that attaches and
leaves at once.
"""

from __future__ import annotations

from meshfusion.dpu.api.drive_types import DriveStatus
from meshfusion.dpu.api.event_types import Severity
from meshfusion.dpu.api.types import HolderStatus
from meshfusion.dpu.telemetry.event_log import EventSink
from meshfusion.dpu.telemetry.snapshot import Snapshot

# States of drives that are as the operator or nature meant them; others cost something.
_CALM_STATES = frozenset({"online", "new", "draining", "drained", "removed"})


def tell_first(now: Snapshot, version: str, sink: EventSink) -> None:
    """The first look of a life of the service. What is not as it should be is news, too."""
    status = now.status
    sink.tell(
        "epoch_began",
        f"epoch {status.epoch} of pool {status.pool_uuid}, MeshFusion {version}; drives: {len(now.drives)}, "
        f"chunks: {status.committed_chunk_count}, engines of an earlier epoch: {len(status.holders)}",
        epoch=status.epoch,
        version=version,
    )
    for drive in now.drives:
        if drive.state != "online":
            _tell_drive(drive, "", sink)
    _tell_saves("", now, 0.0, sink)
    _tell_exports("", now, sink)
    _tell_counters({}, now, sink)


def tell_changes(before: Snapshot, now: Snapshot, sink: EventSink) -> None:
    """What is different."""
    _tell_holders(before, now, sink)
    _tell_drives(before, now, sink)
    _tell_saves(before.status.saves_stopped_reason, now, before.saves_stopped_s, sink)
    _tell_exports(before.status.exports_problem, now, sink)
    _tell_quarantine(before, now, sink)
    _tell_counters(before.counters, now, sink)


def _tell_holders(before: Snapshot, now: Snapshot, sink: EventSink) -> None:
    were = {holder.holder_id: holder for holder in before.status.holders}
    are = {holder.holder_id: holder for holder in now.status.holders}
    for holder_id, holder in are.items():
        was = were.get(holder_id)
        state_before = was.state if was else ""
        if was is None or (was.state == "former" and holder.state == "live"):
            _tell_holder("holder_attached", holder, "attached", sink)
        elif holder.state == "live" and state_before == "silent":
            _tell_holder("holder_back", holder, "is heard of again", sink)
        if holder.state != state_before and holder.state == "silent":
            _tell_holder("holder_silent", holder, f"was last heard of {holder.silent_s:.0f} s ago", sink)
        if holder.state != state_before and holder.state == "condemned":
            _tell_holder("holder_condemned", holder, "is being cut off", sink)
    gone = [holder for holder_id, holder in were.items() if holder_id not in are]
    # A live one goes by leaving. Of the others, the pool counts those that were fenced.
    fenced = now.counters.get("holders_fenced", 0) - before.counters.get("holders_fenced", 0)
    for holder in sorted(gone, key=lambda holder: holder.state == "live"):
        if fenced > 0:
            fenced -= 1
            _tell_holder("holder_fenced", holder, "is gone or cut off, for good", sink)
        else:
            _tell_holder("holder_detached", holder, "left", sink)


def _tell_holder(kind: str, holder: HolderStatus, what: str, sink: EventSink) -> None:
    sink.tell(
        kind,
        f"{holder.engine_kind} {holder.engine_version} of {holder.host}, process {holder.pid}, {what}: holder "
        f"{holder.holder_id}",
        holder=holder.holder_id,
        host=holder.host,
        pid=holder.pid,
        access=holder.access,
        grants=holder.grant_count,
    )


def _tell_drives(before: Snapshot, now: Snapshot, sink: EventSink) -> None:
    were = {drive.number: drive for drive in before.drives}
    for drive in now.drives:
        was = were.pop(drive.number, None)
        if was is None:
            sink.tell("drive_added", f"drive {drive.number}, {drive.path}, belongs to the pool", drive=drive.number)
        if was is None or was.state != drive.state:
            _tell_drive(drive, was.state if was else "", sink)
    for number in were:
        sink.tell("drive_removed", f"drive {number} does not belong to the pool any more", drive=number)


def _tell_drive(drive: DriveStatus, before: str, sink: EventSink) -> None:
    why = "; ".join((*drive.reasons, *([drive.problem] if drive.problem else ())))
    sink.tell(
        "drive_state",
        f"drive {drive.number} is {drive.state}" + (f": {why}" if why else "") + (f" (was {before})" if before else ""),
        severity=Severity.INFO if drive.state in _CALM_STATES else Severity.ERROR,
        drive=drive.number,
        state=drive.state,
        before=before,
        serial=drive.serial,
    )


def _tell_saves(before: str, now: Snapshot, stopped_s: float, sink: EventSink) -> None:
    reason = now.status.saves_stopped_reason
    if reason and not before:
        sink.tell("saves_stopped", reason)
    elif before and not reason:
        sink.tell("saves_resumed", f"saves are accepted again, after {stopped_s:.0f} s", stopped_s=round(stopped_s))


def _tell_exports(before: str, now: Snapshot, sink: EventSink) -> None:
    problem = now.status.exports_problem
    if problem and problem != before:
        sink.tell("exports_problem", problem)
    elif before and not problem:
        sink.tell("exports_restored", "the exports are as they should be")


def _tell_quarantine(before: Snapshot, now: Snapshot, sink: EventSink) -> None:
    was, count = before.status.segments_quarantined, now.status.segments_quarantined
    if count > was:
        sink.tell("quarantine_grew", f"{count} segments are quarantined, {was} were before", segments=count)
    elif was and not count:
        sink.tell("quarantine_ended", "no segment is quarantined any more")


def _tell_counters(before: dict[str, int], now: Snapshot, sink: EventSink) -> None:
    def risen(name: str) -> int:
        return now.counters.get(name, 0) - before.get(name, 0)

    if count := risen("dropped_chunks"):
        sink.tell("chunk_damaged", f"{count} chunks were reported as damaged, and forgotten", chunks=count)
    if count := risen("transactions_failed"):
        sink.tell("transaction_failed", f"{count} transactions of the index failed", transactions=count)
    if count := risen("index_entries_damaged"):
        sink.tell("index_damaged", f"{count} entries of the index are damaged; they count as misses", entries=count)
