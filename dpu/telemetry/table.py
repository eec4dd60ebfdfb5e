"""The one table of the service's metrics. What is exposed, what is documented and what alerts may name comes from it.

A label's values are few and known beforehand: words of this program, a drive's number, or the name of a pool. Holders,
requests and keys are never labels.

What is of a pool has the label ``pool`` always. Of a service of one pool, which has no name, it is empty, and to
Prometheus an empty label is none: rules and panels are the same for both.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from meshfusion.dpu.api.types import ReserveOutcome
from meshfusion.dpu.telemetry.event_kinds import EVENT_KINDS
from meshfusion.jbof.drives.life_words import State
from meshfusion.jbof.policy.medium_policy import Refusal

PREFIX: Final = "meshfusion_"
POOL: Final = "pool"  # the label; the first of those that have it
RPC_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""A lookup has 20 ms (rule 8): the buckets are close around that."""


class Kind(enum.Enum):
    COUNTER = "counter"  # since the service began; never less than before within its life
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """``name``: as it is scraped, of a histogram without ``_bucket``, ``_sum`` and ``_count``. ``unit``: "" for a count
    or a state. ``source``: the counter of the pool's status it is made of, by its label's value ("" without labels);
    empty where it is made otherwise."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    source: tuple[tuple[str, str], ...] = ()


def _counter(
    name: str, help_text: str, source: str | dict[str, str] = "", *, label: str = "", unit: str = ""
) -> Metric:
    """``source``: a counter of the pool's status, or one for each value of ``label``."""
    pairs = tuple(source.items()) if isinstance(source, dict) else ((("", source),) if source else ())
    return Metric(f"{PREFIX}{name}_total", Kind.COUNTER, unit, help_text, (label,) if label else (), pairs)


def _gauge(name: str, help_text: str, *labels: str, unit: str = "", source: str = "") -> Metric:
    return Metric(f"{PREFIX}{name}", Kind.GAUGE, unit, help_text, labels, (("", source),) if source else ())


