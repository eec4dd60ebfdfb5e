"""The kinds of KV: what each is, whether requests can share it, and what of it must be there to resume.

Engines support hundreds of model architectures; the state they keep per layer falls into these twelve kinds, and one
of copies that the engine makes for itself. A kind is told by the exact class of the layer's spec: subclasses call
themselves what their base is and behave otherwise. What a single spec says beyond its class is judged in
:mod:`meshfusion.host.kv.classify`.

Classes and sources: vLLM 0.30 to 0.32, below ``vllm/v1``: kv_cache_interface.py has the specs,
core/single_type_kv_cache_manager.py the managers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Need(Enum):
    """What of a group must be there to resume at a boundary."""

    EVERY_BLOCK = "every block before the boundary"
    LAST_WINDOW = "the blocks of the last window"
    ATTENTION_CHUNK = "the blocks since the attention chunk began"
    STATE = "the state snapshot at exactly the boundary"
    NOTHING = "nothing can be"


@dataclass(frozen=True, slots=True)
class KvKind:
    """One kind.

    ``why``: why requests can share it, or cannot. ``granularity``: what one page holds. ``replication``: which ranks
    hold the same bytes under tensor parallelism. ``page_bytes``: formula of a page's bytes without padding, computed
    by :func:`meshfusion.host.kv.page_size.page_size`. ``unserved``: why this version does not serve a kind that could
    be shared; empty for the others. ``source``: where the engine says so. ``classes``: qualified names of the specs.
    """

    name: str
    what: str
    is_reusable: bool
    why: str
    need: Need
    granularity: str
    replication: str
    page_bytes: str
    source: str
    classes: tuple[str, ...]
    unserved: str = ""

    def __post_init__(self) -> None:
        assert self.is_reusable == (self.need is not Need.NOTHING), self.name
        assert self.is_reusable or not self.unserved, self.name

    @property
    def is_served(self) -> bool:
        return self.is_reusable and not self.unserved


_INTERFACE = "vllm.v1.kv_cache_interface"
_TOKENS = "block_size tokens of one layer"
_BY_HEAD = "split by KV head; replicated where there are more ranks than heads (max_tp_shards)"
_EVERY_RANK = "every rank holds the whole (max_tp_shards is 1)"
_NONE = "none to speak of: never stored"
_HEADS = "num_kv_heads * block_size * (head_size + head_size_v) * itemsize"
_LATENT = "block_size / tokens_per_state * head_size * itemsize, or state_content_bytes per state"


def _interface(*names: str) -> tuple[str, ...]:
    return tuple(f"{_INTERFACE}.{name}" for name in names)


FULL_ATTENTION = KvKind(
    name="full_attention",
    what="keys and values of every token",
    is_reusable=True,
    why="a token's KV depends only on the tokens up to it, and stays as it was written",
    need=Need.EVERY_BLOCK,
    granularity=_TOKENS,
    replication=_BY_HEAD,
    page_bytes=_HEADS,
    source="FullAttentionSpec, FullAttentionManager",
    classes=_interface("FullAttentionSpec"),
)
MLA = KvKind(
    name="mla",
    what="one compressed latent vector per token instead of keys and values; also the keys of a sparse indexer",
    is_reusable=True,
    why="as full attention: the vector of a token depends only on the tokens up to it",
    need=Need.EVERY_BLOCK,
    granularity=_TOKENS,
    replication=_EVERY_RANK,
    page_bytes=_LATENT,
    source="MLAAttentionSpec, FullAttentionManager",
    classes=_interface("MLAAttentionSpec"),
)
SLIDING_WINDOW = KvKind(
    name="sliding_window",
    what="keys and values of the last sliding_window tokens; older blocks are given back while the request runs",
    is_reusable=True,
    why="a token's KV stays as it was written while its block is held, and later tokens read only the window",
    need=Need.LAST_WINDOW,
    granularity=_TOKENS,
    replication=_BY_HEAD,
    page_bytes=_HEADS,
    source="SlidingWindowSpec, SlidingWindowManager",
    classes=_interface("SlidingWindowSpec"),
)
SLIDING_WINDOW_MLA = KvKind(
    name="sliding_window_mla",
    what="latent vectors of the last window; also the running state of a KV compressor",
    is_reusable=True,
    why="as sliding_window; not with bounded replay, where the engine recomputes the window",
    need=Need.LAST_WINDOW,
    granularity=_TOKENS,
    replication=_EVERY_RANK,
    page_bytes=_LATENT,
    source="SlidingWindowMLASpec, SlidingWindowManager",
    classes=_interface("SlidingWindowMLASpec"),
    unserved="no model that has it ran in our end-to-end tests",
)
CHUNKED_LOCAL = KvKind(
    name="chunked_local",
    what="keys and values within the attention chunk of attention_chunk_size tokens that a token lies in",
    is_reusable=True,
    why="a token's KV stays as it was written; tokens read nothing from before their own attention chunk",
    need=Need.ATTENTION_CHUNK,
    granularity=_TOKENS,
    replication=_BY_HEAD,
    page_bytes=_HEADS,
    source="ChunkedLocalAttentionSpec, ChunkedLocalAttentionManager",
    classes=_interface("ChunkedLocalAttentionSpec"),
)
RECURRENT_STATE = KvKind(
    name="recurrent_state",
    what="a state of fixed size that every token changes: Mamba, GDN, KDA, linear attention, short convolution",
    is_reusable=True,
    why="the state is overwritten in place, but in mode align the engine keeps snapshots at boundaries",
    need=Need.STATE,
    granularity="one state of one layer, after exactly the tokens of the boundary",
    replication="split by head; every rank holds the whole where tp_replicated",
    page_bytes="sum over shapes and dtypes of product(shape) * itemsize",
    source="MambaSpec, MambaManager",
    classes=_interface("MambaSpec"),
)
ATTENTION_SINK = KvKind(
    name="attention_sink",
    what="full attention behind sink_len tokens of fixed keys and values that every request shares",
    is_reusable=True,
    why="as full attention",
    need=Need.EVERY_BLOCK,
    granularity=_TOKENS,
    replication=_BY_HEAD,
    page_bytes=_HEADS,
    source="SinkFullAttentionSpec, SinkFullAttentionManager",
    classes=_interface("SinkFullAttentionSpec"),
    unserved="vLLM 0.30 to 0.32 cannot start it: its manager does not take the arguments it is given",
)
REFERENCE_WINDOW = KvKind(
    name="reference_window",
    what="the whole prompt and the last rswa_window generated tokens (R-SWA)",
    is_reusable=True,
    why="of the prompt only: a generated token sees less than the same token in the prompt of the next turn",
    need=Need.EVERY_BLOCK,
    granularity=_TOKENS,
    replication=_BY_HEAD,
    page_bytes=_HEADS,
    source="RSWASpec, RSWAManager",
    classes=_interface("RSWASpec"),
    unserved="block hashes do not tell prompt tokens from generated ones, whose KV differs",
)
CROSS_ATTENTION = KvKind(
    name="cross_attention",
    what="keys and values of the encoder's output, which the decoder reads",
    is_reusable=False,
    why="it belongs to one request's encoder input and corresponds to no prefix of decoder tokens",
    need=Need.NOTHING,
    granularity="block_size encoder positions of one layer",
    replication=_NONE,
    page_bytes=_HEADS,
    source="CrossAttentionSpec, CrossAttentionManager.find_longest_cache_hit",
    classes=_interface("CrossAttentionSpec"),
)
ENCODER_ONLY = KvKind(
    name="encoder_only",
    what="attention in both directions within one pass; the engine keeps no KV of it",
    is_reusable=False,
    why="every token's KV depends on later tokens, and nothing is kept",
    need=Need.NOTHING,
    granularity="nothing",
    replication=_NONE,
    page_bytes=_HEADS,
    source="EncoderOnlyAttentionSpec.max_memory_usage_bytes",
    classes=_interface("EncoderOnlyAttentionSpec"),
)
SCRATCH_RING = KvKind(
    name="scratch_ring",
    what="one ring of raw keys per request: the tokens whose group is still being compressed",
    is_reusable=False,
    why="it is overwritten in place as the request goes on and leaves no snapshot behind",
    need=Need.NOTHING,
    granularity="one ring of one request and layer",
    replication=_NONE,
    page_bytes=_HEADS,
    source="CircularBufferSpec.prefix_cacheable, CircularBufferManager; KpoolTailSpec until 0.31",
    classes=_interface("CircularBufferSpec", "KpoolTailSpec"),
)
HIDDEN_STATE = KvKind(
    name="hidden_state",
    what="hidden states put into pages for another reader (extract_hidden_states); calls itself mla_attention",
    is_reusable=False,
    why="it is a side channel out of the engine, read in the pass that wrote it: no later token attends to it",
    need=Need.NOTHING,
    granularity=_TOKENS,
    replication=_NONE,
    page_bytes=_LATENT,
    source="HiddenStateCacheSpec",
    classes=_interface("HiddenStateCacheSpec"),
)
REPLICA = KvKind(
    name="replica",
    what="pages on the device that copy KV kept in host memory (HiSparse)",
    is_reusable=False,
    why="it holds nothing of its own: the engine rebuilds it from its source group",
    need=Need.NOTHING,
    granularity="page_size bytes of one layer",
    replication=_NONE,
    page_bytes="page_size",
    source="HiSparseHotSpec and HiSparseResidentSpec, v1/hisparse/layout.py",
    classes=_interface("HiSparseHotSpec", "HiSparseResidentSpec"),
)

KINDS = (
    FULL_ATTENTION, MLA, SLIDING_WINDOW, SLIDING_WINDOW_MLA, CHUNKED_LOCAL, RECURRENT_STATE, ATTENTION_SINK,
    REFERENCE_WINDOW, CROSS_ATTENTION, ENCODER_ONLY, SCRATCH_RING, HIDDEN_STATE, REPLICA,
)  # fmt: skip

KIND_BY_CLASS = {name: kind for kind in KINDS for name in kind.classes}

CONTAINER_CLASS = f"{_INTERFACE}.UniformTypeKVCacheSpecs"
"""Holds one spec per layer in ``kv_cache_specs``; each of them has its own kind."""

BASE_CLASSES = frozenset(_interface("KVCacheSpec", "AttentionSpec"))
"""No layer has a spec of these: they are only derived from."""
