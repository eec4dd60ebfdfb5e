"""What the benchmarks with an engine share: the model, the prompt, the connector's configuration, the service."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshfusion.jbof.errors import ServiceError
from meshfusion.tools.bench.machine import ROOT
from meshfusion.tools.bench.report import Progress
from meshfusion.tools.engine_process import Answer, EngineProcess, engine_process
from meshfusion.tools.quickstart import DOCUMENT, read_prompt
from meshfusion.tools.quickstart_engine import EngineTask
from meshfusion.tools.quickstart_model import DEFAULT_MODEL_DIR, prepare_model

ANSWER_TOKENS = 16
KV_CACHE_GIB = 2
POOL_SIZE = "1GiB"
READY_DEADLINE_S = 60.0


def default_model(progress: Progress) -> Path:
    """The quickstart's model folder, made if it is not there yet."""
    return prepare_model(ROOT / DEFAULT_MODEL_DIR, progress).absolute()


def prompt_of(model: Path, tokens: int) -> tuple[int, ...]:
    return read_prompt(model, DOCUMENT, tokens)


def connector(**extra_config: Any) -> dict[str, Any]:
    """``kv_transfer_config`` for our connector; ``extra_config`` names the pool or the service."""
    return {
        "kv_connector": "MeshFusionConnector",
        "kv_connector_module_path": "meshfusion.host.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra_config,
    }


def embedded(pool: Path, **extra_config: Any) -> dict[str, Any]:
    return connector(pool={"path": str(pool), "size": POOL_SIZE}, **extra_config)


def engine_task(
    model: Path, token_ids: tuple[int, ...], kv_transfer_config: dict[str, Any] | None, *, ask_again: bool = False
) -> EngineTask:
    """The same engine options for whatever is compared. ``ask_again``: to learn what its own cache would answer."""
    return EngineTask(
        model=str(model),
        token_ids=token_ids,
        answer_tokens=ANSWER_TOKENS,
        ask_again=ask_again,
        max_model_len=len(token_ids) + 64,  # 8,064 tokens and one must fit into a model of 8,192
        kv_cache_gib=KV_CACHE_GIB,
        kv_transfer_config=kv_transfer_config,
        report_fd=-1,
    )


RESERVED_CPUS = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "2"}
"""As vLLM 0.32 does for itself beside a connector. Without one it reserves 1: of two cores the model then gets one, not
two."""


@contextmanager
def bench_engine(task: EngineTask, log: Path) -> Iterator[EngineProcess]:
    """An engine process on as many processors as any other, which says nothing of its own steps."""
    with engine_process(task, log, lambda text: None, environment=RESERVED_CPUS) as engine:
        yield engine


def ask_once(task: EngineTask, log: Path) -> Answer:
    """Start an engine process, ask, end it."""
    with bench_engine(task, log) as engine:
        return engine.answer()


@contextmanager
def running_service(directory: Path, pool: Path) -> Iterator[tuple[str, int]]:
    """A ``meshfusion`` daemon over ``pool`` (made when absent); its address and process id."""
    directory.mkdir(parents=True, exist_ok=True)
    config, log = directory / "service.yaml", directory / "service.log"
    config.write_text(
        f"listen: unix://{directory / 'service.sock'}\n"
        f"pool:\n  path: {pool}\n  create: true\n  size: {POOL_SIZE}\nlog:\n  level: warning\n"
    )
    command = [str(Path(sys.executable).with_name("meshfusion")), "--config", str(config), "--format", "json"]
    with log.open("w") as log_file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log_file, text=True)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], READY_DEADLINE_S)
        line = process.stdout.readline() if readable else ""
        if not line:
            raise ServiceError(f"the service did not start: {log.read_text()[-2000:]}", next_step=f"read {log}")
        yield json.loads(line)["address"], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stdout.close()
