"""What the machine has against a configuration. Read from the raw data, so that it is told along with what the model
rejects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from meshfusion.dpu.api.address import UnixAddress
from meshfusion.dpu.budgets import budget_problem
from meshfusion.dpu.config_access import access_problems, addresses_of
from meshfusion.dpu.config_encryption import encryption_problems, look_at_encryption
from meshfusion.dpu.config_pool import NewPool, look_at_pool, new_geometries, pool_is_absent, room_problem
from meshfusion.dpu.config_tenants import pools_of, tenants_of, value_at
from meshfusion.dpu.export.opening import check_target
from meshfusion.dpu.pool_sizes import size_problems, usual_segment_bytes
from meshfusion.dpu.yaml_document import FieldPath, YamlDocument
from meshfusion.jbof.config_problems import ConfigProblem, as_fix
from meshfusion.jbof.errors import ConfigError, MeshFusionError
from meshfusion.jbof.segment_geometry import SegmentGeometry
from meshfusion.jbof.sizes import parse_size_bytes

_GUARDS: Final = frozenset({("tls",), ("access",), ("tokens_file",)})
_BUDGET: Final = "drive_writes_per_day"


class Surroundings:
    """``document``: a mapping. ``meant``: keys that misspelt ones stand for; they are not told to be missing.

    ``closely``: as far as can be told without starting the service, will its pool open, or find room to be made, and is
    its target here? After :meth:`look`, ``problems`` keep the service from starting, with ``warnings`` it starts.
    """

    def __init__(self, document: YamlDocument, meant: frozenset[FieldPath], *, closely: bool) -> None:
        self._document = document
        self._meant = meant
        self._closely = closely
        self.problems: list[ConfigProblem] = []
        self.warnings: tuple[str, ...] = ()

    def look(self) -> None:
        self._look_at_sockets()
        self._look_at_access()
        self._look_at_log()
        self._look_at_target()
        for at in pools_of(self._document.data):
            look = _PoolLook(self._document, self._meant, at, closely=self._closely)
            look.look()
            self.problems += look.problems
            name = "" if len(at) == 1 else f"{'.'.join(at[:2])}: "
            self.warnings += tuple(f"{name}{warning}" for warning in look.warnings)

    def _add(self, field: tuple[str, ...], value: object, problem: str, fix: str) -> None:
        line = self._document.line_of(field)
        self.problems.append(ConfigProblem(".".join(field), problem, fix, value, line))

    def _look_at_sockets(self) -> None:
        for field in (("listen",), ("telemetry", "listen")):
            for text, address in addresses_of(value_at(self._document.data, field)).items():
                folder = address.path.parent if isinstance(address, UnixAddress) else None
                problem = directory_problem(folder) if folder is not None else None
                if problem:
                    self._add(field, text, f"the socket's directory {folder} {problem[0]}", problem[1])

    def _look_at_access(self) -> None:
        for found in access_problems(self._document.data):
            if found.field[:1] != ("listen",) or not self._meant & _GUARDS:
                self._add(*found)
        audit = self._document.data.get("audit")
        path = audit.get("path") if isinstance(audit, dict) else None
        if isinstance(path, str) and _is_absolute(path) and (problem := directory_problem(Path(path).parent)):
            self._add(("audit", "path"), path, f"the directory {Path(path).parent} {problem[0]}", problem[1])

    def _look_at_log(self) -> None:
        log = self._document.data.get("log")
        path = log.get("file") if isinstance(log, dict) else None
        if not isinstance(path, str) or not _is_absolute(path):
            return  # none, or the model tells
        folder = Path(path).parent
        problem = directory_problem(folder)
        if problem:
            self._add(("log", "file"), path, f"the directory {folder} {problem[0]}", problem[1])
        elif Path(path).is_dir():
            self._add(("log", "file"), path, "is a directory", "name a file in it")

    def _look_at_target(self) -> None:
        exports = self._document.data.get("exports")
        if not self._closely or not isinstance(exports, dict) or exports.get("target") != "nvmet":
            return
        try:
            check_target("nvmet")
        except MeshFusionError as error:
            self._add(("exports", "target"), "nvmet", error.message, as_fix(error.next_step))


class _PoolLook:
    """The same of one pool, configured as a mapping ``at`` the document; its medium is configured beside it."""

    def __init__(
        self, document: YamlDocument, meant: frozenset[FieldPath], at: tuple[str, ...], *, closely: bool
    ) -> None:
        self._document = document
        self._meant = meant
        self._at = at
        self._closely = closely
        self.problems: list[ConfigProblem] = []
        self.warnings: tuple[str, ...] = ()

    def look(self) -> None:
        pool = value_at(self._document.data, self._at)
        for name, value, found, fix in encryption_problems(pool.get("encryption")):
            self._add(name, value, found, fix, within=(*self._at, "encryption"))
        if not _is_absolute(pool.get("path")):
            if pool.get("create") is True:
                self._check_sizes(pool)
        elif pool_is_absent(Path(pool["path"])):
            self._look_at_absent(pool, Path(pool["path"]))
        elif self._closely:
            self._look_at_existing(pool)

    def _add(self, name: str, value: object, problem: str, fix: str, *, within: tuple[str, ...] | None = None) -> None:
        field = (*(self._at if within is None else within), name)
        self.problems.append(ConfigProblem(".".join(field), problem, fix, value, self._document.line_of(field)))

    def _is_meant(self, name: str) -> bool:
        return (*self._at, name) in self._meant

    def _look_at_existing(self, pool: dict[Any, Any]) -> None:
        tenants = tenants_of(self._document.data, self._at)
        problem, self.warnings = look_at_encryption(Path(pool["path"]), pool.get("encryption"))
        if problem:
            self._add("encryption", None, *problem)
        if problem or self.warnings:
            return
        found = look_at_pool(Path(pool["path"]), tenants)
        if found.problem:
            self._add("path", pool["path"], found.problem.problem, found.problem.fix)
        self.warnings = found.warnings
        self._check_budget(found.geometries)

    def _look_at_absent(self, pool: dict[Any, Any], path: Path) -> None:
        """What keeps the service from making it is told before anything is made."""
        if pool.get("create") is not True:
            if self._is_meant("create") or not isinstance(pool.get("create", False), bool):
                return  # what was meant is not known
            at = ".".join(self._at)
            fix = f"set {at}.create: true and {at}.size, or run: mfctl pool create {path} --size 4GiB"
            self._add("path", pool["path"], "there is no pool", fix)
            return
        has_sizes = self._check_sizes(pool)
        if pool.get("size") is None and not self._is_meant("size"):
            self._add("size", None, "is needed to create the pool", "add for example size: 4GiB")
        folder = path if path.is_dir() else path.parent
        problem = directory_problem(folder)
        if problem:
            self._add("path", pool["path"], f"the directory {folder} {problem[0]}", problem[1])
        data_paths = _data_paths(pool.get("data_path"))
        missing = [data_path for data_path in data_paths if not _exists(data_path)]
        for data_path in missing:
            fix = "name an existing block device or file, or remove it"
            self._add("data_path", str(data_path), "does not exist", fix)
        size_bytes = size_or_none(pool.get("size"))
        if not has_sizes or missing or problem or size_bytes is None:
            return
        asked = size_or_none(pool.get("segment_size"))
        self._look_at_new(pool, NewPool(path, size_bytes, asked or usual_segment_bytes(size_bytes), data_paths))

    def _look_at_new(self, pool: dict[Any, Any], new: NewPool) -> None:
        try:
            geometries = new_geometries(new)
        except ConfigError as error:
            self._add("segment_size", pool.get("segment_size"), error.message, as_fix(error.next_step))
            return
        self._check_budget(geometries)
        found = room_problem(new) if self._closely else None
        if found:
            self._add(found.field, pool.get(found.field), found.problem, found.fix)

    def _check_sizes(self, pool: dict[Any, Any]) -> bool:
        """False: no pool can have them."""
        unfit = unfit_sizes(pool)
        for name, value, why, fix in unfit:
            self._add(name, value, why, fix)
        return not unfit and (pool.get("segment_size") is None or size_or_none(pool["segment_size"]) is not None)

    def _check_budget(self, geometries: tuple[SegmentGeometry, ...]) -> None:
        medium_at = (*self._at[:-1], "medium")
        medium = value_at(self._document.data, medium_at)
        asked = medium.get(_BUDGET) if isinstance(medium, dict) else None
        if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
            return  # no bound, or one that the model rejects
        found = budget_problem(asked, geometries)
        if found:
            self._add(_BUDGET, asked, found.problem, found.fix, within=medium_at)


def size_or_none(value: object) -> int | None:
    """The size that ``value`` stands for; None when it is none, which the model tells."""
    try:
        return parse_size_bytes(value)
    except ValueError:
        return None


def unfit_sizes(pool: dict[Any, Any], *, default_size: int | None = None) -> list[tuple[str, object, str, str]]:
    """What creating the pool would refuse; ``(field, value, problem, fix)``. Sizes that are none are told elsewhere."""
    size = size_or_none(pool.get("size", default_size))
    asked = pool.get("segment_size")
    if size is None:
        return []
    segment_size = usual_segment_bytes(size) if asked is None else size_or_none(asked)
    if segment_size is None:
        return []
    return [(p.field, pool.get(p.field), p.problem, p.fix) for p in size_problems(size, segment_size)]


def directory_problem(path: Path) -> tuple[str, str] | None:
    """Why nothing can be created in ``path``, and the fix; None when it can."""
    if not _exists(path):
        return "does not exist", f"mkdir -p {path}"
    if not path.is_dir():
        return "is not a directory", "choose another path"
    if not os.access(path, os.W_OK | os.X_OK):
        return "is not writable for this user", f"sudo chown {os.getuid()} {path}, or choose another path"
    return None


# ---- inside ------------------------------------------------------------------------------------------------------


def _data_paths(value: Any) -> tuple[Path, ...]:
    """None where the model rejects one."""
    listed = value if isinstance(value, list) else [value]
    return tuple(map(Path, listed)) if all(map(_is_absolute, listed)) else ()


def _is_absolute(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # the name is too long, or a parent may not be entered
