"""Runs a pattern on a drive until its write amplification is steady, and tells what it is then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshfusion.tools.ftl.device import FlashDrive


class Writer(Protocol):
    """A pattern on its way. ``payload_pages``: what was asked to be kept, without what a file system adds."""

    payload_pages: int

    def write(self, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Amplification:
    """``device``: flash pages for each host page, over the measured part; ``earlier``: over the same length before it,
    which tells whether it was steady. ``total``: flash pages for each page of payload."""

    device: float
    earlier: float
    total: float


def measure(writer: Writer, drive: FlashDrive, *, warm_drive_writes: float, drive_writes: float) -> Amplification:
    """Write the drive ``warm_drive_writes`` times over, then twice ``drive_writes`` times; the last is measured."""
    pages = drive.geometry.logical_pages
    _write_until(writer, drive, round(pages * warm_drive_writes))
    start = drive.counters()
    _write_until(writer, drive, start.host_pages + round(pages * drive_writes))
    middle, payload_pages = drive.counters(), writer.payload_pages
    _write_until(writer, drive, middle.host_pages + round(pages * drive_writes))
    seen = drive.counters() - middle
    written = seen.host_pages + seen.moved_pages
    return Amplification(
        device=seen.write_amplification,
        earlier=(middle - start).write_amplification,
        total=written / (writer.payload_pages - payload_pages),
    )


def _write_until(writer: Writer, drive: FlashDrive, host_pages: int) -> None:
    while drive.counters().host_pages < host_pages:
        writer.write(64)
