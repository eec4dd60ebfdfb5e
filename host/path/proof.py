"""Rule 4 on the destination: what a block now holds against the digest it was written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshfusion.host.path.load_job import UnitFailure, UnitRead

IsDigestRight = Callable[[bytes, bytes], bool]


def outcomes_of(
    units: Sequence[UnitRead], first: int, digests: Sequence[bytes], is_digest_right: IsDigestRight
) -> list[UnitFailure | None]:
    """For each unit None, or how it failed; ``first`` is the number of the first of them in its job."""
    return [
        None
        if is_digest_right(got, unit.digest)
        else UnitFailure(first + i, True, f"digest {got.hex()} at lba {unit.lba}, expected {unit.digest.hex()}")
        for i, (unit, got) in enumerate(zip(units, digests, strict=True))
    ]
