"""Several pools in one configuration: that they are apart, and whose each is. Read from the raw data, so that it is
told along with what the model rejects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import AfterValidator

from meshfusion.dpu.api.tenant import DEFAULT_TENANT, check_name
from meshfusion.dpu.encryption.note import read_note
from meshfusion.dpu.pool_dir import PoolLayout
from meshfusion.dpu.pool_drives import find_drives
from meshfusion.dpu.slices import block_devices_under
from meshfusion.dpu.yaml_document import FieldPath
from meshfusion.jbof.errors import FieldValueError, MeshFusionError

MAX_TENANTS: Final = 1024  # of one pool
MAX_POOLS: Final = 256  # each has threads, an index and files of its own
TenantName = Annotated[str, AfterValidator(check_name)]

_Problem = tuple[tuple[str, ...], object, str, str]  # field, value, problem, fix


def value_at(data: Any, at: tuple[str, ...]) -> Any:
    """None where there is none."""
    for name in at:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def pools_of(data: Any) -> list[tuple[str, ...]]:
    """Where each pool's mapping stands, if it is one."""
    pools = value_at(data, ("pools",))
    names = [name for name in pools if isinstance(name, str)] if isinstance(pools, dict) else []
    found = [("pool",), *(("pools", name, "pool") for name in names)]
    return [at for at in found if isinstance(value_at(data, at), dict)]


def tenants_of(data: Any, at: tuple[str, ...]) -> frozenset[str]:
    """Of the pool whose mapping stands ``at``."""
    if at[0] == "pool":
        return frozenset({DEFAULT_TENANT})
    listed = value_at(data, (*at[:-1], "tenants"))
    return frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else frozenset()


def pools_problems(data: Any, meant: frozenset[FieldPath], *, closely: bool) -> Iterator[_Problem]:
    """``(field, value, problem, fix)`` of each. ``meant``: keys that misspelt ones stand for. ``closely``: also what
    drives the pools have that exist."""
    pools = data.get("pools")
    if pools is None:
        if "pool" in data and data["pool"] is None:  # in YAML, with nothing but comments below it
            yield ("pool", "path"), None, "is missing", "add path: /var/lib/meshfusion/pool"
        elif "pool" not in data and not meant & {("pool",), ("pools",)}:
            yield ("pool",), None, "is missing", "add pool: {path: /var/lib/meshfusion/pool}, or pools for several"
        return
    for name, instead in (("pool", "pool"), ("medium", "medium")):
        if data.get(name) is not None:
            fix = f"remove one of them; each pool's stands in pools.NAME.{instead}"
            yield (name,), None, "stands beside pools", fix
    yield from _bdev_problems(data, pools)
    yield from _limit_problems(data, pools)
    if isinstance(pools, dict):
        if not 1 <= len(pools) <= MAX_POOLS:
            yield ("pools",), None, f"has {len(pools)} pools", f"name 1 to {MAX_POOLS}"
        yield from _problems_beside_several(data, meant)
        yield from _name_problems(pools)
        yield from _tenant_problems(pools)
        yield from _place_problems(data, closely=closely)


def _problems_beside_several(data: Any, meant: frozenset[FieldPath]) -> Iterator[_Problem]:
    """What a service has of its one pool, and has to be told with several."""
    audit = data.get("audit")
    is_told = bool(audit) and not isinstance(audit, dict)
    if value_at(data, ("audit", "path")) is None and not is_told and not meant & {("audit",), ("audit", "path")}:
        problem = "is missing: with pools, none of their directories is the place for the service's audit log"
        yield ("audit", "path"), None, problem, "add audit: {path: /var/log/meshfusion/audit.log}"


def _name_problems(pools: Mapping[Any, Any]) -> Iterator[_Problem]:
    for name in pools:
        try:
            check_name(str(name))
        except FieldValueError as error:
            yield ("pools", str(name)), None, error.problem, error.fix


def _tenant_problems(pools: Mapping[Any, Any]) -> Iterator[_Problem]:
    owners: dict[str, str] = {}
    for name, one in pools.items():
        listed = one.get("tenants") if isinstance(one, dict) else None
        for tenant in listed if isinstance(listed, list) else ():
            if not isinstance(tenant, str):
                continue  # which the model tells
            if tenant in owners:
                where = "this pool" if owners[tenant] == name else f"pools.{owners[tenant]}"
                fix = "name each tenant once: an engine's chunks lie in one pool"
                yield ("pools", str(name), "tenants"), tenant, f"is a tenant of {where} already", fix
            owners.setdefault(tenant, str(name))


