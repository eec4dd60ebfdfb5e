"""``vllm serve`` as the README says it: two servers, one after the other; the second answers from the pool."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshfusion.tools.quickstart import DOCUMENT, read_prompt
from meshfusion.tools.quickstart_model import DEFAULT_MODEL_DIR, prepare_model
from tests.e2e.harness import ROOT

START_DEADLINE_S = 600.0
ANSWER_DEADLINE_S = 120.0
PROMPT_TOKENS = 700
WHOLE_CHUNK_TOKENS = 640
LOADED = "vllm:meshfusion_loaded_bytes_total"
COMMITTED = "vllm:meshfusion_chunks_committed_total"


def documented_config(pool: Path) -> str:
    """The README's, with another place and size of the pool."""
    (text,) = re.findall(r"vllm serve MODEL --kv-transfer-config '(\{.*?\})'", (ROOT / "README.md").read_text(), re.S)
    config = json.loads(text)
    config["kv_connector_extra_config"]["pool"] = {"path": str(pool), "size": "512MiB"}
    return json.dumps(config)


@contextmanager
def serving(model: Path, pool: Path, log: Path) -> Iterator[str]:
    """A server's address; it is stopped as a user stops it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--kv-transfer-config", documented_config(pool)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        end_s = time.monotonic() + START_DEADLINE_S
        while not is_healthy(address):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end_s, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def answer(address: str, model: Path, token_ids: tuple[int, ...]) -> str:
    body = {"model": str(model), "prompt": list(token_ids), "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_DEADLINE_S) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") or line.startswith(f"{name} "))


def test_a_second_server_answers_from_what_the_first_one_saved(tmp_path: Path) -> None:
    def silent(_: Any) -> None: ...

    model = prepare_model(ROOT / DEFAULT_MODEL_DIR, silent)
    token_ids = read_prompt(model, DOCUMENT, PROMPT_TOKENS)
    pool = tmp_path / "pool"
    with serving(model, pool, tmp_path / "first.log") as address:
        answer(address, model, token_ids)
        own = answer(address, model, token_ids)  # from its own prefix cache: one token computed, as after a load
        end_s = time.monotonic() + 60
        while metric(address, COMMITTED) < WHOLE_CHUNK_TOKENS / 128:
            assert time.monotonic() < end_s, "not all whole chunks were committed"
            answer(address, model, token_ids[:20])  # metrics come with an engine's steps
            time.sleep(0.5)
        assert metric(address, LOADED) == 0
    with serving(model, pool, tmp_path / "second.log") as address:
        assert answer(address, model, token_ids) == own
        assert metric(address, LOADED) > 0


@pytest.mark.parametrize("name", ["vllm", "mfctl", "meshfusion"])
def test_the_commands_that_the_readme_names_start(name: str) -> None:
    command = [str(Path(sys.executable).with_name(name)), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
