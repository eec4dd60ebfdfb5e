"""What a drive is told of how long data will live, and how many segments may be open on it because of that.

Lifetime classes are numbered from 0, the shortest-lived, to ``class_count - 1``.
"""

from __future__ import annotations


def placement_handle(lifetime_class: int, *, class_count: int, handle_count: int) -> int | None:
    """The placement handle for writes of a class, on a drive that reports Flexible Data Placement with
    ``handle_count`` handles for the namespace (0: it does not); None where writes should name none.

    Writes that name no handle go to handle 0 (NVM Express base specification, Flexible Data Placement). Where there are
    enough, that one is left to labels and summaries, and each class has its own; where not, classes of neighbouring
    lifetimes share one.
    """
    assert 0 <= lifetime_class < class_count, (lifetime_class, class_count)
    assert handle_count >= 0, handle_count
    if handle_count < 2:
        return None
    if handle_count > class_count:
        return lifetime_class + 1
    return lifetime_class * handle_count // class_count


def most_open_segments(*, class_count: int, handle_count: int) -> int:
    """How many segments may be filled at once on one drive.

    As many as it keeps apart: without handles one, whatever class it is of, since a drive mixes what is written at one
    time, and parts of a superblock that die at different times are moved (docs/device-waf.md). Classes are then kept
    apart by drives.
    """
    assert class_count > 0, class_count
    assert handle_count >= 0, handle_count
    return max(1, min(class_count, handle_count))
