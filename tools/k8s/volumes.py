"""A pod's volumes, each with where it is mounted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshfusion.tools.k8s.names import CONFIG_DIR, CONFIG_KEY, Manifest

_SECRET_MODE = 0o400  # the service refuses keys that others may read


@dataclass(frozen=True, slots=True)
class Volume:
    """``source``: its part of the pod's list of volumes, without the name."""

    name: str
    source: Manifest
    at: PurePosixPath
    is_read_only: bool = False

    @property
    def as_volume(self) -> Manifest:
        return {"name": self.name, **self.source}

    @property
    def as_mount(self) -> Manifest:
        mount: Manifest = {"name": self.name, "mountPath": str(self.at)}
        return {**mount, "readOnly": True} if self.is_read_only else mount


def of_node(name: str, path: PurePosixPath, kind: str, *, is_read_only: bool = False) -> Volume:
    """At the same path as on the node, so that a configuration means the same in a pod and beside it. ``kind``: of
    hostPath."""
    return Volume(name, {"hostPath": {"path": str(path), "type": kind}}, path, is_read_only)


def folders_of_node(folders: Iterable[PurePosixPath]) -> tuple[Volume, ...]:
    return tuple(of_node(f"node-{i}", folder, "DirectoryOrCreate") for i, folder in enumerate(folders))


def scratch(name: str, path: PurePosixPath, *, medium: str | None = None) -> Volume:
    """Empty with each new pod."""
    return Volume(name, {"emptyDir": {} if medium is None else {"medium": medium}}, path)


def settings(config_map: str | None, secret: str | None, files: Iterable[PurePosixPath]) -> Volume:
    """All that lies below ``CONFIG_DIR``: one volume, since Kubernetes cannot mount a Secret inside a ConfigMap.
    ``files``: that the Secret has, each under its name alone."""
    sources: list[Manifest] = []
    if config_map is not None:
        items = [{"key": CONFIG_KEY, "path": CONFIG_KEY}]
        sources.append({"configMap": {"name": config_map, "items": items}})
    listed = [{"key": file.name, "path": str(file.relative_to(CONFIG_DIR))} for file in sorted(set(files))]
    if listed:
        assert secret is not None, "files need a Secret"
        sources.append({"secret": {"name": secret, "items": listed}})
    return Volume("settings", {"projected": {"defaultMode": _SECRET_MODE, "sources": sources}}, CONFIG_DIR, True)
