"""Where ``mfctl image`` finds the repository, and where it keeps packages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from meshfusion.tools.image.errors import BuildError

CACHE_VARIABLE: Final = "MESHFUSION_IMAGE_CACHE"


def checkout(named: Path | None) -> Path:
    """Raises BuildError where mfctl runs from no checkout and none is named."""
    root = Path(__file__).resolve().parents[2] if named is None else named.absolute()
    if not (root / "pyproject.toml").exists():
        where = "mfctl runs from an installed package" if named is None else f"{root} is no checkout of MeshFusion"
        raise BuildError(f"--source: {where}", next_step="Name a checkout of the repository: --source FOLDER")
    return root


def cache_folder(named: Path | None, root: Path) -> Path:
    chosen = named or os.environ.get(CACHE_VARIABLE)
    return Path(chosen).absolute() if chosen else root / ".cache" / "image"