def _bdev_problems(data: Any, pools: Any) -> Iterator[_Problem]:
    """A bdev, as a backing of two pools' namespaces, would show each what is the other's."""
    spdk = value_at(data, ("exports", "spdk"))
    for field in ("bdev", "bdevs"):
        if isinstance(spdk, dict) and spdk.get(field):
            fix = "name those of each pool: pools.NAME.bdevs"
            yield ("exports", "spdk", field), spdk[field], "does not tell which pool's drives it means", fix
    owners: dict[str, str] = {}
    for name, one in pools.items() if isinstance(pools, dict) else ():
        bdevs = one.get("bdevs") if isinstance(one, dict) else None
        at = ("pools", str(name), "bdevs")
        if bdevs and not isinstance(spdk, dict):
            yield at, bdevs, "are for target: spdk", "remove them, or add exports with target: spdk"
        named = [bdev for bdev in bdevs.values() if isinstance(bdev, str)] if isinstance(bdevs, dict) else []
        for bdev in sorted(set(named)):
            if named.count(bdev) > 1:
                yield at, bdev, "is named twice", "name one for each drive"
            if owners.setdefault(bdev, str(name)) != str(name):
                yield at, bdev, f"is a bdev of pools.{owners[bdev]}, too", "name one for each drive of each pool"


def _limit_problems(data: Any, pools: Any) -> Iterator[_Problem]:
    if value_at(data, ("exports", "target")) == "spdk":
        return
    for name, one in pools.items() if isinstance(pools, dict) else ():
        limits = one.get("limits") if isinstance(one, dict) else None
        if isinstance(limits, dict) and any(value is not None for value in limits.values()):
            problem = "need an SPDK: neither the kernel's target nor local access can limit how fast hosts are"
            yield ("pools", str(name), "limits"), None, problem, "remove them, or use exports with target: spdk"


# ---- places ------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """``things``: what is at it or under it, each as something that compares equal by whatever path it is reached."""

    at: tuple[str, ...]
    path: Path
    itself: object
    things: frozenset[object]


def _place_problems(data: Any, *, closely: bool) -> Iterator[_Problem]:
    """Two pools in one directory, or on one file or device, or one on a device that another one's slice is of."""
    several = [at for at in pools_of(data) if at[0] == "pools"]
    places = [place for at in several for place in _places(data, at, closely=closely)]
    for i, place in enumerate(places):
        for other in places[:i]:
            if place.at[1] == other.at[1] or not (place.itself in other.things or other.itself in place.things):
                continue
            is_same = place.itself == other.itself
            how = "is" if is_same and place.path == other.path else "is the same as" if is_same else "overlaps"
            what = f"{how} {'that' if how == 'is' else other.path} of pools.{other.at[1]}"
            yield place.at, str(place.path), what, "give each pool a directory and drives of its own"
            break


def _places(data: Any, at: tuple[str, ...], *, closely: bool) -> Iterator[_Place]:
    pool = value_at(data, at)
    path = pool.get("path")
    if _is_absolute(path):
        directory = _identity(Path(path))
        yield _Place((*at, "path"), Path(path), directory, frozenset({directory}))
    configured = pool.get("data_path")
    listed = configured if isinstance(configured, list) else [configured]
    paths = [Path(each) for each in listed if _is_absolute(each)]
    for data_path in paths:
        yield _of_data((*at, "data_path"), data_path)
    if closely and _is_absolute(path):
        for data_path in _drives_of(Path(path)) - set(paths):
            yield _of_data((*at, "path"), data_path)


def _of_data(at: tuple[str, ...], path: Path) -> _Place:
    identity = _identity(path)
    return _Place(at, path, identity, frozenset({identity, *block_devices_under(path)}))


def _identity(path: Path) -> object:
    """Equal for one file, directory or device, by whatever path it is reached."""
    try:
        found = path.stat()
    except OSError:
        return path.resolve()
    if path.is_block_device():
        return f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return (found.st_dev, found.st_ino)


def _drives_of(path: Path) -> set[Path]:
    """Of the pool there, if there is one that can be read, and what they are encrypted on; what is wrong with it is
    told elsewhere."""
    drives: set[Path] = set()
    with contextlib.suppress(MeshFusionError, OSError):
        note = read_note(PoolLayout(path))
        drives = set() if note is None else {one.device for one in note.slices}
        drives |= set(find_drives(PoolLayout(path)).paths)
    return drives


def _is_absolute(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value
