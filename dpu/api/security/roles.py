"""Which role may make which call. The one table of it: docs/security.md shows it, the guard keeps it.

An engine works as a holder; an operator looks after the pool, and does not attach, since that gives access to what
engines stored; ``read-only`` looks. Calls in the audit log are those that change something: looks, which monitors
repeat, would fill it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshfusion.dpu.api.v1 import chunk_pb2 as pb


class Role(enum.Enum):
    ENGINE = "engine"
    OPERATOR = "operator"
    READ_ONLY = "read-only"


ALL_ROLES: Final = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Rule:
    """Of one call. ``is_audited``: each goes into the audit log, and none is made that cannot."""

    roles: frozenset[Role]
    is_audited: bool = False


_ENGINES = Rule(frozenset({Role.ENGINE}))
_LOOKS = Rule(frozenset({Role.OPERATOR, Role.READ_ONLY}))
_ADMIN = Rule(frozenset({Role.OPERATOR}), is_audited=True)

# By "Service.Call", as in the proto file.
RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "ChunkService.Attach": _ENGINES,
        "ChunkService.Match": _ENGINES,
        "ChunkService.Release": _ENGINES,
        "ChunkService.Reserve": _ENGINES,
        "ChunkService.Commit": _ENGINES,
        "ChunkService.Abort": _ENGINES,
        "ChunkService.Heartbeat": _ENGINES,
        "ChunkService.Drop": _ENGINES,
        "ChunkService.Detach": _ENGINES,
        "ChunkService.Status": _LOOKS,
        "ChunkService.ListChunks": _LOOKS,
        "ChunkService.GetChunk": _LOOKS,
        "Observe.Events": _LOOKS,
        "Observe.Trace": _LOOKS,
        "ServiceAdmin.State": _LOOKS,
        "ServiceAdmin.Drain": _ADMIN,
        "ServiceAdmin.Reload": _ADMIN,
        "ServiceAdmin.Stacks": _ADMIN,
        "ServiceAdmin.ReplaceKeys": _ADMIN,
        "DriveAdmin.Drives": _LOOKS,
        "DriveAdmin.AddDrive": _ADMIN,
        "DriveAdmin.DrainDrive": _ADMIN,
        "DriveAdmin.RemoveDrive": _ADMIN,
    }
)

assert RULES.keys() == {
    f"{service.name}.{method.name}" for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods
}, "every call of the proto file has a rule here, and no other"


def roles_table() -> str:
    """For docs/security.md: a Markdown table."""
    head = "| call | " + " | ".join(f"`{role.value}`" for role in Role) + " | audit log |\n"
    rows = "".join(
        f"| `{name}` | {' | '.join('yes' if role in rule.roles else '' for role in Role)} | "
        f"{'yes' if rule.is_audited else ''} |\n"
        for name, rule in RULES.items()
    )
    return f"{head}|---|{'---|' * len(Role)}---|\n{rows}"
