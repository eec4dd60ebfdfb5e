"""Where the lab keeps things on the host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE_VARIABLE = "MESHFUSION_LAB_CACHE"


def default_cache() -> Path:
    """``.cache/lab`` of the project; in the user's cache when the package is installed without the project."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    if (ROOT / "pyproject.toml").exists():
        return ROOT / ".cache" / "lab"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshfusion" / "lab"


@dataclass(frozen=True, slots=True)
class Places:
    """Folders under one cache folder."""

    cache: Path

    @property
    def uml(self) -> Path:
        return self.cache / "uml"

    @property
    def tcg(self) -> Path:
        return self.cache / "tcg"

    @property
    def vdpu(self) -> Path:
        """The virtual DPU's system."""
        return self.cache / "vdpu"

    @property
    def guest(self) -> Path:
        """State of the guest in the background."""
        return self.cache / "guest"
