"""All that a bundle's bytes depend on, in one value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from meshfusion.dpu.image.bundle import Devices
from meshfusion.tools.image.architecture import ARCHITECTURES, Architecture
from meshfusion.tools.image.bf_cfg_text import CardSettings
from meshfusion.tools.image.lock import Lock, LockedPackage, Target
from meshfusion.tools.image.service_needs import ServiceNeeds
from meshfusion.tools.image.source import Source
from meshfusion.tools.image.spdk import SpdkImage, SpdkPackages

NAME: Final = "meshfusion"
REPOSITORY: Final = "localhost/meshfusion"
_NOT_IN_TAGS: Final = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_TAG_CHARS: Final = 128

Told = Callable[[str, int, int], object]
"""What is done, how many bytes of it, and all of them."""


@dataclass(frozen=True, slots=True)
class Card:
    """What only a bundle for cards has."""

    devices: Devices
    settings: CardSettings
    bfb_sha256: tuple[str, ...] = ()
    nic_firmware: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """``debs``, ``wheels``: with files that have the lock's digests. ``card``: None for servers.
    ``lock_sha256``: of the lock's text."""

    source: Source
    version: str
    lock: Lock
    lock_sha256: str
    target: Target
    debs: tuple[tuple[LockedPackage, Path], ...]
    wheels: tuple[tuple[LockedPackage, Path], ...]
    needs: ServiceNeeds
    card: Card | None = None
    spdk: SpdkPackages | SpdkImage | None = None

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.lock.architecture]

    @property
    def created(self) -> str:
        """RFC 3339, of the commit: two builds of it are the same."""
        return datetime.fromtimestamp(self.source.time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def reference(self) -> str:
        """Of the service's image."""
        return f"{REPOSITORY}:{tag_of(self.version)}"

    @property
    def title(self) -> str:
        return f"{NAME} {self.version}, {self.target}, {self.architecture.machine}"


def tag_of(version: str) -> str:
    """As the OCI distribution specification lets tags be; a version may have a plus."""
    return _NOT_IN_TAGS.sub("-", version)[:_MAX_TAG_CHARS]
