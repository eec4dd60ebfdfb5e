"""Who calls, and which holders are theirs.

A principal that is known by name owns the holders that it attaches: their ids end with a tag made of its name. That is
checked without any state, so it holds over a restart of the service, and no index record changes. The tag is no secret:
the edge appends it to whatever incarnation a caller names, so nobody can make an id with another one's tag.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from dataclasses import dataclass
from typing import Final

from meshfusion.dpu.api.security.roles import ALL_ROLES, Role

_TAG_CHARS: Final = 20  # 80 bits: names are the operator's, so that nobody searches for two with one tag
MAX_HOLDER_ID_CHARS: Final = 64  # as the store has it
MAX_INCARNATION_CHARS: Final = MAX_HOLDER_ID_CHARS - _TAG_CHARS - 1


class PrincipalKind(enum.Enum):
    LOCAL = "local"  # whoever can reach a socket or a port of this machine, where nothing else is configured
    CERTIFICATE = "certificate"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Principal:
    """``name``: the certificate's subject or the token's name. ``tenant`` None: any."""

    kind: PrincipalKind
    name: str
    roles: frozenset[Role]
    tenant: str | None

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.name}" if self.name else self.kind.value

    @property
    def owns_all_holders(self) -> bool:
        return self.kind is PrincipalKind.LOCAL

    def holder_id(self, incarnation: str) -> str:
        """Under which id an incarnation of this principal is attached; the same each time."""
        return incarnation if self.owns_all_holders else f"{incarnation}-{_tag(str(self))}"

    def owns(self, holder_id: str) -> bool:
        return self.owns_all_holders or holder_id.endswith(f"-{_tag(str(self))}")


LOCAL: Final = Principal(PrincipalKind.LOCAL, "", ALL_ROLES, None)


@functools.lru_cache(maxsize=1024)
def _tag(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:_TAG_CHARS]
