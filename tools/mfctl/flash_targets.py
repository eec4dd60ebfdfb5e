"""Which cards ``mfctl dpu`` is about: named on the command line, or in a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from meshfusion.dpu.config import read_config_file
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError, describe_errors
from meshfusion.jbof.errors import FieldValueError

FORMS: Final = "rshimN, ssh://[USER@]HOST[:PORT]/rshimN or redfish://HOST[:PORT]"
_RSHIM: Final = re.compile(r"rshim(\d{1,3})")
_HOST: Final = re.compile(r"[A-Za-z0-9._:%\[\]-]+")


@dataclass(frozen=True, slots=True)
class Place:
    """``host`` "" for this machine; ``folder``: of the rshim driver's files, "" where a BMC has them."""

    text: str
    host: str = ""
    user: str = ""
    port: int | None = None
    folder: str = ""
    index: int = 0

    @property
    def key(self) -> str:
        """The same for each way to write it."""
        return f"{self.host}:{self.folder or self.port or ''}"

    @property
    def is_bmc(self) -> bool:
        return not self.folder


@dataclass(frozen=True, slots=True)
class Target:
    """``service``: address of the chunk service on the card, ``address``: of the card itself, "" where not known."""

    name: str
    place: Place
    service: str = ""
    address: str = ""


def parse_place(text: str) -> Place:
    """Raises :class:`~meshfusion.jbof.errors.FieldValueError`."""
    if text.startswith(("ssh://", "redfish://")):
        return _remote(text)
    path = text if text.startswith("/") else f"/dev/{text}"
    return Place(text, folder=path, index=_index(text, path))


def _remote(text: str) -> Place:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise FieldValueError(f"is no card: {error}", f"write {FORMS}", subject=repr(text)) from None
    host = parts.hostname or ""
    if not _HOST.fullmatch(host) or host.startswith("-") or (parts.username or "").startswith("-"):
        raise FieldValueError("names no host", f"write {FORMS}", subject=repr(text))
    if parts.password is not None:
        raise FieldValueError("holds a password", "leave it out: ssh takes keys, a BMC --bmc-credentials")
    if parts.scheme == "redfish":
        if parts.path.strip("/") or parts.username:
            raise FieldValueError("has more than a host", "write redfish://HOST[:PORT]", subject=repr(text))
        return Place(text, host, port=port)
    folder = parts.path if parts.path.count("/") > 1 else f"/dev{parts.path}"
    return Place(text, host, parts.username or "", port, folder, _index(text, folder))


def _index(text: str, folder: str) -> int:
    found = _RSHIM.fullmatch(folder.rpartition("/")[2])
    if found is None:
        raise FieldValueError("is no card", f"write {FORMS}", subject=repr(text))
    return int(found.group(1))


def _place_text(text: str) -> str:
    parse_place(text)
    return text


class _TargetEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    at: Annotated[str, AfterValidator(_place_text)] = Field(examples=["ssh://root@host-1/rshim0"])
    name: str = Field("", max_length=100, examples=["dpu-1"])
    service: str = Field("", examples=["dpu-1:7000"])
    address: str = Field("", examples=["192.168.100.2"])
    ssh: str = Field("", description="For mfctl dpu upgrade, which the same file serves.")


class _TargetsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    targets: list[_TargetEntry] = Field(min_length=1)


def read_targets(path: Path) -> tuple[Target, ...]:
    """Raises ConfigError."""
    document = read_config_file(path)
    step = "Correct the file; docs/flash.md shows one."
    try:
        found = _TargetsFile.model_validate(document.data)
    except ValidationError as error:
        problems = describe_errors(error, _TargetsFile, document, root_name="the file")
        raise ConfigProblemsError(str(path), tuple(problems), next_step=step) from None
    targets = [
        Target(entry.name or entry.at, parse_place(entry.at), entry.service, entry.address) for entry in found.targets
    ]
    problems = []
    for number, target in enumerate(targets):
        before = targets[:number]
        if any(target.name == other.name or target.place.key == other.place.key for other in before):
            line = document.line_of(("targets", number))
            fix = "name each card once, and each by another name"
            problems.append(ConfigProblem(f"targets.{number}", "stands twice", fix, target.name, line))
    if problems:
        raise ConfigProblemsError(str(path), tuple(problems), next_step=step)
    return tuple(targets)
