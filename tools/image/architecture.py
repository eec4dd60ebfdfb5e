"""The architectures that bundles are built for, and what each is called where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PYTHON: Final = "3.11"
"""Python of :data:`SUITE`; wheels are for its ABI."""
SUITE: Final = "bookworm"
DISTRIBUTION: Final = "Debian"
_GLIBC_MINOR: Final = 36  # of SUITE: wheels for newer ones would not load


@dataclass(frozen=True, slots=True)
class Architecture:
    """``debian``: as Debian and OCI call it; ``machine``: as ``uname -m`` does; ``oldest_glibc_minor``: of manylinux
    tags for it (PEP 599, PEP 600). ``links``: of a merged /usr."""

    debian: str
    machine: str
    variant: str
    oldest_glibc_minor: int
    elf_machine: int
    links: tuple[str, ...]

    @property
    def wheel_platforms(self) -> tuple[str, ...]:
        """Tags of wheels that load here, the newest first."""
        minors = range(_GLIBC_MINOR, self.oldest_glibc_minor - 1, -1)
        return (*(f"manylinux_2_{minor}_{self.machine}" for minor in minors), f"manylinux2014_{self.machine}")


ARCHITECTURES: Final = {
    "arm64": Architecture("arm64", "aarch64", "v8", 17, 183, ("bin", "lib", "sbin")),
    "amd64": Architecture("amd64", "x86_64", "", 5, 62, ("bin", "lib", "lib64", "sbin")),
}
