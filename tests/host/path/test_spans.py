"""What is read together: each unit once, in order, where it lies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.path.spans import GAP_PARTS, Span, spans_of


@given(
    steps=st.lists(st.sampled_from([16, 16, 16, 17, 17, 18, 19, 40, -60, 1, 0]), max_size=40),
    read_lbas=st.integers(1, 120),
)
def test_spans_cover_each_unit_once_where_it_lies(steps: list[int], read_lbas: int) -> None:
    lbas = [1000]
    for step in steps:
        lbas.append(lbas[-1] + step)
    spans = spans_of(lbas, unit_lbas=16, read_lbas=read_lbas)
    covered = []
    for span in spans:
        assert span.unit_count >= 1
        assert span.lba_count == (span.unit_count - 1) * span.stride_lbas + 16
        assert span.lba_count <= max(16, read_lbas)
        assert 16 <= span.stride_lbas <= 16 + 16 // GAP_PARTS, "units never overlap in staging, gaps stay small"
        covered += [(span.first + i, span.lba + i * span.stride_lbas) for i in range(span.unit_count)]
    assert covered == list(enumerate(lbas))


def test_neighbours_and_neighbours_behind_headers_are_read_together() -> None:
    assert spans_of([5, 21, 37], unit_lbas=16, read_lbas=64) == [Span(0, 3, 5, 16, 48)]
    assert spans_of([5, 22, 39], unit_lbas=16, read_lbas=64) == [Span(0, 3, 5, 17, 50)]
    assert spans_of([5, 22, 38], unit_lbas=16, read_lbas=64) == [Span(0, 2, 5, 17, 33), Span(2, 1, 38, 16, 16)]
    assert spans_of([5, 21, 37], unit_lbas=16, read_lbas=40) == [Span(0, 2, 5, 16, 32), Span(2, 1, 37, 16, 16)]
    assert spans_of([5, 6], unit_lbas=1, read_lbas=1) == [Span(0, 1, 5, 1, 1), Span(1, 1, 6, 1, 1)]
    assert spans_of([], unit_lbas=16, read_lbas=64) == []
