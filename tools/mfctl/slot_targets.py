"""Which cards ``mfctl dpu upgrade``, ``rollback`` and ``status`` are about: by the address of their Linux, for ssh."""

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

FORM: Final = "[ssh://][USER@]HOST[:PORT]"
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]+")
_USER: Final = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class SshPlace:
    """``destination``: as ssh takes it."""

    destination: str
    port: int | None = None

    def __str__(self) -> str:
        return self.destination if self.port is None else f"{self.destination}:{self.port}"


@dataclass(frozen=True, slots=True)
class SlotTarget:
    """``service``: address of the chunk service on the card, "" where it is not to be drained over it."""

    name: str
    place: SshPlace
    service: str = ""


def parse_ssh_place(text: str) -> SshPlace:
    """Raises :class:`~meshfusion.jbof.errors.FieldValueError`."""
    try:
        parts = urlsplit(text if text.startswith("ssh://") else f"ssh://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise FieldValueError(f"is no address: {error}", f"write {FORM}", subject=repr(text)) from None
    if parts.password is not None:
        raise FieldValueError("holds a password", "leave it out: ssh takes keys")
    is_user = parts.username is None or _USER.fullmatch(parts.username)
    if not (is_user and _HOST.fullmatch(host)) or host.startswith("-") or parts.path.strip("/") or parts.query:
        raise FieldValueError("names no machine", f"write {FORM}", subject=repr(text))
    return SshPlace(f"{parts.username}@{host}" if parts.username else host, port)


def _place_text(text: str) -> str:
    parse_ssh_place(text)
    return text


class _TargetEntry(BaseModel):
    """The keys that only a flash has are passed over, so that one file serves both."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ssh: Annotated[str, AfterValidator(_place_text)] = Field(examples=["root@dpu-1"])
    name: str = Field("", max_length=100, examples=["dpu-1"])
    service: str = Field("", examples=["dpu-1:7000"])
    at: str = ""
    address: str = ""


class _TargetsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    targets: list[_TargetEntry] = Field(min_length=1)


def read_slot_targets(path: Path) -> tuple[SlotTarget, ...]:
    """Raises ConfigError."""
    document = read_config_file(path)
    step = "Correct the file; docs/dpu-upgrade.md shows one."
    try:
        found = _TargetsFile.model_validate(document.data)
    except ValidationError as error:
        problems = describe_errors(error, _TargetsFile, document, root_name="the file")
        raise ConfigProblemsError(str(path), tuple(problems), next_step=step) from None
    targets = [
        SlotTarget(entry.name or entry.ssh, parse_ssh_place(entry.ssh), entry.service) for entry in found.targets
    ]
    twice = [
        ConfigProblem(
            f"targets.{number}", "stands twice", "name each card once, and each by another name", target.name,
            document.line_of(("targets", number)),
        )
        for number, target in enumerate(targets)
        if any(target.name == other.name or target.place == other.place for other in targets[:number])
    ]  # fmt: skip
    if twice:
        raise ConfigProblemsError(str(path), tuple(twice), next_step=step)
    return tuple(targets)
