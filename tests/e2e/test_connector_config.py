"""What ``mfctl connector config`` writes for a running service, given to engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshfusion.tools.mfctl.main import mfctl
from tests.e2e.conftest import Prompts
from tests.e2e.daemon import Daemon
from tests.e2e.harness import BLOCK_TOKENS, UNIT_BYTES, Engines

CHUNK_BLOCKS = (1 << 20) // UNIT_BYTES
"""Of the connector's own choice: blocks that make a MiB."""


@pytest.mark.nightly
def test_an_engine_started_with_it_saves_and_another_one_loads(
    model: Path, engines: Engines, prompts: Prompts, tmp_path: Path
) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    try:
        arguments = ["connector", "config", "--config", str(tmp_path / "service.yaml"), "--format", "json"]
        written = CliRunner().invoke(mfctl, arguments)
        assert written.exit_code == 0, written.output
        transfer = json.loads(written.stdout)["kv_transfer_config"]
        # Only for a busy machine: every hit shall be seen.
        transfer["kv_connector_extra_config"] |= {"lookup_deadline_ms": 5000, "load_always": True}
        answers = []
        for _ in range(2):
            engine = engines.start(model, None, kv_transfer_config=transfer)
            answers.append(engine.answer(prompts.aligned))
            engine.settle(pool=False)
            engine.close()
        status = daemon.wait_idle(holders=0)
        assert status.committed_chunk_count == len(prompts.aligned) // (CHUNK_BLOCKS * BLOCK_TOKENS)
        assert [answer.cached for answer in answers] == [0, len(prompts.aligned)]
        assert answers[0].tokens == answers[1].tokens
    finally:
        daemon.kill()
