"""What the load on paths in a guest makes of a medium: each kind of wrong block is seen."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lab.mixed_load import (
    DEVICE_MIB,
    LBA_BYTES,
    READ_LBAS,
    TRANSFER_LBAS,
    UNWRITTEN,
    Place,
    Words,
    stamp,
    wrong_blocks,
)

BLOCKS = (DEVICE_MIB << 20) // LBA_BYTES
CERTAIN, DOUBTFUL = Place(READ_LBAS, (5,)), Place(READ_LBAS + TRANSFER_LBAS, (2, 6))
PLACES = (CERTAIN, DOUBTFUL, *UNWRITTEN[2:])


def medium() -> Words:
    """With one block of the write in doubt."""
    words = stamp(0, BLOCKS, 0).reshape(BLOCKS, -1)
    for place in (CERTAIN, DOUBTFUL):
        words[place.lba : place.lba + TRANSFER_LBAS] = _stamped(place.lba, TRANSFER_LBAS, place.attempts[0])
    words[DOUBTFUL.lba + 1] = _stamped(DOUBTFUL.lba + 1, 1, 6)
    return words


def _stamped(lba: int, lba_count: int, attempt: int) -> Words:
    return stamp(lba, lba_count, attempt).reshape(lba_count, -1)


def test_every_word_is_told_from_every_other() -> None:
    words = np.concatenate([stamp(0, 4, 0), stamp(4, 2, 0), stamp(0, 4, 1), stamp(BLOCKS - 1, 1, 0xFFFFFF)])
    assert len(set(words.tolist())) == len(words) == 11 * LBA_BYTES // 8


def test_what_was_written_is_right() -> None:
    assert wrong_blocks(medium().ravel(), PLACES) == {"foreign": 0, "lost": 0}


@pytest.mark.parametrize(
    ("lba", "source", "lost"),
    [
        (0, _stamped(0, 1, 5), 0),  # a write among what is only read
        (3, _stamped(4, 1, 0), 0),  # a block in place of another
        (CERTAIN.lba, _stamped(CERTAIN.lba, 1, 0), 1),  # a write that was reported is not there
        (CERTAIN.lba + 2, _stamped(CERTAIN.lba + 2, 1, 4), 1),  # an older one landed over it
        (CERTAIN.lba + 2, _stamped(DOUBTFUL.lba + 2, 1, 6), 1),  # one in doubt landed elsewhere
        (DOUBTFUL.lba, _stamped(DOUBTFUL.lba, 1, 3), 0),  # neither what was there nor what was in doubt
        (DOUBTFUL.lba, np.full((1, LBA_BYTES // 8), 0xA5A5A5A5A5A5A5A5, np.uint64), 0),  # memory that was given back
    ],
)
def test_a_wrong_block_is_seen(lba: int, source: Words, lost: int) -> None:
    words = medium()
    words[lba] = source
    assert wrong_blocks(words.ravel(), PLACES) == {"foreign": 1, "lost": lost}


def test_a_torn_block_is_seen() -> None:
    words = medium()
    words[DOUBTFUL.lba, 256:] = _stamped(DOUBTFUL.lba, 1, 6)[0, 256:]
    assert wrong_blocks(words.ravel(), PLACES) == {"foreign": 1, "lost": 0}
