"""The surfaces of the engine versions this version was tried with, recorded as files, and what a wheel has beyond them.

``python -m meshfusion.tools.known_surface WHEEL...`` records: for each wheel the file of its minor version.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from meshfusion.host.kv.kinds import BASE_CLASSES, CONTAINER_CLASS, KIND_BY_CLASS
from meshfusion.host.kv.versions import SUPPORTED_MINORS
from meshfusion.tools.engine_surface import SPEC_CLASSES, Difference, Surface, compare, read_wheel

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class WheelReport:
    """``compared_with``: the version whose recorded surface the wheel's was compared with. ``spec_classes``: each with
    its kind, empty for one that has none."""

    version: str
    compared_with: str
    spec_classes: dict[str, str]
    differences: tuple[Difference, ...]

    @property
    def unclassified(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.spec_classes.items() if not kind)

    @property
    def is_known(self) -> bool:
        return not self.unclassified and not self.differences


def examine_wheel(wheel: Path) -> WheelReport:
    """Reads ``wheel`` and compares it with what was recorded of its minor version, else of the newest supported one.

    Raises :class:`~meshfusion.jbof.errors.MeshFusionError` when the file is no wheel of vLLM.
    """
    return report(read_wheel(wheel))


def report(surface: Surface) -> WheelReport:
    minor = _minor(surface.version)
    known = recorded_surface(minor if minor in SUPPORTED_MINORS else SUPPORTED_MINORS[-1])
    kinds = {name: _kind_name(name) for name in sorted(surface.sections[SPEC_CLASSES])}
    return WheelReport(surface.version, known.version, kinds, compare(known, surface))


def recorded_surface(minor: str) -> Surface:
    return Surface.from_json(_file_of(minor).read_text(encoding="utf-8"))


def _kind_name(spec_class: str) -> str:
    if spec_class in BASE_CLASSES:
        return "(only derived from)"
    if spec_class == CONTAINER_CLASS:
        return "(holds others)"
    kind = KIND_BY_CLASS.get(spec_class)
    return kind.name if kind is not None else ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _file_of(minor: str) -> Path:
    return _DATA / f"vllm-surface-{minor}.json"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        found = read_wheel(Path(argument))
        _file_of(_minor(found.version)).write_text(found.to_json(), encoding="utf-8")
