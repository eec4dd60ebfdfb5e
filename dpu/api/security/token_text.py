"""Bearer tokens: their form, and the digest that a service keeps of one."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from meshfusion.jbof.errors import FieldValueError

TOKEN_BYTES: Final = 32
_PREFIX: Final = "mft_"  # so that scanners of files and logs can find one that got out
_TOKEN: Final = re.compile(rf"{_PREFIX}[0-9a-f]{{{2 * TOKEN_BYTES}}}")


def token_of(random_bytes: bytes) -> str:
    """``random_bytes``: :data:`TOKEN_BYTES` of them, which nobody can guess. With that much, a plain digest of it tells
    nothing, and no slow one is needed."""
    assert len(random_bytes) == TOKEN_BYTES
    return _PREFIX + random_bytes.hex()


def digest_of(token: str) -> str:
    """What stands in a service's tokens file; SHA-256 in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def parse_token(data: bytes) -> str:
    """A file that holds a token and nothing else but white space. Raises FieldValueError, without what it holds."""
    text = data.decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(text):
        raise FieldValueError("does not hold a token", "put the output of `mfctl token create` there",
                              field="token_file")  # fmt: skip
    return text
