"""The one table of alert rules: from it come the rules that Prometheus reads, and the first steps about each.

Of a service of several pools, what is of a pool is told of each by itself: rules keep the label ``pool``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_WHERE: Final = "{{ $labels.instance }}{{ with $labels.pool }}, pool {{ . }}{{ end }}"
"""The service and, where it has several, the pool."""


@dataclass(frozen=True, slots=True)
class Alert:
    """``expr``: PromQL over the metrics of the table, and ``up``. ``held_for``: it must hold so long. ``severity``:
    "critical" wants somebody now, "warning" on the next working day. ``cause`` and ``steps``: for docs/alerts.md."""

    name: str
    expr: str
    held_for: str
    severity: str
    summary: str
    cause: str
    steps: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """Of its part of docs/alerts.md and docs/runbooks.md."""
        return self.name.lower()


ALERTS: Final = (
    Alert(
        "MeshFusionDown",
        'up{job="meshfusion"} == 0',
        "2m",
        "critical",
        "The service on {{ $labels.instance }} cannot be scraped.",
        "The service has ended or hangs, its machine is away, or telemetry.listen is another address. Engines go on "
        "without the pool and compute everything themselves.",
        (
            "Is the process there, and what does the end of its log say?",
            "`mfctl pool status POOL` shows what is on the medium; a service that ends at once says why, with a next "
            "step and an exit code.",
            "Does `curl ADDRESS/healthz` answer on the machine itself? Then the way from Prometheus is broken.",
        ),
    ),
    Alert(
        "MeshFusionPoolSilent",
        "meshfusion_pool_answers == 0",
        "1m",
        "critical",
        "The service on {{ $labels.instance }} runs, and its pool{{ with $labels.pool }} {{ . }}{{ end }} does not "
        "answer.",
        "The pool's lock is held: by a medium that hangs in the kernel, or by a defect.",
        (
            "See the kernel's log for a drive that times out, and `mfctl jbof list` for its health.",
            "Stop the service; a restart opens a new epoch, and loses nothing that was committed.",
            "When it hangs again without a drive's fault: report it, with the log.",
        ),
    ),
    Alert(
        "MeshFusionProbeFailing",
        'meshfusion_probe_state{state="failing"} == 1',
        "2m",
        "critical",
        "Reading a chunk back fails on " + _WHERE + ".",
        "A committed chunk is not found, cannot be read, or has other bytes. What the probe meets, engines do.",
        (
            "`curl ADDRESS/readyz` names the step and the place.",
            "`mfctl jbof drives POOL` shows the drives; `mfctl pool check POOL` reads all chunks, beside the service.",
            "Drain or replace a drive that returns other bytes: `mfctl jbof drain POOL NUMBER`.",
        ),
    ),
    Alert(
        "MeshFusionSavesStopped",
        "meshfusion_saves_stopped == 1",
        "5m",
        "warning",
        "No saves are accepted on " + _WHERE + "; hits go on.",
        "The index cannot be written, no drive takes writes, the quarantine is full, or the drives' writes for now are "
        "spent.",
        (
            "`mfctl pool status POOL` gives the reason, with what to do.",
            "A full filesystem of the pool's directory: free space there; saves are tried again by themselves.",
            "A full quarantine: see MeshFusionQuarantineFills.",
        ),
    ),
    Alert(
        "MeshFusionQuarantineFills",
        "meshfusion_segments_quarantined > 0.5 * meshfusion_segments_quarantined_limit",
        "5m",
        "warning",
        "More than half of what may be quarantined is, on " + _WHERE + ".",
        "Engines had writes under way when they fell silent, and are neither back nor known to be gone. Their space "
        "may still be written, and is withheld; at the limit saves stop.",
        (
            "`mfctl pool status POOL` shows holders that are silent or condemned: end these engines.",
            "Condemned ones that stay: their target does not confirm that they are gone, see MeshFusionExportsProblem.",
        ),
    ),
    Alert(
        "MeshFusionDriveNotWell",
        'meshfusion_drive_state{state=~"gone|failing|read_only|slow"} == 1',
        "5m",
        "warning",
        "Drive {{ $labels.drive }} on " + _WHERE + " is {{ $labels.state }}.",
        "See the reasons and the problem that `mfctl jbof drives POOL` gives. Its chunks are misses while it is gone, "
        "and are given up bit by bit while it fails.",
        (
            "`mfctl jbof drives POOL`, and the next step that it names for the drive.",
            "Replace it: `mfctl jbof replace POOL NUMBER --size SIZE --data-path DEVICE`.",
        ),
    ),
    Alert(
        "MeshFusionDriveMediaErrors",
        "delta(meshfusion_drive_media_errors[1h]) > 0",
        "0m",
        "warning",
        "Drive {{ $labels.drive }} on " + _WHERE + " reports new media errors.",
        "The drive could not correct what it read. Engines recompute what they cannot read.",
        ("Watch it, and replace it when it goes on: `mfctl jbof wear`, `mfctl jbof replace`.",),
    ),
    Alert(
        "MeshFusionDriveWears",
        "meshfusion_drive_percentage_used >= 90 or meshfusion_drive_months_left < 6",
        "1h",
        "warning",
        "Drive {{ $labels.drive }} on " + _WHERE + " is nearly worn.",
        "Its rated endurance is nearly used, or will be within half a year at the rate of the last day.",
        (
            "Order its successor; `mfctl jbof wear` shows all of them.",
            "Write less: a lower `medium.drive_writes_per_day`.",
        ),
    ),
    Alert(
        "MeshFusionWriteBudgetSpent",
        "meshfusion_drive_write_budget_left_bytes < 0.05 * meshfusion_drive_write_budget_limit_bytes",
        "6h",
        "warning",
        "The write budget of drive {{ $labels.drive }} on " + _WHERE + " has been spent for hours.",
        "Engines offer more than `medium.drive_writes_per_day` lets be written. Chunks are declined that would be hit.",
        ("Raise it if the drives' life allows (MeshFusionDriveWears), or add drives.",),
    ),
    Alert(
        "MeshFusionChunksDamaged",
        "increase(meshfusion_chunks_dropped_total[1h]) > 0",
        "0m",
        "warning",
        "Engines found other bytes than were written, on " + _WHERE + ".",
        "A drive, a path or a device's memory changed bytes. No answer was wrong: each was found by its digest, and "
        "its chunk forgotten.",
        (
            "The service's log names each chunk; `mfctl pool check POOL` tells whether the medium is at fault.",
            "If the medium is right, look at the path: `mfctl path test`.",
        ),
    ),
    Alert(
        "MeshFusionIndexFails",
        "increase(meshfusion_transactions_failed_total[10m]) > 0 or meshfusion_index_entries_damaged > 0",
        "0m",
        "warning",
        "The index on " + _WHERE + " cannot be written, or has damaged entries.",
        "The filesystem of the pool's directory is full, read-only or fails; or it lost what it had acknowledged.",
        (
            "See the log for the error, and the filesystem for space.",
            "Damaged entries count as misses. To make the index anew, with the service stopped: "
            "`mfctl pool rebuild-index POOL`.",
        ),
    ),
    Alert(
        "MeshFusionExportsProblem",
        "meshfusion_exports_problem == 1",
        "2m",
        "critical",
        "The exports of " + _WHERE + " are not as they should be.",
        "The NVMe-oF target does not answer, or refuses what the service asks. Engines on other hosts cannot attach, "
        "and those that must go cannot be cut off.",
        ("`mfctl pool status POOL` gives the target's words.", "Is the target running? docs/exports.md."),
    ),
    Alert(
        "MeshFusionEngineSilent",
        'sum by (instance, job, pool) (meshfusion_holders{state=~"silent|condemned"}) > 0',
        "10m",
        "warning",
        "An engine of " + _WHERE + " has been silent for long, and is not known to be gone.",
        "Its process hangs or its host is away. What it may still write is withheld.",
        ("`mfctl pool status POOL` names host and process: end it, or bring its host back.",),
    ),
    Alert(
        "MeshFusionLookupsSlow",
        "histogram_quantile(0.99, sum by (instance, job, le) "
        '(rate(meshfusion_rpc_seconds_bucket{call="Match"}[5m]))) > 0.02',
        "10m",
        "warning",
        "One lookup in a hundred takes longer than 20 ms on {{ $labels.instance }}.",
        "Engines wait no longer for a lookup than that, and count it as a miss. The machine is short of processor "
        "time, or the index does not fit its memory.",
        (
            "`/status.json` has the last slow calls, with their request ids.",
            "Compare `process_cpu_seconds_total` and the machine's memory with meshfusion_index_bytes.",
        ),
    ),
    Alert(
        "MeshFusionCallsFail",
        "sum by (instance, job) "
        '(rate(meshfusion_rpc_total{code=~"INTERNAL|DATA_LOSS|UNAVAILABLE|RESOURCE_EXHAUSTED|UNKNOWN"}[5m])) '
        "> 0.01 * sum by (instance, job) (rate(meshfusion_rpc_total[5m]))",
        "10m",
        "warning",
        "More than one call in a hundred fails on {{ $labels.instance }}.",
        "UNAVAILABLE: deadlines run out. INTERNAL: the medium fails, or a defect. DATA_LOSS: the index is damaged.",
        ("Find the code in meshfusion_rpc_total by call, and its lines in the log.",),
    ),
    Alert(
        "MeshFusionFilesNearlySpent",
        'process_open_fds{job="meshfusion"} > 0.8 * process_max_fds{job="meshfusion"}',
        "10m",
        "warning",
        "The service on {{ $labels.instance }} has nearly all the files open that it may.",
        "More engines than the limit of open files was made for, or a leak.",
        ("Raise the limit (LimitNOFILE of its unit); if the count only rises, report it.",),
    ),
)
