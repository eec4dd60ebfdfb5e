"""From what was seen to values of metrics. Pure functions; names and labels are those of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from meshfusion.dpu.api.drive_types import DriveStatus
from meshfusion.dpu.telemetry.snapshot import Limits, Snapshot
from meshfusion.dpu.telemetry.table import LABEL_VALUES, METRICS, PREFIX, SECTIONS
from meshfusion.jbof.policy.write_budget import BURST_SHARE


class Sample(NamedTuple):
    """``labels``: values, in the order of the table."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()

    def of_pool(self, name: str) -> Sample:
        """One of the functions here, which leave out the first label of what is a pool's."""
        return self._replace(labels=(name, *self.labels))


def pool_samples(now: Snapshot, limits: Limits) -> Iterator[Sample]:
    """What the pool told, without the label that names it."""
    yield from _of_counters(now.counters)
    yield from _of_space(now, limits)
    status = now.status
    yield _gauge("saves_stopped", bool(status.saves_stopped_reason))
    yield _gauge("saves_stopped_seconds", now.saves_stopped_s)
    yield from one_of("holders", Counter(holder.state for holder in status.holders))
    yield _gauge("holder_silent_seconds_max", max((holder.silent_s for holder in status.holders), default=0.0))
    yield _gauge("exports_problem", bool(status.exports_problem))
    yield _gauge("epoch", status.epoch)
    yield _gauge("pool_info", 1, status.pool_uuid, str(status.format_version))
    if now.index_bytes >= 0:
        yield _gauge("index_bytes", now.index_bytes)
    for drive in now.drives:
        yield from _of_drive(drive, limits)


def one_of(name: str, counts: Mapping[str, int], *labels: str) -> Iterator[Sample]:
    """A sample for every known value of the last label, 0 where ``counts`` has none."""
    known = LABEL_VALUES[f"{PREFIX}{name}", METRICS[f"{PREFIX}{name}"].labels[-1]]
    assert counts.keys() <= set(known), f"{name}: {counts.keys() - set(known)} are not in the table"
    for value in known:
        yield _gauge(name, counts.get(value, 0), *labels, value)


def _gauge(name: str, value: float, *labels: str) -> Sample:
    return Sample(f"{PREFIX}{name}", value, labels)


def _of_counters(counters: Mapping[str, int]) -> Iterator[Sample]:
    """All of the table, 0 where nothing was counted yet."""
    for part in SECTIONS.values():
        for metric in part:
            for label, source in metric.source:
                yield Sample(metric.name, counters.get(source, 0), (label,) if label else ())


def _of_space(now: Snapshot, limits: Limits) -> Iterator[Sample]:
    status = now.status
    yield _gauge("capacity_bytes", status.capacity_bytes)
    yield _gauge("payload_bytes", status.committed_payload_bytes)
    yield _gauge("chunks", status.committed_chunk_count)
    counts = {"free": status.segments_free, "open": status.segments_open, "sealed": status.segments_sealed}
    yield from one_of("segments", counts)
    yield _gauge("segments_quarantined", status.segments_quarantined)
    yield _gauge("segments_quarantined_limit", limits.quarantine_max_fraction * status.segment_count)
    yield _gauge("pinned_bytes", status.pinned_bytes)
    most_pinned = int(limits.max_pinned_fraction * status.segment_count)
    yield _gauge("pinned_limit_bytes", most_pinned * status.segment_bytes)
    yield _gauge("leases", status.lease_count)
    yield _gauge("grants", status.grant_count)
    yield _gauge("grant_age_seconds_max", status.oldest_grant_s)
    yield _gauge("lease_age_seconds_max", status.oldest_lease_s)
    yield _gauge("transactions_pending", status.transactions_pending)


def _of_drive(drive: DriveStatus, limits: Limits) -> Iterator[Sample]:
    """What is not known is absent."""
    number = str(drive.number)
    yield from one_of("drive_state", {drive.state: 1}, number)
    yield _gauge("drive_size_bytes", drive.size_bytes, number)
    yield _gauge("drive_problem", bool(drive.problem), number)
    yield _gauge("drive_command_failures_total", drive.failed_command_count, number)
    known = {
        "drive_percentage_used": drive.percentage_used,
        "drive_months_left": drive.months_left,
        "drive_written_bytes": drive.written_bytes,
        "drive_media_errors": drive.media_errors,
        "drive_spare_percentage": drive.spare_percent,
        "drive_write_budget_left_bytes": drive.write_budget_left_bytes,
        "drive_read_latency_seconds": drive.read_latency_s,
    }
    for name, value in known.items():
        if value >= 0:
            yield _gauge(name, value, number)
    if limits.drive_writes_per_day is not None:
        at_once_bytes = int(drive.size_bytes * limits.drive_writes_per_day * BURST_SHARE)
        yield _gauge("drive_write_budget_limit_bytes", at_once_bytes, number)