LOOKUPS: Final = (
    _counter("match_requests", "Lookups that were answered.", "match_requests"),
    _counter("match_keys", "Chunks that lookups asked for.", "match_keys"),
    _counter("match_chunks", "Chunks that lookups found and leased.", "matched_chunks"),
    _counter(
        "leases_granted", "Read leases that were given: one for each lookup that found something.", "leases_granted"
    ),
    _counter("leases_released", "Read leases that engines gave back.", "leases_released"),
    _counter("leases_lapsed", "Read leases that were not renewed in time.", "leases_lapsed"),
    _counter("match_shortened", "Lookups that would have leased more than leases may pin.", "match_shortened_by_pins"),
    _counter(
        "match_mismatches",
        "Chunks found under a key that are of another identity, group or position.",
        "match_refused_mismatch",
    ),
    _counter("damage_reports", "Chunks that engines reported as damaged.", "dropped_reports"),
    _counter("chunks_dropped", "Chunks that were forgotten after such a report.", "dropped_chunks"),
)
SAVES: Final = (
    _counter("chunks_committed", "Chunks that became visible.", "committed_chunks"),
    _counter("committed_bytes", "Payload of the chunks that became visible.", "committed_bytes", unit="bytes"),
    _counter(
        "reserve_items",
        "Chunks for which engines asked for room, by what came of it.",
        {outcome.value: f"reserve_{outcome.value}" for outcome in ReserveOutcome},
        label="outcome",
    ),
    _counter(
        "reserve_declined",
        "Chunks that were not worth a write, by the policy's reason.",
        {reason.name.lower(): f"declined_{reason.name.lower()}" for reason in Refusal if reason is not Refusal.NONE},
        label="reason",
    ),
    _counter(
        "commit_refused",
        "Chunks that were written and not committed: expired, or another chunk of their bundle was.",
        {"expired": "commit_refused_expired", "bundle": "commit_refused_bundle"},
        label="reason",
    ),
    _counter(
        "grants_ended",
        "Write grants that ended without a commit: given back, in doubt, expired, or lost with a drive.",
        {
            "aborted": "grants_aborted",
            "in_doubt": "grants_in_doubt",
            "expired": "grants_expired",
            "drive_lost": "grants_lost_with_drives",
        },
        label="how",
    ),
    _gauge("transactions_pending", "Transactions of the index that are not durable yet."),
    _counter("transactions_failed", "Transactions of the index that failed.", "transactions_failed"),
    _gauge("saves_stopped", "1 while no saves are accepted; hits go on."),
    _gauge("saves_stopped_seconds", "For how long no saves have been accepted; 0 while they are.", unit="seconds"),
)
SPACE: Final = (
    _gauge("capacity_bytes", "Size of all segments.", unit="bytes"),
    _gauge("payload_bytes", "Payload of all committed chunks.", unit="bytes"),
    _gauge("chunks", "Committed chunks."),
    _gauge("segments", "Segments by state.", "state"),
    _gauge("segments_quarantined", "Sealed segments withheld because of a write of unknown fate."),
    _gauge("segments_quarantined_limit", "With more segments in quarantine than this, saves stop."),
    _gauge("pinned_bytes", "Segments that read leases keep from being reclaimed.", unit="bytes"),
    _gauge("pinned_limit_bytes", "Most that read leases may pin.", unit="bytes"),
    _gauge("leases", "Read leases."),
    _gauge("lease_age_seconds_max", "How long ago the oldest of them was given.", unit="seconds"),
    _gauge("grants", "Write grants whose fate is not known yet."),
    _gauge("grant_age_seconds_max", "How long ago the oldest of them was given.", unit="seconds"),
    _counter(
        "segment_steps",
        "What was done to segments: opened, summarized, deallocated, given up ahead of need.",
        {
            "opened": "segments_opened",
            "summarized": "segments_summarized",
            "deallocated": "segments_deallocated",
            "given_up": "segments_given_up",
        },
        label="step",
    ),
    _counter(
        "deallocations_failed",
        "Deallocations that the medium does not support, or after which blocks did not read as zeros.",
        {"unsupported": "deallocations_unsupported", "not_kept": "deallocations_not_kept"},
        label="how",
    ),
    _counter("rewritten_chunks", "Chunks of segments given up that were written again.", "rewritten_chunks"),
    _counter("rewritten_bytes", "Payload of these.", "rewritten_bytes", unit="bytes"),
    _counter("rewrites_failed", "Chunks that could not be written again.", "rewrites_failed"),
    _counter("chunks_drained", "Chunks that were forgotten because their drive is emptied.", "chunks_drained"),
)
HOLDERS: Final = (
    _gauge("holders", "Engines that are attached, by state.", "state"),
    _gauge("holder_silent_seconds_max", "The longest time that an engine has not been heard of.", unit="seconds"),
    _counter("holders_condemned", "Engines whose access began to be taken away.", "holders_condemned"),
    _counter("holders_fenced", "Engines that are gone or cut off, for good.", "holders_fenced"),
    _gauge("exports_problem", "1 while the exports are not as they should be."),
)
DRIVES: Final = (
    _gauge("drive_state", "1 for the state that the drive is in, 0 for the others.", "drive", "state"),
    _gauge("drive_size_bytes", "Size of the drive's segments; 0 while it was never here.", "drive", unit="bytes"),
    _gauge("drive_percentage_used", "Of its life, as it says; absent where it does not.", "drive"),
    _gauge("drive_months_left", "At the rate of the last day; absent where it is not known.", "drive"),
    _gauge("drive_written_bytes", "Written to it by hosts, as it says, in its whole life.", "drive", unit="bytes"),
    _gauge("drive_media_errors", "Media and data integrity errors, as it says, in its whole life.", "drive"),
    _gauge("drive_spare_percentage", "Spare blocks that are left, as it says.", "drive"),
    _gauge(
        "drive_write_budget_left_bytes",
        "What medium.drive_writes_per_day lets be written to it now; absent without a bound.",
        "drive",
        unit="bytes",
    ),
    _gauge("drive_write_budget_limit_bytes", "Most that it lets be written at once.", "drive", unit="bytes"),
    Metric(
        f"{PREFIX}drive_command_failures_total", Kind.COUNTER, "", "Commands of the service that it failed.", ("drive",)
    ),
    _gauge("drive_read_latency_seconds", "Median of single blocks, at the last look.", "drive", unit="seconds"),
    _gauge("drive_problem", "1 while something that was found wrong with it holds.", "drive"),
    _counter("drive_alarms", "How often the state of a drive was told to people.", "drive_alarms"),
)
THE_POOL: Final = (
    _gauge("pool_info", "Always 1.", "pool_uuid", "format_version"),
    _gauge("pool_answers", "1 while the pool answers in time; while it does not, what is read from it is absent."),
    _gauge("epoch", "Of this owner of the pool."),
    _gauge("index_bytes", "What the files of the index take on their filesystem.", unit="bytes"),
    _gauge("index_scan", "1 while the index is looked through after a start.", source="index_scans_under_way"),
    _gauge("index_entries_damaged", "Damaged entries that were found then.", source="index_entries_damaged"),
    _gauge("probe_state", "1 for what the last probe found, 0 for the others.", "state"),
    _gauge("probe_seconds", "How long the last probe took.", unit="seconds"),
    _gauge("probe_age_seconds", "How long ago it ended; absent before the first.", unit="seconds"),
)
SERVICE: Final = (
    _gauge("build_info", "Always 1.", "version"),
    _gauge("rpc_in_flight", "Calls that are being answered."),
    Metric(f"{PREFIX}rpc_seconds", Kind.HISTOGRAM, "seconds", "How long calls took in the service.", ("call",)),
    Metric(f"{PREFIX}rpc_total", Kind.COUNTER, "", "Calls by gRPC status code.", ("call", "code")),
    _counter("rpc_slow", "Calls that took longer than telemetry.slow_call_s."),
    _counter("events", "What happened, by kind; see `mfctl events`.", label="kind"),
    _gauge("event_watchers", "Streams of events that are open."),
)
# As prometheus_client makes them.
PROCESS: Final = (
    Metric("process_virtual_memory_bytes", Kind.GAUGE, "bytes", "Virtual memory of the service's process."),
    Metric("process_resident_memory_bytes", Kind.GAUGE, "bytes", "Its resident memory, the mapped index included."),
    Metric("process_start_time_seconds", Kind.GAUGE, "seconds", "When it began, as Unix time."),
    Metric("process_cpu_seconds_total", Kind.COUNTER, "seconds", "Processor time that it took."),
    Metric("process_open_fds", Kind.GAUGE, "", "Its open files."),
    Metric("process_max_fds", Kind.GAUGE, "", "Most that it may have open."),
)


