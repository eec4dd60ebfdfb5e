"""A model's chunks against sums by hand. The engine's own description is in tests/tools/plan/test_real_models.py."""

from __future__ import annotations

import pytest

from meshfusion.host.kv.resume import LastWindow, LocalChunk, ResumeRule, StateAtBoundary, WholePrefix
from meshfusion.jbof.errors import ConfigError, UnsupportedError
from meshfusion.tools.model_kv import GroupKv, LayerKv, ModelKv
from meshfusion.tools.plan import model_form
from meshfusion.tools.plan.model_form import form_of_bytes, form_of_model

MIB = 1 << 20


def group(
    rule: ResumeRule | None, *, layers: int, block_tokens: int, page_bytes: int, ranks_per_shard: int = 1
) -> GroupKv:
    layer = LayerKv("Spec", "kind", layers, "a", "", block_tokens, page_bytes, page_bytes, 0, False)
    return GroupKv((layer,), () if rule else ("unknown; leave it",), rule, ranks_per_shard)


def model(*groups: GroupKv) -> ModelKv:
    return ModelKv("0.32.0", "cpu", groups, 1, 1, (), 0.0)


def test_full_attention_by_hand() -> None:
    """32 layers of 8 heads of 128, keys and values in 16 bits: 131,072 bytes a token. In blocks of 16 tokens that is
    2 MiB a block, which is a chunk already: 16 units of its own 4096-byte blocks and one for the header."""
    form = form_of_model(
        model(group(WholePrefix(), layers=32, block_tokens=16, page_bytes=16 * 2 * 8 * 128 * 2)),
        rank_count=1,
        chunk_min_bytes=MIB,
    )
    assert form.chunk_tokens == 16
    assert model_form.payload_bytes_of_chunk(form) == 2 * MIB == 16 * 131_072
    assert model_form.medium_bytes_of_chunk(form) == 2 * MIB + 4096
    assert model_form.shards_of_chunk(form) == model_form.records_of_chunk(form) == 1
    assert model_form.loaded_bytes(form, 1600) == 1600 * 131_072
    assert model_form.loaded_bytes(form, 1601) == 1616 * 131_072, "a chunk that is begun is loaded whole"
    assert model_form.loaded_bytes(form, 0) == 0


def test_bytes_given_are_the_same_as_a_model_that_has_them() -> None:
    of_model = form_of_model(
        model(group(WholePrefix(), layers=4, block_tokens=16, page_bytes=4096)), rank_count=2, chunk_min_bytes=MIB
    )
    of_bytes = form_of_bytes(2 * 4 * 256, block_tokens=16, rank_count=2, is_replicated=False, chunk_min_bytes=MIB)
    assert of_bytes == of_model


def test_what_ranks_hold_alike_is_stored_once_and_read_by_each() -> None:
    """DeepSeek's latent: 576 numbers of 2 bytes in 61 layers, 70,272 bytes a token, on eight ranks."""
    form = form_of_bytes(61 * 576 * 2, block_tokens=64, rank_count=8, is_replicated=True, chunk_min_bytes=MIB)
    assert form.chunk_tokens == 64
    assert model_form.shards_of_chunk(form) == 1
    assert model_form.payload_bytes_of_chunk(form) == 64 * 70_272
    assert model_form.loaded_bytes_of_rank(form, 640) == 640 * 70_272
    assert model_form.loaded_bytes(form, 640) == 8 * 640 * 70_272


def test_shards_of_ranks_are_chunks_of_enough_bytes_on_each() -> None:
    """131,072 bytes a token on 8 ranks: 16,384 each; 64 tokens make a MiB on each of them."""
    form = form_of_bytes(131_072, block_tokens=16, rank_count=8, is_replicated=False, chunk_min_bytes=MIB)
    assert form.chunk_tokens == 64
    assert model_form.shards_of_chunk(form) == 8
    assert model_form.payload_bytes_of_chunk(form) == 8 * MIB
    assert model_form.medium_bytes_of_chunk(form) == 8 * (MIB + 4096)


