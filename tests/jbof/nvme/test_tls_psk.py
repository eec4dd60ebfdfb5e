"""Keys of NVMe/TCP's TLS as text, against a key of SPDK's, and against the format computed here."""

from __future__ import annotations

import base64
import re
import zlib

import pytest

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.tls_psk import new_psk, parse_psk

# The first is that of SPDK's doc/nvmf.md, whose bytes are ASCII digits; the second is made like it, for SHA-384.
LIKE_SPDK = {
    "NVMeTLSkey-1:01:MDAxMTIyMzM0NDU1NjY3Nzg4OTlhYWJiY2NkZGVlZmZwJEiQ:": b"00112233445566778899aabbccddeeff",
    "NVMeTLSkey-1:02:MDAxMTIyMzM0NDU1NjY3Nzg4OTlhYWJiY2NkZGVlZmYwMDExMjIzMzQ0NTU2Njc3wWXNJw==:": (
        b"00112233445566778899aabbccddeeff0011223344556677"
    ),
}


@pytest.mark.parametrize(("text", "key"), LIKE_SPDK.items())
def test_keys_of_others_are_read(text: str, key: bytes) -> None:
    assert parse_psk(text) == key
    assert parse_psk(f" {text}\n") == key


def test_a_new_key_is_of_32_random_bytes() -> None:
    text = new_psk(lambda count: bytes(range(count)))
    encoded = base64.b64encode(bytes(range(32)) + zlib.crc32(bytes(range(32))).to_bytes(4, "little")).decode()
    assert text == f"NVMeTLSkey-1:01:{encoded}:"
    assert parse_psk(text) == bytes(range(32))
    assert new_psk() != new_psk()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has not the form"),
        ("DHHC-1:00:AAAA:", "has not the form"),
        ("NVMeTLSkey-1:01:MDAx", "has not the form"),
        ("NVMeTLSkey-1:07:MDAx:", "names hash 07"),
        ("NVMeTLSkey-1:01:MDA:", "no valid base64"),
        ("NVMeTLSkey-1:01:MDAxMTIyMzM0NDU1NjY3Nzg4OTlhYWJiY2NkZGVlZmZwJEiR:", "CRC-32"),
        ("NVMeTLSkey-1:02:MDAxMTIyMzM0NDU1NjY3Nzg4OTlhYWJiY2NkZGVlZmZwJEiQ:", "has 32 bytes; with hash 02"),
    ],
)
def test_what_is_none_is_refused_and_not_shown(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        parse_psk(text)
    assert "MDAx" not in str(caught.value)
