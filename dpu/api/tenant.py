"""Names of tenants, as an engine says whose it is, and of the pools of a service that has several."""

from __future__ import annotations

import re
from typing import Final

from meshfusion.jbof.errors import FieldValueError

DEFAULT_TENANT: Final = "default"
CHUNK_TENANT: Final = DEFAULT_TENANT
"""What chunks carry in the index and on the medium, whoever's they are: who sees them is a matter of whose the pool is.
So a tenant that is called otherwise keeps its chunks, and no customer's name is on flash."""
MAX_NAME_CHARS: Final = 48
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}")


def check_name(name: str) -> str:
    """Returns it. Raises :class:`~meshfusion.jbof.errors.FieldValueError`."""
    if not _NAME.fullmatch(name):
        raise FieldValueError(
            f"is no name: 1 to {MAX_NAME_CHARS} letters, digits, '.', '_' and '-', the first a letter or a digit",
            "write for example red",
        )
    return name