def test_bytes_that_do_not_divide_by_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not divide by 7") as found:
        form_of_bytes(1000, block_tokens=16, rank_count=7, is_replicated=False, chunk_min_bytes=MIB)
    assert "--replicated" in found.value.next_step


def test_a_window_is_stored_with_every_chunk_and_loaded_once() -> None:
    """Full attention of a MiB and a window of 4 KiB, each in blocks of 16 tokens; chunks of 16 tokens. A boundary needs
    the blocks that hold the last 99 tokens: 7 of them, as the window begins inside of one."""
    form = form_of_model(
        model(
            group(WholePrefix(), layers=1, block_tokens=16, page_bytes=MIB),
            group(LastWindow(100), layers=1, block_tokens=16, page_bytes=4096),
        ),
        rank_count=1,
        chunk_min_bytes=MIB,
    )
    assert form.chunk_tokens == 16
    assert model_form.payload_bytes_of_chunk(form) == MIB + 4096
    assert model_form.records_of_chunk(form) == 2
    assert model_form.loaded_bytes(form, 1600) == 100 * MIB + 7 * 4096
    assert model_form.loaded_bytes(form, 32) == 2 * MIB + 2 * 4096


def test_a_window_shorter_than_a_chunk_is_stored_in_part() -> None:
    """Chunks of 64 tokens, four blocks; a window of 17 tokens needs 16 before a boundary: one block of the four."""
    form = form_of_model(
        model(
            group(WholePrefix(), layers=1, block_tokens=16, page_bytes=MIB // 4),
            group(LastWindow(17), layers=1, block_tokens=16, page_bytes=4096),
        ),
        rank_count=1,
        chunk_min_bytes=MIB,
    )
    assert form.chunk_tokens == 64
    assert model_form.payload_bytes_of_chunk(form) == MIB + 4096


def test_local_attention_stores_nothing_of_the_chunk_that_ends_with_it() -> None:
    """An attention chunk of 64 tokens is four chunks of 16: at its end nothing of it is needed, so the last of the four
    is not stored: on the average three quarters of them."""
    form = form_of_model(
        model(
            group(WholePrefix(), layers=1, block_tokens=16, page_bytes=MIB),
            group(LocalChunk(64), layers=1, block_tokens=16, page_bytes=4096),
        ),
        rank_count=1,
        chunk_min_bytes=MIB,
    )
    assert model_form.payload_bytes_of_chunk(form) == MIB + 0.75 * 4096
    assert model_form.records_of_chunk(form) == 1.75
    assert model_form.shards_of_chunk(form) == 1.75


def test_states_keep_chunks_short_and_are_loaded_once() -> None:
    form = form_of_model(
        model(
            group(StateAtBoundary(), layers=3, block_tokens=160, page_bytes=68_608),
            group(WholePrefix(), layers=1, block_tokens=160, page_bytes=81_920),
        ),
        rank_count=1,
        chunk_min_bytes=MIB,
    )
    assert form.chunk_tokens == 160
    assert model_form.payload_bytes_of_chunk(form) == 3 * 68_608 + 81_920
    assert model_form.loaded_bytes(form, 960) == 3 * 68_608 + 6 * 81_920
    # 205,824 bytes are 50.25 blocks of 4096, 81,920 are 20; each shard has a header's block.
    assert model_form.medium_bytes_of_chunk(form) == (51 + 1 + 20 + 1) * 4096
    assert model_form.largest_shard_bytes(form) == 52 * 4096


def test_a_group_that_is_not_served_is_refused_with_its_reason() -> None:
    with pytest.raises(UnsupportedError, match="KV group 0 is not served: unknown; leave it") as found:
        form_of_model(model(group(None, layers=1, block_tokens=16, page_bytes=16)), rank_count=1, chunk_min_bytes=MIB)
    assert "mfctl kinds --model" in found.value.next_step


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="keeps no KV"):
        form_of_model(model(), rank_count=1, chunk_min_bytes=MIB)
