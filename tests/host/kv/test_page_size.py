"""The formulas against the engine's own numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from meshfusion.host.kv.kinds import KIND_BY_CLASS
from meshfusion.host.kv.page_size import PageSize, page_size
from tests.host.kv.spec_classes import spec_classes
from tests.host.kv.spec_instances import DTYPES, make_spec

ATTENTION = sorted(
    short
    for short in (name.rpartition(".")[2] for name in set(KIND_BY_CLASS) & set(spec_classes()))
    if short != "MambaSpec" and not short.startswith("HiSparse")
)
SMALL = st.integers(1, 8)


@given(st.sampled_from(ATTENTION), st.data())
def test_pages_of_tokens(name: str, data: st.DataObject) -> None:
    fields: dict[str, Any] = {
        "block_size": data.draw(st.sampled_from([16, 64, 256])),
        "num_kv_heads": data.draw(SMALL),
        "head_size": data.draw(st.integers(1, 300)),
        "dtype": data.draw(st.sampled_from(DTYPES)),
        "tokens_per_state": data.draw(st.sampled_from([1, 4, 16, Fraction(1, 4)])),
        "num_head_slots": data.draw(st.none() | SMALL),
        "state_content_bytes": data.draw(st.none() | st.integers(1, 700)),
    }
    if "MLA" in name or name == "HiddenStateCacheSpec":
        fields["alignment"] = data.draw(st.sampled_from([None, 512, 576]))
    elif data.draw(st.booleans()):
        fields["head_size_v"] = data.draw(st.integers(1, 300))
    spec = make_spec(name, **fields)
    assert page_size(spec) == PageSize(spec.unpadded_page_size_bytes, spec.page_size_bytes)
    assert page_size(spec).real_bytes == spec.real_page_size_bytes


@given(st.data())
def test_pages_of_a_state(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(SMALL, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    spec = make_spec("MambaSpec", shapes=tuple(shapes), dtypes=tuple(dtypes))
    assert page_size(spec) == PageSize(spec.state_content_size_bytes, spec.page_size_bytes)
    padded_bytes = data.draw(st.integers(1, 1 << 20))
    assume(padded_bytes >= spec.page_size_bytes)
    padded = make_spec("MambaSpec", shapes=tuple(shapes), dtypes=tuple(dtypes), page_size_padded=padded_bytes)
    assert page_size(padded) == PageSize(padded.state_content_size_bytes, padded.page_size_bytes)


def test_pages_of_replicas() -> None:
    for name in ("HiSparseHotSpec", "HiSparseResidentSpec"):
        spec = make_spec(name, page_size=12345)
        assert page_size(spec) == PageSize(12345, spec.page_size_bytes)


def test_by_hand() -> None:
    """2 heads of 16 + 16 values of 2 bytes for 16 tokens; a latent of 576 values; 12 values of 2 and 10 of 4 bytes."""
    assert page_size(make_spec("FullAttentionSpec")).real_bytes == 2048
    assert page_size(make_spec("MLAAttentionSpec", num_kv_heads=1, head_size=576)).real_bytes == 16 * 576 * 2
    assert page_size(make_spec("MambaSpec")).real_bytes == 64
