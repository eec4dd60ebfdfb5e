"""What docs/connector.md says of KV events."""

from __future__ import annotations

from meshfusion.host.connector.announcements import HASHES_MAX, QUEUE_MAX

KV_EVENTS = f"""
## KV events

With vLLM's `--kv-events-config '{{"enable_kv_cache_events": true, ...}}'` the connector adds to what the engine
publishes, so that a router can send a request where its KV is. Nothing is to be set here; without that option nothing
is made.

- `BlockStored` when the service has answered that a chunk which this engine saved is visible, never before: one event
  for each chunk, with the engine's own hashes of all its blocks (as `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` has it),
  their tokens, the hash of the block before, block size, LoRA, `extra_keys` and KV group as in the engine's events for
  the same blocks. Of a window or a state only the blocks that are stored are named.
- `BlockRemoved` when the engine learns that they are gone: a chunk failed its proof and is dropped, the service gave it
  a new place, the connector's cache was reset, or the service has another pool.

`medium` is `STORAGE` (vLLM's name for all storage), and `ownership` is `meshfusion`; `locality` is left open.

Removal is best effort: the service reclaims chunks by itself, and an engine hears of that only when it stores the same
chunk again. A router should take these events for hints, and may age them. Chunks that were stored already, by another
engine or before a restart, are not announced. At most {QUEUE_MAX} announcements wait for the engine's next step, more
are counted in `kv_events_dropped`; at most {HASHES_MAX} block hashes stay announced: beyond that the oldest are taken
back.
"""
