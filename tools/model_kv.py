"""What KV a model keeps: described by the engine's own code in a child process, without weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from meshfusion.host.kv.resume import LastWindow, LocalChunk, ResumeRule, StateAtBoundary, WholePrefix
from meshfusion.jbof.errors import MeshFusionError

CHILD_DEADLINE_S = 600.0
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
RULES: Final[dict[str, type[ResumeRule]]] = {
    rule.__name__: rule for rule in (WholePrefix, LastWindow, LocalChunk, StateAtBoundary)
}
_NEXT_STEP = "Name a folder with the config.json of a model that this vLLM can run."


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine would be started with, as its options of these names; None and "auto": its own choice."""

    tensor_parallel_size: int = 1
    block_size: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None


DEFAULT_SETTINGS: Final = EngineSettings()


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Layers of one group with equal specs. ``kind`` is empty for a class that has none. Bytes are of one page of one
    layer: what it writes, and what it takes up. ``block_tokens``: the tokens of a page, or between two states.
    ``limit_tokens``: how many tokens before a boundary are read at most; 0: all. ``is_state``: is a page one state?"""

    spec_class: str
    kind: str
    layers: int
    first_layer: str
    rule: str
    block_tokens: int
    real_bytes: int
    held_bytes: int
    limit_tokens: int
    is_state: bool

    @property
    def bytes_per_token(self) -> float:
        """Of all these layers; 0 for states."""
        return 0.0 if self.is_state else self.layers * self.real_bytes / self.block_tokens

    @property
    def bytes_per_state(self) -> int:
        """Of all these layers; 0 for what is kept by token."""
        return self.layers * self.real_bytes if self.is_state else 0


@dataclass(frozen=True, slots=True)
class GroupKv:
    """``refusals``: why its kind is not served, each "thing; way out"; empty: it is. ``rule``: what must be there to
    resume, None where the group is refused. ``ranks_per_shard``: how many ranks hold the same bytes of it."""

    members: tuple[LayerKv, ...]
    refusals: tuple[str, ...]
    rule: ResumeRule | None = None
    ranks_per_shard: int = 1

    @property
    def unit_bytes(self) -> int:
        """What is stored of a block of all its layers, on one rank."""
        return sum(member.layers * member.real_bytes for member in self.members)


@dataclass(frozen=True, slots=True)
class ModelKv:
    """``active_parameters``: those that one token is multiplied with, without embeddings. ``refusals``: of the engine
    as a whole. ``elapsed_s``: how long the child took."""

    engine: str
    platform: str
    groups: tuple[GroupKv, ...]
    parameters: int
    active_parameters: int
    refusals: tuple[str, ...]
    elapsed_s: float

    @property
    def all_refusals(self) -> tuple[str, ...]:
        return (*self.refusals, *(line for group in self.groups for line in group.refusals))


def rule_in_words(rule: ResumeRule) -> str:
    match rule:
        case WholePrefix():
            return "every block"
        case LastWindow(window):
            return f"the last {window - 1} tokens"
        case LocalChunk(stretch):
            return f"since the attention chunk of {stretch} tokens began"
        case StateAtBoundary():
            return "the state at the boundary"


def limit_tokens(rule: ResumeRule | None) -> int:
    """How many tokens before a boundary ``rule`` needs at most; 0: no limit."""
    match rule:
        case LastWindow(window):
            return window - 1
        case LocalChunk(stretch):
            return stretch
    return 0


def describe_model(model: Path, settings: EngineSettings = DEFAULT_SETTINGS) -> ModelKv:
    """Asks a child process, which takes some 20 to 60 seconds. Of several ranks it describes one; all are alike.

    Raises :class:`MeshFusionError` when there is no model, the engine cannot build it, or does not answer in time.
    """
    _check_config(model)
    with tempfile.TemporaryDirectory(prefix="mfctl-kinds-") as scratch:
        answer = Path(scratch) / "answer.json"
        child = [sys.executable, "-m", "meshfusion.tools.model_kv_child"]
        command = [*child, str(model.resolve()), str(answer), json.dumps(asdict(settings))]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=CHILD_DEADLINE_S
            )
        except subprocess.TimeoutExpired as error:
            raise MeshFusionError(
                f"the engine did not build {model} within {CHILD_DEADLINE_S:.0f} s", next_step=_NEXT_STEP
            ) from error
        if not answer.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise MeshFusionError(f"the engine ended while it built {model}: {last}", next_step=_NEXT_STEP)
        body = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in body:
        raise MeshFusionError(f"the engine cannot build {model}: {body['error']}", next_step=_NEXT_STEP)
    return from_object(body)


def _check_config(model: Path) -> None:
    """What need not wait for a child process."""
    if not model.is_dir():
        problem = "is not a folder" if model.exists() else "does not exist"
        is_name = not model.exists() and _HUB_NAME.fullmatch(str(model))
        download = "If it is the name of a model on a hub: download it first, then name its folder."
        raise MeshFusionError(f"{model} {problem}", next_step=download if is_name else _NEXT_STEP)
    config = model / "config.json"
    if not config.is_file():
        raise MeshFusionError(f"{model} has no config.json", next_step=_NEXT_STEP)
    try:
        body = json.loads(config.read_bytes())
    except (ValueError, RecursionError) as error:
        raise MeshFusionError(f"{config} is not JSON: {error}", next_step=_NEXT_STEP) from error
    if not isinstance(body, dict):
        raise MeshFusionError(f"{config} holds no object of settings", next_step=_NEXT_STEP)


def to_object(model: ModelKv) -> dict[str, Any]:
    """Plain values, for JSON. A rule is told by its class and what that has."""
    groups = [{**asdict(group), "rule": _rule_object(group.rule)} for group in model.groups]
    return {**asdict(model), "groups": groups}


def _rule_object(rule: ResumeRule | None) -> dict[str, Any] | None:
    return None if rule is None else {"class": type(rule).__name__, **asdict(rule)}


def _rule_from(body: dict[str, Any] | None) -> ResumeRule | None:
    return None if body is None else RULES[body["class"]](**{k: v for k, v in body.items() if k != "class"})


def from_object(body: dict[str, Any]) -> ModelKv:
    """From what :func:`to_object` makes of it."""
    groups = tuple(
        GroupKv(
            tuple(LayerKv(**member) for member in group["members"]),
            tuple(group["refusals"]),
            _rule_from(group["rule"]),
            group["ranks_per_shard"],
        )
        for group in body["groups"]
    )
    return ModelKv(**{**body, "groups": groups, "refusals": tuple(body["refusals"])})
