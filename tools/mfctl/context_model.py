"""What stands in the file of contexts: its keys, and what goes together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from meshfusion.dpu.api.address import UnixAddress, parse_address
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.yaml_document import FieldPath, YamlDocument
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError, as_fix, describe_errors
from meshfusion.jbof.errors import ConfigError, FieldValueError
from meshfusion.tools.mfctl.context_types import (
    MAX_SERVICES,
    NAME_PATTERN,
    Access,
    Contexts,
    Member,
    ServiceContext,
)

NEXT_STEP = "Correct the file, or write the context anew: mfctl context set."


def _absolute(text: str) -> str:
    if "\0" in text:
        raise FieldValueError("holds a NUL character, which no path does", "write the path")
    if not text.startswith("/"):
        raise FieldValueError("is not an absolute path", f"write the whole path, such as /etc/meshfusion/{text}")
    return text


def _address(text: str) -> str:
    try:
        return str(parse_address(text))
    except ConfigError as error:
        raise FieldValueError(f"is refused: {error.message}", as_fix(error.next_step)) from None


_File = Annotated[str, AfterValidator(_absolute)]
_Address = Annotated[str, AfterValidator(_address)]


class _AccessKeys(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    ca: _File | None = Field(None, examples=["/etc/meshfusion/ca.pem"])
    certificate: _File | None = Field(None, examples=["/etc/meshfusion/operator.pem"])
    key: _File | None = Field(None, examples=["/etc/meshfusion/operator.key"])
    server_name: str | None = Field(None, min_length=1, examples=["dpu-1.example"])
    token_file: _File | None = Field(None, examples=["/etc/meshfusion/token"])

    def access(self) -> Access:
        paths = {name: getattr(self, name) for name in ("ca", "certificate", "key", "token_file")}
        return Access(
            server_name=self.server_name, **{n: None if text is None else Path(text) for n, text in paths.items()}
        )


class _ServiceKeys(_AccessKeys):
    address: _Address = Field(examples=["dpu-1:7000"])


class _ContextKeys(_AccessKeys):
    service: _Address | None = Field(None, examples=["unix:///run/meshfusion/meshfusion.sock"])
    services: dict[str, _ServiceKeys] | None = Field(None, min_length=1, max_length=MAX_SERVICES)


class ContextsFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    current: str = ""
    contexts: dict[str, _ContextKeys] = Field(default_factory=dict)


def contexts_of(document: YamlDocument, name: str) -> Contexts:
    """``name``: what messages call the file. Raises ConfigProblemsError, of all problems at once."""
    if document.data is None:
        return Contexts()
    problems = [
        ConfigProblem(".".join(map(str, at)), "stands twice", "remove one of them", line=document.line_of(at))
        for at in document.duplicates
    ]
    try:
        found = ContextsFile.model_validate(document.data)
    except ValidationError as error:
        problems += describe_errors(error, ContextsFile, document)
        raise ConfigProblemsError(name, tuple(problems), next_step=NEXT_STEP) from None
    contexts = {name: _context(name, keys) for name, keys in found.contexts.items()}
    problems += [
        ConfigProblem(".".join(map(str, at)), what, fix, value, document.line_of(at))
        for at, what, fix, value in _problems(found, contexts)
    ]
    if problems:
        raise ConfigProblemsError(name, tuple(problems), next_step=NEXT_STEP)
    return Contexts(found.current, contexts)


def _context(name: str, keys: _ContextKeys) -> ServiceContext:
    shared = keys.access()
    if keys.services is None:
        member = Member(name, keys.service or "", shared)
        return ServiceContext(name, (member,), shared=shared)
    members = tuple(Member(n, one.address, _with_shared(one, shared)) for n, one in keys.services.items())
    return ServiceContext(name, members, is_cluster=True, shared=shared)


def _with_shared(keys: _ServiceKeys, shared: Access) -> Access:
    """What the context says for all is for those that it fits: a unix socket has no TLS."""
    is_unix = isinstance(parse_address(keys.address), UnixAddress)
    return keys.access().over(shared.without_tls() if is_unix else shared)


_Problem = tuple[FieldPath, str, str, object]


def _problems(found: ContextsFile, contexts: dict[str, ServiceContext]) -> Iterator[_Problem]:
    """What no field shows alone."""
    if found.current and found.current not in contexts:
        yield ("current",), "names no context", f"name one of: {', '.join(contexts) or 'none yet'}", found.current
    for name, keys in found.contexts.items():
        at: FieldPath = ("contexts", name)
        yield from _name_problems(at, name)
        if (keys.service is None) == (keys.services is None):
            yield at, "must have either service or services", "write service: ADDRESS, or services by their names", None
            continue
        for member in contexts[name].members:
            where = at if keys.services is None else (*at, "services", member.name)
            if keys.services is not None:
                yield from _name_problems(where, member.name)
            yield from _access_problems(where, member)
        yield from _same_addresses(at, contexts[name])


def _name_problems(at: FieldPath, name: str) -> Iterator[_Problem]:
    if not NAME_PATTERN.fullmatch(name):
        fix = "use letters, digits, dots, dashes and underscores, 63 at most"
        yield at, "is a name that cannot be used", fix, name


def _access_problems(at: FieldPath, member: Member) -> Iterator[_Problem]:
    problem = ClientSecurity(**member.access.given()).problem(parse_address(member.address))
    if problem is not None:
        value: Any = getattr(member.access, problem.field)
        yield (*at, problem.field), problem.problem, problem.fix, None if value is None else str(value)


def _same_addresses(at: FieldPath, context: ServiceContext) -> Iterator[_Problem]:
    seen: dict[str, str] = {}
    for member in context.members:
        if member.address in seen:
            where = (*at, "services", member.name, "address")
            yield where, f"is the address of {seen[member.address]} too", "name each service once", member.address
        seen[member.address] = member.name
