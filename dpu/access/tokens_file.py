"""The service's file of tokens: whose they are, and a digest of each; never a token itself."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from meshfusion.dpu.api.limits import MAX_ID_CHARS
from meshfusion.dpu.api.security.files import read_secret
from meshfusion.dpu.api.security.principal import Principal, PrincipalKind
from meshfusion.dpu.api.security.roles import Role
from meshfusion.dpu.api.security.rotated import FRESH_S, Rotated, Tell, tell_nobody
from meshfusion.dpu.api.security.token_text import digest_of
from meshfusion.dpu.yaml_document import YamlDocument, parse_yaml
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError
from meshfusion.jbof.errors import ConfigError, FieldValueError

Name = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
RoleName = Literal["engine", "operator", "read-only"]
assert {role.value for role in Role} == set(RoleName.__args__)  # type: ignore[attr-defined]

_NEXT: Final = "Correct the file: a list of {name, sha256, role, tenant}, as `mfctl token create` prints them."


class TokenEntry(BaseModel):
    """``sha256``: of the token's text, in hex."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    role: RoleName
    tenant: Name = "default"

    def principal(self) -> Principal:
        return Principal(PrincipalKind.TOKEN, self.name, frozenset({Role(self.role)}), self.tenant)


_ENTRIES: Final = TypeAdapter(list[TokenEntry])


class TokensFile:
    """Read again when it changes; when it is bad then, ``tell`` is told. Raises
    :class:`~meshfusion.jbof.errors.ConfigError` when it is bad at first."""

    def __init__(self, path: Path, *, tell: Tell = tell_nobody) -> None:
        self._entries = Rotated((path,), lambda: read_tokens(path), f"tokens_file {path}", tell=tell, fresh_s=FRESH_S)

    def find(self, token: str) -> Principal | None:
        """Takes equally long whichever token it is, or is not."""
        digest, found = digest_of(token), None
        for entry in self._entries.current()[0]:
            if hmac.compare_digest(entry.sha256, digest):
                found = entry
        return None if found is None else found.principal()


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """Raises :class:`~meshfusion.jbof.errors.ConfigError` that tells all problems."""
    try:
        data = read_secret(path, "tokens_file", may_group_root_read=False).data
    except FieldValueError as error:
        raise ConfigError(f"tokens_file = {path}: {error.problem}", next_step=f"{error.fix}.") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (at byte {error.start})", next_step=_NEXT) from None
    document = parse_yaml(text, str(path))
    if document.data is None:
        return ()  # nobody
    try:
        entries = _ENTRIES.validate_python(document.data)
    except ValidationError as error:
        raise ConfigProblemsError(str(path), tuple(_problems(error, document)), next_step=_NEXT) from None
    problems = [*_written_twice(document), *_same_twice(entries, document)]
    if problems:
        raise ConfigProblemsError(str(path), tuple(problems), next_step=_NEXT)
    return tuple(entries)


def _problems(error: ValidationError, document: YamlDocument) -> list[ConfigProblem]:
    """Values are not shown: somebody may have put a token where its digest belongs."""
    return [
        ConfigProblem(".".join(map(str, one["loc"])) or "the file", one["msg"], "see the entry that `mfctl token "
                      "create` prints", line=document.line_of(tuple(one["loc"])))
        for one in error.errors(include_url=False, include_input=False)
    ]  # fmt: skip


def _written_twice(document: YamlDocument) -> list[ConfigProblem]:
    return [
        ConfigProblem(".".join(map(str, at)), "stands twice", "remove one of them", line=document.line_of(at))
        for at in document.duplicates
    ]


def _same_twice(entries: list[TokenEntry], document: YamlDocument) -> list[ConfigProblem]:
    """One name is one principal, and one token is one entry."""
    problems = []
    for at, entry in enumerate(entries):
        for field in ("name", "sha256"):
            if any(getattr(entry, field) == getattr(before, field) for before in entries[:at]):
                fix = "give it another name" if field == "name" else "make a token for each"
                path = (at, field)
                problems.append(
                    ConfigProblem(f"{at}.{field}", "is that of an entry before", fix, line=document.line_of(path))
                )
    return problems
