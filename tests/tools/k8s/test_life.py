"""A pod's life, with a service in a process: the rendered commands and probes are what a real service answers to."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshfusion.dpu.api.security.files import read_secret
from meshfusion.jbof.errors import FieldValueError
from meshfusion.tools.mfctl.main import mfctl
from tests.host.support.waiting import until
from tests.tools.k8s.cases import one, service
from tests.tools.mfctl.service_process import ServiceProcess


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rendered(config: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(mfctl, ["k8s", "render", "--config", str(config), "--image", "m:1", "--format", "json"])
    assert result.exit_code == 0, result.output
    items: list[dict[str, Any]] = json.loads(result.stdout)["items"]
    return items


def asked(probe: dict[str, Any]) -> int:
    """As the kubelet does it: the status of the answer."""
    get = probe["httpGet"]
    connection = http.client.HTTPConnection(get["host"], get["port"], timeout=probe["timeoutSeconds"])
    try:
        connection.request("GET", get["path"])
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def test_a_pod_starts_is_ready_and_drains(tmp_path: Path) -> None:
    for name in ("run", "data"):
        (tmp_path / name).mkdir()
    config = tmp_path / "service.yaml"
    config.write_text(
        f"listen: unix://{tmp_path}/run/s\n"
        f"pool: {{path: {tmp_path}/data/pool, create: true, size: 8MiB, segment_size: 1MiB}}\n"
        f"telemetry: {{listen: '127.0.0.1:{free_port()}'}}\n"
    )
    items = rendered(config)
    container = service(items, "DaemonSet")
    # The pod's file, where the pod's command names it.
    config.write_text(one(items, "ConfigMap")["data"]["service.yaml"])
    assert asked(container["startupProbe"]) == 0, "nothing is there yet"
    with ServiceProcess(config) as running:
        assert asked(container["startupProbe"]) == asked(container["livenessProbe"]) == 200
        until(lambda: asked(container["readinessProbe"]) == 200)
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (command[0], command[4]) == ("mfctl", "/etc/meshfusion/service.yaml")
        began_s = time.monotonic()
        words = [sys.executable, "-m", "meshfusion.tools.mfctl.main", *command[1:4], str(config), *command[5:]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60.0)
        assert done.returncode == 0, done.stderr
        assert running.end() == 0
        assert (
            time.monotonic() - began_s
            < one(items, "DaemonSet")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        )
        assert asked(container["livenessProbe"]) == 0


def test_files_of_a_secret_are_taken_as_kubernetes_lays_them(tmp_path: Path) -> None:
    """Each name is a link through ..data, which changes to another directory at once when the Secret does."""
    first, second = tmp_path / "..2026_1", tmp_path / "..2026_2"
    for folder, text in ((first, b"old"), (second, b"new")):
        (folder / "tls").mkdir(parents=True)
        (folder / "tls" / "service.key").write_bytes(text)
        (folder / "tls" / "service.key").chmod(0o400)
    os.symlink(first.name, tmp_path / "..data")
    os.symlink("..data/tls", tmp_path / "tls")
    key = tmp_path / "tls" / "service.key"
    assert read_secret(key, "key").data == b"old"
    os.symlink(second.name, tmp_path / "..next")
    os.replace(tmp_path / "..next", tmp_path / "..data")
    assert read_secret(key, "key").data == b"new"
    os.chmod(second / "tls" / "service.key", stat.S_IRUSR | stat.S_IROTH)
    with pytest.raises(FieldValueError, match="other users can read"):
        read_secret(key, "key")
