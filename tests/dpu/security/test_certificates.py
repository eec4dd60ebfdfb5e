"""What is wrong with certificates, keys and tokens is told before anything is served: which file, and until when."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from meshfusion.dpu.access.tokens_file import read_tokens
from meshfusion.dpu.api.security.certificates import EXPIRY_WARNING
from meshfusion.dpu.api.security.client_security import ClientCredentials, ClientSecurity
from meshfusion.dpu.api.security.server_tls import ServerTls, ServerTlsFiles, read_server_tls
from meshfusion.dpu.api.security.token_text import digest_of, token_of
from meshfusion.dpu.config import load_service_config
from meshfusion.dpu.config_access import expiry_notes
from meshfusion.jbof.config_problems import ConfigProblemsError
from meshfusion.jbof.errors import ConfigError, FieldValueError
from tests.dpu.security.authority import DAY, Authority, Key, client_of, replace, server_files
from tests.dpu.security.test_tls import answers, serving

HOUR = DAY / 24


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def problem_of(files: ServerTlsFiles) -> FieldValueError:
    with pytest.raises(FieldValueError) as caught:
        read_server_tls(files, datetime.now(UTC))
    assert caught.value.fix
    return caught.value


def test_what_is_right_is_read(ca: Authority) -> None:
    files = ServerTlsFiles(*ca.issue("server"), ca.path)
    material = read_server_tls(files, datetime.now(UTC))
    assert material.warnings(datetime.now(UTC)) == ()
    assert "PRIVATE" not in repr(material)


def test_dates(ca: Authority) -> None:
    over = problem_of(ServerTlsFiles(*ca.issue("server", start=-10 * DAY, life=-2 * DAY)))
    day = datetime.now(UTC) - 2 * DAY
    assert over.field == "certificate"
    assert over.problem.startswith("expired: the certificate of CN=server was valid until ")
    assert f"{day:%Y-%m-%d}" in over.problem
    early = problem_of(ServerTlsFiles(*ca.issue("server", start=2 * HOUR)))
    assert re.match(
        r"is not valid yet: the certificate of CN=server is from \d{4}-\d\d-\d\d \d\d:\d\d UTC on", early.problem
    )


@pytest.mark.parametrize(("left", "is_told"), [(EXPIRY_WARNING - HOUR, True), (EXPIRY_WARNING + HOUR, False)])
def test_a_certificate_that_expires_soon_is_told_of(ca: Authority, left: Any, is_told: bool) -> None:
    material = read_server_tls(ServerTlsFiles(*ca.issue("server", life=left), ca.path), datetime.now(UTC))
    warnings = material.warnings(datetime.now(UTC))
    assert len(warnings) == is_told
    assert all("server.pem is valid only until" in text for text in warnings)


def test_a_certificate_and_another_ones_key(ca: Authority) -> None:
    one, two = ca.issue("one"), ca.issue("two")
    found = problem_of(ServerTlsFiles(one.certificate, two.key))
    assert (found.field, found.problem) == (
        "key", f"is not the key of the certificate {one.certificate} (the certificate of CN=one)",
    )  # fmt: skip


def test_a_certificate_for_something_else(ca: Authority) -> None:
    files = ServerTlsFiles(*ca.issue("server", uses=(ExtendedKeyUsageOID.CLIENT_AUTH,)))
    assert "for other purposes than that of a server" in problem_of(files).problem
    pair = ca.issue("client", uses=(ExtendedKeyUsageOID.SERVER_AUTH,))
    with pytest.raises(ConfigError, match="for other purposes than that of a client"):
        ClientCredentials(ClientSecurity(ca.path, *pair))
    for uses in ((), (ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE,)):
        read_server_tls(ServerTlsFiles(*ca.issue("server", uses=uses)), datetime.now(UTC))


def test_a_ca_that_is_none(ca: Authority) -> None:
    server, leaf = ca.issue("server"), ca.issue("leaf")
    found = problem_of(ServerTlsFiles(*server, leaf.certificate))
    assert (found.field, "CN=leaf, which is no certificate of a CA" in found.problem) == ("client_ca", True)


KEYS: dict[str, Callable[[], Key]] = {
    "RSA of 1024 bits": lambda: rsa.generate_private_key(65537, 1024),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "secp224r1": lambda: ec.generate_private_key(ec.SECP224R1()),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
}


@pytest.mark.parametrize("kind", list(KEYS))
def test_only_keys_that_grpc_can_use_are_taken(tmp_path: Path, kind: str) -> None:
    """Whatever is taken serves and is let in; others would fail at the handshake, or as a port that is taken."""
    ca = Authority(tmp_path)
    pair = ca.issue("engine-1", key=KEYS[kind]())
    files = ServerTlsFiles(*pair, ca.path)
    if kind in ("RSA", "P-256", "P-384"):
        with serving(files) as server:
            assert answers(server, client_of(ca, pair))
    else:
        found = problem_of(files)
        assert (found.field, f"has a key that is {kind}" in found.problem) == ("certificate", True)


@pytest.mark.parametrize("kind", list(KEYS))
def test_only_keys_of_cas_that_grpc_can_use_are_taken(tmp_path: Path, kind: str) -> None:
    ca = Authority(tmp_path, key=KEYS[kind]())
    files = server_files(ca, ca)
    if kind in ("RSA", "P-256", "P-384", "P-521", "Ed25519"):
        with serving(files) as server:
            assert answers(server, client_of(ca, ca.issue("engine-1")))
    else:
        assert f"has a key that is {kind}" in problem_of(files).problem


def test_a_chain_in_the_wrong_order(ca: Authority, tmp_path: Path) -> None:
    server = ca.issue("server")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(server.certificate.read_bytes() + ca.pem)
    read_server_tls(ServerTlsFiles(chain, server.key), datetime.now(UTC))
    chain.write_bytes(server.certificate.read_bytes() + Authority(tmp_path, "other").pem)
    assert "which did not sign it" in problem_of(ServerTlsFiles(chain, server.key)).problem


@pytest.mark.parametrize(
    ("field", "data", "message"),
    [
        ("certificate", None, "does not exist"),
        ("key", None, "does not exist"),
        ("client_ca", None, "does not exist"),
        ("certificate", b"", "holds no certificate"),
        ("client_ca", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "holds no certificate"),
        ("key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "holds no private key"),
        ("key", b"x" * (1 << 20) + b"x", "more than the 1048576"),
    ],
)
def test_files_that_hold_something_else(ca: Authority, field: str, data: bytes | None, message: str) -> None:
    files = ServerTlsFiles(*ca.issue("server"), ca.path)
    path = getattr(files, field)
    path.unlink()
    if data is not None:
        replace(path, data, mode=0o600)
    found = problem_of(files)
    assert found.field == field
    assert message in found.problem
    with pytest.raises(ConfigError, match=f"tls.{field} = {path}: "):
        ServerTls(files)


def test_a_pipe_is_not_waited_for(ca: Authority, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in problem_of(ServerTlsFiles(tmp_path / "pipe", ca.issue("s").key)).problem


def test_a_key_with_a_passphrase(ca: Authority) -> None:
    server = ca.issue("server")
    key = serialization.load_pem_private_key(server.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    data = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    replace(server.key, data, mode=0o600)
    assert "openssl pkey" in problem_of(ServerTlsFiles(*server)).fix


@pytest.mark.parametrize(
    ("mode", "is_open"), [(0o600, False), (0o400, False), (0o644, True), (0o620, True), (0o601, True)]
)
def test_a_key_that_others_can_read_is_refused(ca: Authority, mode: int, is_open: bool) -> None:
    server = ca.issue("server")
    server.key.chmod(mode)
    if not is_open:
        read_server_tls(ServerTlsFiles(*server), datetime.now(UTC))
        return
    found = problem_of(ServerTlsFiles(*server))
    assert (found.field, f"chmod 600 {server.key}" in found.fix, f"{mode:04o}" in found.problem) == ("key", True, True)


def test_the_group_root_may_read_a_key_and_no_other(ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ca.issue("server")
    server.key.chmod(0o640)
    fstat = os.fstat

    def of_group(gid: int) -> None:
        def stand_in(descriptor: int) -> os.stat_result:
            found = fstat(descriptor)
            return os.stat_result((*found[:5], gid, *found[6:]))

        monkeypatch.setattr("meshfusion.dpu.api.security.files.os.fstat", stand_in)

    of_group(0)
    read_server_tls(ServerTlsFiles(*server), datetime.now(UTC))
    of_group(12345)
    assert problem_of(ServerTlsFiles(*server)).field == "key"


# ---- the configuration -----------------------------------------------------------------------------------------------


def write(tmp_path: Path, **keys: Any) -> Path:
    data = {"listen": "10.0.0.1:7700", "pool": {"path": f"{tmp_path}/pool", "create": True, "size": "4GiB"}, **keys}
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))
    return path


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigProblemsError) as caught:
        load_service_config(path)
    return [re.sub(r"^line \d+: ", "", str(problem)) for problem in caught.value.problems]


ENTRY = {"subject": "engine-1", "role": "engine"}


def tls_of(ca: Authority, **changes: Any) -> dict[str, str]:
    server = ca.issue("server")
    fields = {"certificate": server.certificate, "key": server.key, "client_ca": ca.path, **changes}
    return {name: str(value) for name, value in fields.items() if value is not None}


def tokens_of(tmp_path: Path, *entries: dict[str, str]) -> str:
    replace(tmp_path / "tokens.yaml", yaml.safe_dump(list(entries)).encode(), mode=0o600)
    return str(tmp_path / "tokens.yaml")


def test_another_address_with_all_that_it_takes(ca: Authority, tmp_path: Path) -> None:
    config = load_service_config(write(tmp_path, tls=tls_of(ca), access=[ENTRY]))
    assert config.tls is not None
    assert expiry_notes(config.tls) == ()
    assert config.access is not None
    assert config.access[0].tenant == "default"
    tokens = tokens_of(tmp_path)
    load_service_config(write(tmp_path, tls=tls_of(ca, client_ca=None), tokens_file=tokens))
    load_service_config(write(tmp_path, listen="127.0.0.1:7700", tokens_file=tokens))
    soon = tls_of(ca, certificate=ca.issue("soon", life=DAY).certificate, key=tmp_path / "soon.key")
    config = load_service_config(write(tmp_path, tls=soon, access=[ENTRY]))
    (note,) = expiry_notes(config.tls)
    assert "soon.pem is valid only until" in note


def test_what_another_address_takes(ca: Authority, tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path)
    for keys in ({}, {"tls": tls_of(ca, client_ca=None)}, {"tokens_file": tokens}):
        (problem,) = problems_of(write(tmp_path, **keys))
        assert problem.startswith("listen = '10.0.0.1:7700': is not a loopback address")
        assert "docs/security.md" in problem


def test_what_does_not_go_together(ca: Authority, tmp_path: Path) -> None:
    socket = f"unix://{tmp_path}/s"
    (problem,) = problems_of(write(tmp_path, listen=socket, tls=tls_of(ca), access=[ENTRY]))
    assert problem.startswith("tls: is not for a unix socket")
    (problem,) = problems_of(write(tmp_path, listen="127.0.0.1:1", access=[ENTRY]))
    assert problem.startswith("access: names certificates, and without tls.client_ca callers show none")
    (problem,) = problems_of(write(tmp_path, listen="127.0.0.1:1", tls=tls_of(ca)))
    assert problem.startswith("tls.client_ca = ")
    assert "nobody is known by a certificate" in problem


@pytest.mark.parametrize(
    ("access", "expected"),
    [
        ([], "access"),
        ([ENTRY, ENTRY], "access.*names the subject 'engine-1' twice"),
        ([{**ENTRY, "role": "admin"}], "access.0.role = 'admin': must be 'engine', 'operator' or 'read-only'"),
        ([{**ENTRY, "subject": ""}], "access.0.subject = '': "),
        ([{"role": "engine"}], "access.0.subject: is missing"),
        ([{**ENTRY, "rolle": "x"}], "access.0.rolle: unknown key"),
        ("everybody", "access"),
    ],
)
def test_bad_access(ca: Authority, tmp_path: Path, access: Any, expected: str) -> None:
    (problem,) = problems_of(write(tmp_path, tls=tls_of(ca), access=access))
    assert re.match(expected, problem), problem


def test_bad_files_are_named_with_their_keys(ca: Authority, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        tls=tls_of(ca, key=ca.issue("two").key),
        access=[ENTRY],
        tokens_file=f"{tmp_path}/none",
        audit={"path": f"{tmp_path}/no/such/audit.log"},
    )
    audit, key, tokens = sorted(problems_of(path))
    assert audit.startswith("audit.path = ")
    assert audit.endswith(f": the directory {tmp_path}/no/such does not exist; mkdir -p {tmp_path}/no/such")
    assert key.startswith("tls.key = ")
    assert f": is not the key of the certificate {tmp_path}/server.pem" in key
    assert tokens.startswith(f"tokens_file = '{tmp_path}/none': does not exist; ")


# ---- the tokens file -------------------------------------------------------------------------------------------------

GOOD = {"name": "a", "sha256": digest_of(token_of(b"a" * 32)), "role": "engine", "tenant": "default"}


def test_a_digest_is_sha256_of_the_token_as_other_tools_make_it() -> None:
    # printf %s mft_0000...0000 (64 zeros) | sha256sum
    assert token_of(bytes(32)) == "mft_" + "0" * 64
    assert digest_of(token_of(bytes(32))) == "2f4693949a6bc59508c8d89502acbdb646d97424424c0e0ec1b9cd5ecfb6dffd"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- {name: a}", r"0\.sha256.*\n.*0\.role"),
        (json.dumps([{**GOOD, "sha256": token_of(b"a" * 32)}]), r"0\.sha256"),
        (json.dumps([GOOD, GOOD]), r"1\.name: is that of an entry before.*\n.*1\.sha256"),
        (json.dumps([{**GOOD, "role": "root"}]), r"0\.role"),
        (json.dumps([{**GOOD, "token": "x"}]), r"0\.token"),
        ("a: 1", "list"),
        ("- [", "not valid YAML"),
        (json.dumps([GOOD])[:-2] + ', "name": "b"}]', "0.name: stands twice"),
    ],
)
def test_bad_tokens_files(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "tokens"
    replace(path, text.encode(), mode=0o600)
    with pytest.raises(ConfigError) as caught:
        read_tokens(path)
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert "mft_" not in str(caught.value), "a token may have been put there by mistake"


def test_tokens_files_are_their_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    replace(path, json.dumps([GOOD]).encode(), mode=0o600)
    assert [entry.name for entry in read_tokens(path)] == ["a"]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640") as caught:
        read_tokens(path)
    assert f"chmod 600 {path}" in caught.value.next_step
    replace(path, b"\n", mode=0o600)
    assert read_tokens(path) == (), "nobody"


# ---- several addresses -----------------------------------------------------------------------------------------------


def test_a_socket_beside_tls(ca: Authority, tmp_path: Path) -> None:
    socket = f"unix://{tmp_path}/s"
    config = load_service_config(write(tmp_path, listen=[socket, "10.0.0.1:7700"], tls=tls_of(ca), access=[ENTRY]))
    assert config.listen == (socket, "10.0.0.1:7700")


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ([], "listen = .*: has 0 addresses; name 1 to 8"),
        ([f"127.0.0.1:{port}" for port in range(1, 10)], "listen = .*: has 9 addresses; name 1 to 8"),
        (["127.0.0.1:1", 7], "listen = .*: must be an address, or a list of addresses"),
        ({"a": "127.0.0.1:1"}, "listen = .*: must be an address, or a list of addresses"),
        (7, "listen = 7: must be an address, or a list of addresses"),
        (["127.0.0.1:1", "tcp://127.0.0.1:2"], "listen = .*: 'tcp://127.0.0.1:2' is not an address of a chunk service"),
        (["127.0.0.1:1", "127.0.0.1:1"], "listen = .*: names 127.0.0.1:1 and 127.0.0.1:1, and only one of them can"),
        (["127.0.0.1:1", "localhost:1"], "listen = .*: names 127.0.0.1:1 and localhost:1, and only one"),
        (["unix:///x", "unix:///x"], "listen = .*: names unix:///x and unix:///x, and only one"),
        (
            ["127.0.0.1:1", "10.0.0.1:2"],
            "listen = '10.0.0.1:2': is not a loopback address, and other machines are served",
        ),
        (
            ["127.0.0.1:1", "unix:///nowhere/s"],
            "listen = 'unix:///nowhere/s': the socket's directory /nowhere does not",
        ),
    ],
)
def test_several_addresses_that_cannot_be(tmp_path: Path, listen: object, expected: str) -> None:
    (problem,) = problems_of(write(tmp_path, listen=listen))
    assert re.match(expected, problem), problem


def test_certificates_are_for_some_address(ca: Authority, tmp_path: Path) -> None:
    sockets = [f"unix://{tmp_path}/s", f"unix://{tmp_path}/t"]
    (problem,) = problems_of(write(tmp_path, listen=sockets, tls=tls_of(ca), access=[ENTRY]))
    assert problem.startswith("tls: is not for a unix socket")


def test_monitors_have_a_place_of_their_own_beside_all(tmp_path: Path) -> None:
    telemetry = {"listen": "127.0.0.1:2"}
    (problem,) = problems_of(write(tmp_path, listen=["127.0.0.1:1", "127.0.0.1:2"], telemetry=telemetry))
    assert problem.startswith("telemetry.listen = '127.0.0.1:2': 127.0.0.1:2 is where engines connect, too")
