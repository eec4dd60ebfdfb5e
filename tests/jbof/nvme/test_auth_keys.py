"""Text, making and transformation of DH-HMAC-CHAP keys."""

from __future__ import annotations

import base64
import hashlib
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.auth_keys import (
    KEY_BYTES,
    AuthHash,
    Secret,
    format_secret,
    new_secret,
    parse_secret,
    transformed_key,
)

NQN = "nqn.2014-08.org.nvmexpress:uuid:22207d09-d8af-4ed2-84ec-a6d80b0cf7eb"
SPECIFIED = "ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n"
"""The example of the specification; it may be used with every transform."""

secret_values = st.builds(
    Secret,
    st.sampled_from(KEY_BYTES).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
    st.sampled_from((None, *AuthHash)),
)


def hmac_by_hand(hash_name: str, block_bytes: int, key: bytes, data: bytes) -> bytes:
    """RFC 2104."""
    key = key.ljust(block_bytes, b"\0")
    inner = hashlib.new(hash_name, bytes(b ^ 0x36 for b in key) + data).digest()
    return hashlib.new(hash_name, bytes(b ^ 0x5C for b in key) + inner).digest()


@pytest.mark.parametrize("number", range(4))
def test_the_example_of_the_specification(number: int) -> None:
    text = f"DHHC-1:{number:02}:{SPECIFIED}:"
    secret = parse_secret(text)
    assert secret.key == base64.b64decode(SPECIFIED)[:32]
    assert secret.transform == (number or None)
    assert format_secret(secret) == text


@pytest.mark.parametrize(
    ("text", "length_bytes", "transform"),
    [
        # made by `nvme gen-dhchap-key`, from the tests of ceph-nvmeof
        ("DHHC-1:00:MWPqcx1Ug1debg8fPIGpkqbQhLcYUt39k7UWirkblaKEH1kE:", 32, None),
        (
            "DHHC-1:00:ojmm6ISA2DBpZEldEJqJvA1/cAl1wDmeolS0fCIn2qZpK0b7gpx3qu76yHpjlOOXNyjqf0oFYCWxUqkXGN2xEBOVxoA=:",
            64,
            None,
        ),
        ("DHHC-1:01:Ei7kUrD7iyrjzXDwIZ666sSPBswUk4wDjSQtodytVB5YiBru:", 32, AuthHash.SHA256),
        ("DHHC-1:02:ULMaRuJ40ui58nK4Qk5b0J89G3unbGb8mBUbt/XSrf18PBPvyL3sivZOINNh2o/fPpXbGg==:", 48, AuthHash.SHA384),
        (
            "DHHC-1:03:6EKZcEL86u4vzTE8sCETvskE3pLKE+qOorl9QxrRfLvfOEQ5GvqCzM41U8fFVAz1cs+T14PjSpd1J641rfeCC1x2VNg=:",
            64,
            AuthHash.SHA512,
        ),
    ],
)
def test_keys_of_others(text: str, length_bytes: int, transform: AuthHash | None) -> None:
    secret = parse_secret(f" {text}\n")
    assert (len(secret.key), secret.transform) == (length_bytes, transform)
    assert format_secret(secret) == text


GOOD = "eNNXGjidEHHStbUi2Gmpps0JcnofReFfy+NaulguGgt327hz"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "form"),
        (f"xDHHC-1:01:{GOOD}:", "form"),
        (f"DHHC-1:01{GOOD}:", "form"),
        (f"DHHC-1::{GOOD}:", "form"),
        (f"DHHC-1:1:{GOOD}:", "form"),
        (f"DHHC-1:tt:{GOOD}:", "form"),
        (f"DHHC-1:\u0660\u0661:{GOOD}:", "form"),  # digits, but no ASCII ones
        (f"DHHC-1:01:{GOOD}", "form"),
        (f"DHHC-1:01:{GOOD}::", "form"),
        (f"DHHC-1:01:{GOOD[:20]} {GOOD[20:]}:", "form"),
        (f"DHHC-1:01:{GOOD[:-1]}*:", "form"),
        ("DHHC-1:01::", "form"),
        (f"DHHC-1:04:{GOOD}:", "hash 04"),
        (f"DHHC-1:01:{GOOD[:-1]}:", "base64"),
        ("DHHC-1:01:eHh4eHh4:", "has 2 bytes"),
        (f"DHHC-1:01:{GOOD}YzrP:", "has 35 bytes"),
        (f"DHHC-1:01:{GOOD[:-1]}y:", "damaged"),
        (f"DHHC-1:00:f{GOOD[1:]}:", "damaged"),
        ("DHHC-1:00:Jc/My1o0qtLCWRp+sHhAVafdfaS7YQOMYhk9zSmlatobqB8C:", "damaged"),  # the invalid one of blktests
    ],
)
def test_wrong_text_is_refused_without_being_shown(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_secret(text)
    shown = f"{caught.value}{caught.value!r}{caught.value.__cause__!r}"
    assert GOOD[4:16] not in shown
    assert "eHh4eHh4" not in shown
    assert "gen-dhchap-key" in caught.value.next_step


@given(secret=secret_values)
def test_text_reads_back(secret: Secret) -> None:
    text = format_secret(secret)
    assert parse_secret(text) == secret
    encoded = base64.b64decode(text.split(":")[2])
    assert encoded == secret.key + zlib.crc32(secret.key).to_bytes(4, "little")


@given(text=st.text(max_size=80))
def test_any_text_is_judged(text: str) -> None:
    for candidate in (text, f"DHHC-1:01:{text}:"):
        try:
            secret = parse_secret(candidate)
        except ConfigError:
            continue
        assert format_secret(secret) == candidate.strip()


@given(secret=secret_values)
def test_a_secret_does_not_show_itself(secret: Secret) -> None:
    for shown in (repr(secret), str(secret), f"{secret}", f"{[secret]}", f"{secret=}"):
        assert "hidden" in shown
        assert repr(secret.key)[2:-1] not in shown
    assert pickle.loads(pickle.dumps(secret)) == secret  # configurations travel to other processes


@pytest.mark.parametrize("length_bytes", [0, 16, 31, 33, 65])
def test_other_lengths_are_no_keys(length_bytes: int) -> None:
    with pytest.raises(ConfigError, match="32, 48 or 64"):
        Secret(bytes(length_bytes))


def test_new_secrets() -> None:
    assert new_secret() != new_secret()
    made = new_secret(48, AuthHash.SHA384, random_bytes=lambda count: bytes(range(count)))
    assert made == Secret(bytes(range(48)), AuthHash.SHA384)
    assert parse_secret(format_secret(made)) == made


@pytest.mark.parametrize(
    ("hash_", "name", "block_bytes"),
    [(AuthHash.SHA256, "sha256", 64), (AuthHash.SHA384, "sha384", 128), (AuthHash.SHA512, "sha512", 128)],
)
@pytest.mark.parametrize("length_bytes", KEY_BYTES)
def test_transformation(hash_: AuthHash, name: str, block_bytes: int, length_bytes: int) -> None:
    """nvme_auth_transform_key of Linux: HMAC(key, NQN || "NVMe-over-Fabrics")."""
    key = bytes(range(length_bytes))
    expected = hmac_by_hand(name, block_bytes, key, NQN.encode() + b"NVMe-over-Fabrics")
    assert transformed_key(Secret(key, hash_), NQN) == expected
    assert transformed_key(Secret(key), NQN) == key
    assert hash_.digest_bytes == len(expected)
