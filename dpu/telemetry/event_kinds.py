"""The one table of what can be told to have happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.api.event_types import Severity

INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR


@dataclass(frozen=True, slots=True)
class EventKind:
    """``severity``: where it is the same for all of them; None where each has its own."""

    name: str
    severity: Severity | None
    help: str


EVENT_KINDS: Final = {
    kind.name: kind
    for kind in (
        EventKind("epoch_began", INFO, "The service owns the pool and serves it, in this epoch."),
        EventKind("service_stops", INFO, "It was told to end."),
        EventKind("holder_attached", INFO, "An engine came."),
        EventKind("holder_silent", WARNING, "An engine has not been heard of for holder_silence_s."),
        EventKind("holder_back", INFO, "A silent engine is heard of again."),
        EventKind("holder_condemned", WARNING, "The access of an engine is being taken away."),
        EventKind("holder_fenced", WARNING, "An engine is gone or cut off, for good."),
        EventKind("holder_detached", INFO, "An engine left by itself."),
        EventKind("saves_stopped", ERROR, "No saves are accepted; hits go on."),
        EventKind("saves_resumed", INFO, "Saves are accepted again."),
        EventKind("quarantine_grew", WARNING, "More segments are withheld because of writes of unknown fate."),
        EventKind("quarantine_ended", INFO, "No segment is withheld any more."),
        EventKind(
            "chunk_damaged", WARNING, "Engines reported bytes that were not those written; chunks were forgotten."
        ),
        EventKind("transaction_failed", ERROR, "The index could not be written."),
        EventKind("index_damaged", ERROR, "Entries of the index are damaged; they count as misses."),
        EventKind("exports_problem", ERROR, "The exports are not as they should be."),
        EventKind("exports_restored", INFO, "They are again."),
        EventKind("drive_state", None, "A drive is in another state than before."),
        EventKind("drive_added", INFO, "A drive belongs to the pool now."),
        EventKind("drive_removed", INFO, "A drive does not belong to the pool any more."),
        EventKind(
            "certificate_problem",
            WARNING,
            "Files of TLS or of tokens have become bad, and what was read before is used on; or a certificate is near "
            "its end.",
        ),
        EventKind("pool_silent", ERROR, "The pool has not answered the service itself in time."),
        EventKind("pool_answers", INFO, "It does again."),
        EventKind("probe_changed", None, "What the probe found is another than before: ok, degraded or failing."),
    )
}


def kinds_document() -> str:
    """The table as Markdown."""
    rows = [
        f"| `{kind.name}` | {kind.severity.value if kind.severity else 'by what it is'} | {kind.help} |"
        for kind in EVENT_KINDS.values()
    ]
    return "\n".join(["| kind | severity | meaning |", "|---|---|---|", *rows, ""])
