"""Checks an engine's ``--kv-transfer-config`` for this connector, before an engine is started with it."""

from __future__ import annotations

import difflib
from typing import Any

from meshfusion.dpu.api.address import parse_address
from meshfusion.dpu.config_problems import ConfigProblem, ConfigProblemsError
from meshfusion.dpu.yaml_document import YamlDocument
from meshfusion.host.connector.config import parse_connector_config
from meshfusion.jbof.errors import ConfigError

CLASS_NAME = "MeshFusionConnector"
MODULE_PATH = "meshfusion.host.connector.vllm"
EXTRA = "kv_connector_extra_config"
# The fields of vllm/config/kv_transfer.py in 0.32, and those that older versions had besides.
ENGINE_KEYS = (
    *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy", EXTRA),
    *("engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    "enable_permute_local_kv",
)


def check_connector_config(document: YamlDocument, name: str) -> None:
    """``document`` is a kv_transfer_config, or the connector's extra config alone.

    Raises :class:`~meshfusion.jbof.errors.ConfigError` that tells every problem.
    """
    data = document.data
    whole = isinstance(data, dict) and any(str(key).startswith("kv_") for key in data)
    extra = data.get(EXTRA, {}) if whole else data
    problems = _engine_problems(data, extra, document) if whole else []
    try:
        config = parse_connector_config(extra)
        if config.service is not None:
            parse_address(config.service)
    except ConfigError as e:
        if not problems:
            raise
        problems.append(ConfigProblem(EXTRA, e.message, e.next_step, line=document.line_of((EXTRA,))))
    if problems:
        raise ConfigProblemsError(name, tuple(problems), next_step="Correct these keys of the kv_transfer_config.")


def _engine_problems(data: dict[Any, Any], extra: object, document: YamlDocument) -> list[ConfigProblem]:
    problems: list[ConfigProblem] = []

    def add(key: str, problem: str, fix: str) -> None:
        problems.append(ConfigProblem(key, problem, fix, data.get(key), document.line_of((key,))))

    for key in data:
        if key not in ENGINE_KEYS:
            near = difflib.get_close_matches(str(key), ENGINE_KEYS, n=1)
            add(str(key), "unknown key", f"did you mean {near[0]}?" if near else "remove it")
    if data.get("kv_connector") != CLASS_NAME:
        add("kv_connector", "is not this connector", f"write {CLASS_NAME}")
    if data.get("kv_connector_module_path") != MODULE_PATH:
        add("kv_connector_module_path", "does not lead to this connector", f"write {MODULE_PATH}")
    if data.get("kv_role") != "kv_both":
        add("kv_role", "must be kv_both: this connector saves and loads", "write kv_both")
    forced = isinstance(extra, dict) and extra.get("force_load_failure_policy") is True
    if data.get("kv_load_failure_policy") != "recompute" and not forced:
        add("kv_load_failure_policy", "must be recompute, so that a failed load costs only time", "write recompute")
    return problems
