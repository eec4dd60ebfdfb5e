"""Neighbouring chunks' shards on different drives, so that a prefix is read from many drives at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshfusion.jbof.wear.choice import Choice, Obstacle, choose_drive
from meshfusion.jbof.wear.state import DriveState


@dataclass(frozen=True, slots=True)
class Stripe:
    """Drives with an open segment each, for chunks of one lifetime class. ``credits``: for the next choice."""

    choices: tuple[Choice, ...]
    credits: Mapping[str, float]

    @property
    def drive_ids(self) -> tuple[str, ...]:
        return tuple(choice.drive_id for choice in self.choices)


def choose_stripe(
    drives: Sequence[DriveState],
    shares: Mapping[str, float],
    credits: Mapping[str, float],
    *,
    segment_bytes: int,
    most_drives: int,
) -> Stripe | Obstacle:
    """Up to ``most_drives`` different drives for open segments that are filled side by side; fewer if no more can.

    When one of its segments is full, :func:`~meshfusion.jbof.wear.choice.choose_drive` beside the others replaces it.
    Wear can be steered only where a stripe has clearly fewer drives than there are.
    """
    assert most_drives > 0, most_drives
    choices: list[Choice] = []
    while len(choices) < most_drives:
        beside = [choice.drive_id for choice in choices]
        found = choose_drive(drives, shares, credits, segment_bytes=segment_bytes, beside=beside)
        if isinstance(found, Obstacle):
            return found
        if found.drive_id in beside:  # no other drive could take one
            break
        choices.append(found)
        credits = found.credits
    return Stripe(tuple(choices), credits)


def stripe_position(*, start: int, chunk_index: int, shard_index: int, shard_count: int, stripe_width: int) -> int:
    """Which drive of a stripe a shard goes to: any ``stripe_width`` shards that follow each other go to different ones.

    ``chunk_index``: the chunk's place in its prefix. ``start``: some number of the prefix, the same for all its chunks
    (such as from its first key): else the first chunks of all prefixes would meet on one drive.
    """
    assert 0 <= shard_index < shard_count, (shard_index, shard_count)
    assert stripe_width > 0, stripe_width
    return (start + chunk_index * shard_count + shard_index) % stripe_width
