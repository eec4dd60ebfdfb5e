"""The commands of docs/security.md, run as they stand there, make what a service and an engine can use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshfusion.dpu.access.tokens_file import TokensFile
from meshfusion.dpu.api.client import GrpcChunkService
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.identity import CallerIdentity
from meshfusion.dpu.api.security.roles import Role
from meshfusion.dpu.api.security.server_tls import ServerTls, ServerTlsFiles
from meshfusion.dpu.api.server import serve
from meshfusion.dpu.config_access import AccessEntry
from meshfusion.host.connector.config import parse_connector_config
from meshfusion.jbof.errors import PermissionDeniedError
from tests.dpu.api.fake_service import FakeChunkService
from tests.dpu.security.test_guard import attach_request

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"


def parts(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)


def moved(text: str, folder: Path) -> str:
    return text.replace("/etc/meshfusion/tls", str(folder))


def test_what_the_document_makes_is_what_the_service_takes(tmp_path: Path) -> None:
    commands, _, look = parts("sh")
    subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True, capture_output=True)
    (configuration,) = parts("yaml")
    service = yaml.safe_load(moved(configuration, tmp_path))
    files = ServerTlsFiles(**{name: Path(path) for name, path in service["tls"].items()})
    subjects = {entry["subject"]: AccessEntry(**entry).principal() for entry in service["access"]}
    server = serve(FakeChunkService(), "127.0.0.1:0", guard=Guard(CallerIdentity(subjects)), tls=ServerTls(files))
    (connector,) = parts("json")
    config = parse_connector_config(yaml.safe_load(moved(connector, tmp_path).replace("10.0.0.1:7700", server.address)))
    assert config.service is not None
    client = GrpcChunkService(config.service, config.security)
    client.attach(attach_request(), deadline_s=5.0)
    with pytest.raises(PermissionDeniedError):
        client.status(deadline_s=5.0)
    client.close()

    def looked_at(command: str) -> str:
        address = command.replace("10.0.0.1:7700", server.address)
        done = subprocess.run(["sh", "-c", address], cwd=tmp_path, capture_output=True, timeout=30)
        return done.stdout.decode("ascii", "replace")  # with what the service sends first, which is no text

    good = looked_at(look)
    assert "Verify return code: 0 (ok)" in good
    assert "unexpected eof" not in good
    without = looked_at(look.replace("-cert engine-1.pem -key engine-1.key", ""))
    assert "Verify return code: 0 (ok)" in without
    assert "unexpected eof" in without
    assert "Verify return code: 0 (ok)" not in looked_at(look.replace("-CAfile ca.pem", ""))
    (tmp_path / "other").mkdir()
    subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path / "other", check=True, capture_output=True)
    assert "unexpected eof" in looked_at(look.replace("engine-1.", "other/engine-1."))
    server.stop(0.0)


def test_the_token_that_the_document_makes_is_found(tmp_path: Path) -> None:
    _, commands, _ = parts("sh")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["sh", "-e", "-c", commands], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, capture_output=True
    )
    found = TokensFile(tmp_path / "tokens.yaml").find((tmp_path / "monitor.token").read_text().strip())
    assert found is not None
    assert found.roles == {Role.READ_ONLY}
