"""Which version of MeshFusion is installed here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    try:
        return version("meshfusion")
    except PackageNotFoundError:
        return "unknown"
