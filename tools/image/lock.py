"""The lock of an architecture: every package that an image is made of, by name, version and digest.

It is committed, so that a commit says all that its images hold. It names no place to get them from: that is the
business of the machine that builds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshfusion.jbof.config_problems import ConfigProblemsError, Unlined, describe_errors
from meshfusion.tools.image.architecture import PYTHON, SUITE
from meshfusion.tools.image.errors import BuildError

Target = Literal["nvmet", "spdk"]
TARGETS: Final[tuple[Target, ...]] = ("nvmet", "spdk")
REMAKE: Final = "Make the lock anew and commit it: mfctl image lock --arch {architecture}"

_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LockedPackage(_Strict):
    """``targets``: the images that it is in."""

    name: _Name
    version: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+~:!_-]*$")
    sha256: _Sha256
    targets: list[Target] = Field(min_length=1)


class Lock(_Strict):
    """``roots``: the Debian packages that were asked for; ``requires``: the wheels, as the project's pyproject.toml
    asked for them. Both by target."""

    format: Literal[1]
    architecture: Literal["arm64", "amd64"]
    suite: Literal["bookworm"]
    python: Literal["3.11"]
    roots: dict[Target, list[str]]
    requires: dict[Target, list[str]]
    debs: list[LockedPackage] = Field(min_length=1)
    wheels: list[LockedPackage] = Field(min_length=1)

    def debs_for(self, target: Target) -> tuple[LockedPackage, ...]:
        return tuple(deb for deb in self.debs if target in deb.targets)

    def wheels_for(self, target: Target) -> tuple[LockedPackage, ...]:
        return tuple(wheel for wheel in self.wheels if target in wheel.targets)


def make_lock(
    architecture: Literal["arm64", "amd64"],
    *,
    roots: dict[Target, list[str]],
    requires: dict[Target, list[str]],
    debs: dict[Target, dict[str, tuple[str, str]]],
    wheels: dict[Target, dict[str, tuple[str, str]]],
) -> Lock:
    """``debs``, ``wheels``: by target and name, version and SHA-256. Raises BuildError where targets disagree."""
    return Lock(
        format=1, architecture=architecture, suite=SUITE, python=PYTHON, roots=roots, requires=requires,
        debs=_merged(debs), wheels=_merged(wheels),
    )  # fmt: skip


def _merged(by_target: dict[Target, dict[str, tuple[str, str]]]) -> list[LockedPackage]:
    found: dict[str, tuple[str, str]] = {}
    for packages in by_target.values():
        for name, package in packages.items():
            if found.setdefault(name, package) != package:
                raise BuildError(
                    f"{name} is {found[name][0]} for one target and {package[0]} for another",
                    next_step="Make the lock again; if it stays, narrow the range in pyproject.toml.",
                )
    return [
        LockedPackage(
            name=name, version=version, sha256=sha256,
            targets=[target for target in TARGETS if name in by_target.get(target, {})],
        )
        for name, (version, sha256) in sorted(found.items())
    ]  # fmt: skip


def lock_text(lock: Lock) -> str:
    """As it is committed: one package a line, so that changes can be read."""
    data = lock.model_dump()
    lists = {name: [json.dumps(entry) for entry in data.pop(name)] for name in ("debs", "wheels")}
    head = json.dumps(data, indent=1)[:-2]
    body = (f' "{name}": [\n  ' + ",\n  ".join(entries) + "\n ]" for name, entries in lists.items())
    return ",\n".join((head, *body)) + "\n}\n"


def read_lock(text: str | bytes, name: str) -> Lock:
    """``name``: of the file, for messages. Raises BuildError, and ConfigProblemsError for one with mistakes."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{name}: is not JSON: {error}", next_step="Take it from the commit again.") from None
    try:
        return Lock.model_validate(data)
    except ValidationError as error:
        problems = describe_errors(error, Lock, Unlined(data), root_name="the lock")
        raise ConfigProblemsError(name, tuple(problems), next_step="Take it from the commit again.") from None


def read_lock_file(path: Path) -> Lock:
    """Raises as :func:`read_lock`, and BuildError where there is none."""
    try:
        return read_lock(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise BuildError(f"{path} does not exist", next_step="Name a lock, or make one: mfctl image lock") from None