def _of_each_pool(part: tuple[Metric, ...]) -> tuple[Metric, ...]:
    return tuple(replace(metric, labels=(POOL, *metric.labels)) for metric in part)


SECTIONS: Final = {
    "Lookups": _of_each_pool(LOOKUPS),
    "Saves": _of_each_pool(SAVES),
    "Space": _of_each_pool(SPACE),
    "Engines": _of_each_pool(HOLDERS),
    "Drives": _of_each_pool(DRIVES),
    "The pool": _of_each_pool(THE_POOL),
    "The service": SERVICE,
    "Its process": PROCESS,
}
METRICS: Final = {metric.name: metric for part in SECTIONS.values() for metric in part}
LABEL_VALUES: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("meshfusion_segments", "state"): ("free", "open", "sealed"),
    ("meshfusion_holders", "state"): ("live", "silent", "former", "condemned"),
    ("meshfusion_drive_state", "state"): tuple(state.value for state in State),
    ("meshfusion_events_total", "kind"): tuple(EVENT_KINDS),
    ("meshfusion_probe_state", "state"): ("ok", "degraded", "failing", "unknown"),
}
"""Of metrics that are not made of counters: every value is exposed, so that a sum or an alert finds it."""

COUNTERS_TOLD_OTHERWISE: Final = frozenset({"drives", "drives_away", "drives_only_read", "saves_stopped_ms"})
"""Of the pool's status: what drives and their states, and the reason why saves stopped, tell too."""

assert len(METRICS) == sum(map(len, SECTIONS.values())), "a metric stands twice in the table"


def metrics_document() -> str:
    """The table as Markdown, a section for each part."""
    lines: list[str] = []
    for title, part in SECTIONS.items():
        lines += [f"## {title}", "", "| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
        lines += [
            f"| `{m.name}` | {m.kind.value} | {m.unit} | {'; '.join(_label_text(m, x) for x in m.labels)} | {m.help} |"
            for m in part
        ]
        lines.append("")
    return "\n".join(lines)


def _label_text(metric: Metric, label: str) -> str:
    if label == POOL:
        return f"`{POOL}`"
    if label == "kind":
        return "`kind`: see [events.md](events.md)"
    values = LABEL_VALUES.get((metric.name, label)) or tuple(value for value, _ in metric.source if value)
    return f"`{label}`" + (f": {', '.join(values)}" if values else "")
