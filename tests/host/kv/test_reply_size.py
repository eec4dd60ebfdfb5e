"""The longest lookup that a connector asks for gets an answer, whatever the number of ranks."""

from __future__ import annotations

import pytest

from meshfusion.dpu.api import types as api
from meshfusion.dpu.api.codec_match import match_reply_to_pb
from meshfusion.dpu.api.limits import MAX_MESSAGE_BYTES
from meshfusion.host.kv.chunk_form import ChunkForm
from meshfusion.host.kv.resume import GroupPlan, WholePrefix


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ranks", [1, 4, 8, 16])
def test_the_reply_to_the_longest_lookup_fits_a_message(ranks: int, packed: bool) -> None:
    """Llama-70B in bfloat16 on 8 ranks: a block of 16 tokens has 640 KiB on each, a chunk two of them."""
    form = ChunkForm((GroupPlan(0, WholePrefix(), 16, 32),), (640 << 10,), ranks)
    count = form.boundary_max(10_000_000)
    shards = tuple(
        api.Shard(rank, api.Extent(1, 30_000, 1 << 30, 321, 9), 1, 160, 640 << 10, (b"d" * 8,) * 2)
        for rank in range(ranks)
    )
    chunk = api.ChunkRecord(b"k" * 32, b"i" * 32, "default", 0, 1 << 20, 32, shards)
    sample = match_reply_to_pb(api.MatchReply("lease", 1000, (chunk,) * 1000), packed=packed).ByteSize()
    assert count * sample // 1000 < MAX_MESSAGE_BYTES, f"{count} chunks of 32 tokens, {sample / 1000:.0f} bytes each"
