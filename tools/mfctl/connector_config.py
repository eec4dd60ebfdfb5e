"""Checks an engine's ``--kv-transfer-config`` for this connector, before an engine is started with it."""

from __future__ import annotations

import difflib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshfusion.dpu.api.security.client_security import ClientSecurity, check_client_files
from meshfusion.dpu.config_pool import NewPool, look_at_pool, pool_is_absent, room_problem, without_effect
from meshfusion.dpu.config_surroundings import directory_problem, size_or_none, unfit_sizes
from meshfusion.dpu.pool_sizes import usual_segment_bytes
from meshfusion.dpu.yaml_document import YamlDocument
from meshfusion.host.connector.config import EXTRA_CONFIG, EmbeddedPool, examine_connector_config
from meshfusion.jbof.config_problems import ConfigProblem, ConfigProblemsError, FieldPath
from meshfusion.jbof.errors import FieldValueError

CLASS_NAME = "MeshFusionConnector"
MODULE_PATH = "meshfusion.host.connector.vllm"
# The fields of vllm/config/kv_transfer.py in 0.32, and those that older versions had besides.
ENGINE_KEYS = (
    *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy", EXTRA_CONFIG),
    *("engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    "enable_permute_local_kv",
)


def check_connector_config(document: YamlDocument, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``document`` is a kv_transfer_config, or the connector's extra config alone.

    Returns what is configured without effect, and what the embedded pool would start with, but not be whole. Raises
    :class:`~meshfusion.jbof.errors.ConfigError` that tells every problem, also of the embedded pool: whether it opens,
    or will find room to be made.
    """
    data = document.data
    whole = isinstance(data, dict) and any(str(key).startswith("kv_") for key in data)
    extra = data.get(EXTRA_CONFIG, {}) if whole else data
    at = (EXTRA_CONFIG,) if whole else ()
    problems = _engine_problems(data, extra, document) if whole else []
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    if isinstance(extra, dict):
        config, found = examine_connector_config(extra, document, at=at)
        of_pool, warnings = _look_at_pool(extra.get("pool"), document, (*at, "pool"))
        problems += [*found, *of_pool]
        if config is not None and config.pool is not None:
            notes = _notes(config.pool)
        elif config is not None:
            notes, bad = check_client_files(config.security, datetime.now(UTC))
            problems += [_file_problem(config.security, error, document, at) for error in bad]
    else:
        fix = 'write for example {"pool": {"path": "/var/lib/meshfusion/pool"}}'
        problem = "must be a mapping of keys to values"
        problems.append(ConfigProblem(EXTRA_CONFIG, problem, fix, extra, document.line_of(at)))
    if problems:
        next_step = "Correct these keys of the kv_transfer_config." if whole else "Correct these keys."
        raise ConfigProblemsError(name, tuple(problems), next_step=next_step)
    return notes, warnings


def _file_problem(
    security: ClientSecurity, error: FieldValueError, document: YamlDocument, at: FieldPath
) -> ConfigProblem:
    where = (*at, *security.label(error.field).split("."))
    value = str(getattr(security, error.field))
    return ConfigProblem(".".join(map(str, where)), error.problem, error.fix, value, document.line_of(where))


def _look_at_pool(pool: Any, document: YamlDocument, at: FieldPath) -> tuple[list[ConfigProblem], tuple[str, ...]]:
    """What this machine has against the embedded pool, and what it lacks. Read from the raw data, to be told along with
    all the rest."""
    text = pool.get("path") if isinstance(pool, dict) else None
    if not isinstance(text, str) or not text or "\0" in text:
        return [], ()
    path = Path(text).absolute()

    def problem_at(field: str, problem: str, fix: str) -> ConfigProblem:
        where = (*at, field)
        return ConfigProblem(".".join(map(str, where)), problem, fix, pool.get(field), document.line_of(where))

    if not pool_is_absent(path):
        found = look_at_pool(path)
        return [problem_at(*found.problem)] if found.problem else [], found.warnings
    default_bytes: int = EmbeddedPool.model_fields["size"].default
    problems = [problem_at(field, why, fix) for field, _, why, fix in unfit_sizes(pool, default_size=default_bytes)]
    folder = path if path.is_dir() else path.parent
    unusable = directory_problem(folder)
    if unusable:
        problems.append(problem_at("path", f"the directory {folder} {unusable[0]}", unusable[1]))
    size_bytes = size_or_none(pool.get("size", default_bytes))
    if not problems and size_bytes is not None:
        no_room = room_problem(NewPool(path, size_bytes, usual_segment_bytes(size_bytes)))
        problems += [problem_at(*no_room)] if no_room else []
    return problems, ()


def _notes(pool: EmbeddedPool) -> tuple[str, ...]:
    given = pool.model_fields_set
    return without_effect(
        pool.path,
        size_bytes=pool.size if "size" in given else None,
        segment_bytes=pool.segment_size if "segment_size" in given else None,
    )


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
        unset = "is not set, and vLLM's default is 'fail': it " if "kv_load_failure_policy" not in data else ""
        problem = f"{unset}must be recompute, so that a failed load costs only time"
        add("kv_load_failure_policy", problem, "write recompute")
    return problems
