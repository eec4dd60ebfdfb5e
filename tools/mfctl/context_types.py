"""Contexts of ``mfctl``: which services it is about, and with which files it calls them. Values only."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Of contexts and of services in them. No address is one: those have a colon or a slash."""
MAX_SERVICES: Final = 64
"""Of one context: each is asked in a thread of its own."""


@dataclass(frozen=True, slots=True)
class Access:
    """Files by their absolute paths, as :class:`~meshfusion.dpu.api.security.client_security.ClientSecurity` has them;
    never what they hold."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    token_file: Path | None = None

    def given(self) -> dict[str, Any]:
        """What is named, by field."""
        found = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in found if value is not None}

    def over(self, other: Access) -> Access:
        """This one, with what it does not name taken from ``other``."""
        return Access(**(other.given() | self.given()))

    def without_tls(self) -> Access:
        return Access(token_file=self.token_file)


@dataclass(frozen=True, slots=True)
class Member:
    """One service. ``name``: what people call it."""

    name: str
    address: str
    access: Access = Access()


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """``is_cluster``: it was written as a list of services, of which each is answered for by its name, be it one."""

    name: str
    members: tuple[Member, ...]
    is_cluster: bool = False
    shared: Access = Access()

    def member(self, name: str) -> Member | None:
        return next((member for member in self.members if member.name == name), None)


@dataclass(frozen=True, slots=True)
class Contexts:
    """All of a file. ``current``: the name of the one that holds where none is named; "" for none."""

    current: str = ""
    by_name: dict[str, ServiceContext] = field(default_factory=dict)

    def with_context(self, context: ServiceContext) -> Contexts:
        return Contexts(self.current, {**self.by_name, context.name: context})

    def without(self, name: str) -> Contexts:
        current = "" if self.current == name else self.current
        return Contexts(current, {n: context for n, context in self.by_name.items() if n != name})
