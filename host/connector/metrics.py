"""What the connector counts. One table: the engine's log line, its Prometheus endpoint and the docs come from it."""

from __future__ import annotations

from collections.abc import Iterator

from meshfusion.host.connector.off_note import WHY_OFF_TEXT
from meshfusion.host.path.path_kind import PathKind

METRIC_PREFIX = "vllm:meshfusion_"


def _descriptors() -> Iterator[tuple[str, str]]:
    """Their quotient says how well the engine's layout suits: see docs/paths.md."""
    for kind in PathKind:
        on = f"on path {kind.value}"
        piece = "pieces of KV memory, each with its place on the medium"
        yield f"load_descriptors_{kind.value}", f"Descriptors ({piece}) of loads that came whole {on}"
        yield f"load_chunks_{kind.value}", f"Chunks, or parts of one, of these loads {on}, on each rank"
        yield f"load_bytes_{kind.value}", f"Bytes of these loads {on}, of all ranks together"
        yield f"save_descriptors_{kind.value}", f"Descriptors ({piece}) of chunks written {on}"
        yield f"save_chunks_{kind.value}", f"Chunks written {on}, on each rank, whatever the service said to them"
        yield f"save_bytes_{kind.value}", f"Bytes of these chunks {on}, of all ranks together"


# The way of a request's tokens through the cache, in order: no stage counts more than the one before it.
FUNNEL: dict[str, str] = {
    "tokens_looked_up": "Funnel, 1: tokens in whole chunks that the pool was asked for, with each lookup",
    "tokens_matched": "Funnel, 2: tokens that the pool answered it has, from the start of the request",
    "tokens_leased": "Funnel, 3: matched tokens whose answer came in time, held for the request by a lease",
    "tokens_admitted": "Funnel, 4: leased tokens that the engine lacked and allotted blocks for: loads started",
    "tokens_loaded": "Funnel, 5: admitted tokens before the first block that did not come",
    "tokens_verified": "Funnel, 6: loaded tokens before the first block whose bytes did not match their digest",
    "tokens_used": "Funnel, 7: verified tokens from which a request can go on; 0 of a load that is of use only whole",
}

# Name -> what it counts.
METRICS: dict[str, str] = {
    "lookups": "Lookups of a request's chunks in the pool",
    "lookup_hits": "Lookups answered with at least one chunk",
    "lookups_timed_out": "Lookups that did not answer within the deadline and counted as a miss",
    "lookups_without_path": "Requests not matched because a worker had no open path to the data",
    "promises_lost": "Promises whose lease the service no longer knew",
    "promises_too_old": "Promises given back because the request was not scheduled for too long",
    "loads_not_worth": "Hits not loaded because recomputing was estimated to be faster",
    "loads_started": "Loads started",
    "loads_failed": "Loads of which at least one block failed and was recomputed",
    "loaded_blocks": "Blocks loaded and proven, on all ranks",
    "loaded_bytes": "Bytes loaded and proven, of all ranks together",
    "load_us": "Microseconds from the start to the end of loads on their slowest rank, added up",
    "failed_blocks": "Blocks that did not load on some rank and were recomputed",
    "digest_mismatches": "Blocks whose bytes did not match their digest, on each rank",
    "saves_asked": "Chunks offered to the pool",
    "saves_granted": "Chunks for which the pool gave a place",
    "saves_existing": "Chunks that were stored already",
    "saves_busy": "Chunks that another writer was storing",
    "saves_no_space": "Chunks for which the pool had no space",
    "saves_declined": "Chunks that the pool did not find worth a write",
    "saves_dropped_queue_full": "Chunks not offered because too many saves were under way",
    "saves_dropped_service": "Chunks not saved because the service could not be asked",
    "saves_failed": "Chunks that could not be written",
    "save_pauses": "Times that nothing was offered for a while, because nothing of the last runs could be written",
    "saves_in_doubt": "Chunks whose write may still land: their place is withheld until the target has fenced us",
    "saves_repeated": "Chunks written once more, elsewhere, because their first write was in doubt",
    "saved_bytes": "Bytes written to the pool, of all ranks together",
    "chunks_committed": "Chunks made visible to other engines",
    "commits_refused": "Chunks written but refused by the service (their grant had expired, or the service restarted)",
    "kv_events_stored": "Chunks announced as stored, where the engine publishes KV events",
    "kv_events_removed": "Removals announced, of blocks that are gone, may be gone, or are too many to be remembered",
    "kv_events_dropped": "Chunks not announced because too many announcements were waiting",
    **dict(_descriptors()),
    **FUNNEL,
    **{
        f"without_cache_{why.value}": f"1 where an engine serves without its cache: {t}"
        for why, t in WHY_OFF_TEXT.items()
    },
    "audits_started": "Hits answered as misses, to compare what is stored with what is computed",
    "audits_without_verdict": "Audits that came to nothing: the request ended, or blocks could not be had or read",
    "audited_blocks": "Blocks compared with what was computed anew, on each rank",
    "audit_alarms": "Audits that found a block that differs by more than the engine varies",
    "lookups_distrusted": "Requests not matched because of too many audit alarms",
}

# Name -> what it measures. They only rise, so that what is added adds up as with counts.
GAUGES: dict[str, str] = {
    "audit_drift_max": "Largest difference of stored and computed KV so far, as a part of the largest number of a page",
    "audit_variation_max": "Likewise of two computations of the same KV: what this engine varies by itself",
}

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Name -> what each observation is. All are in seconds, with the buckets above.
HISTOGRAMS: dict[str, str] = {
    "lookup_seconds": "Seconds from a lookup to its answer, also of one that came too late",
    "load_seconds": "Seconds from the start to the end of a load, failed or not, on its slowest rank",
    "save_seconds": "Seconds from the step that computed chunks to the end of their write on all ranks",
}
