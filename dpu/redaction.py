"""A configuration as others may see it: every value whose type says that it is a secret is left out."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, SecretBytes, SecretStr

HIDDEN: Final = "(a secret, not shown)"


def redacted(model: BaseModel) -> dict[str, Any]:
    """Plain values, as JSON has them, of what ``model`` consists of. By type: secrets are declared as pydantic's
    ``SecretStr`` or ``SecretBytes``, and a type that is not known to be harmless is not shown either."""
    return {name: _shown(getattr(model, name)) for name in type(model).model_fields}


def _shown(value: Any) -> Any:
    match value:
        case SecretStr() | SecretBytes():
            return HIDDEN
        case BaseModel():
            return redacted(value)
        case enum.Enum():
            return value.value
        case None | bool() | int() | float() | str():
            return value
        case Path():
            return str(value)
        case Mapping():
            return {str(key): _shown(inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_shown(inner) for inner in value]
        case _:
            return f"(not shown: {type(value).__name__})"
