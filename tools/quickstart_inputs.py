"""What the quickstart is given, checked: all that can be refused at once, before anything large is imported."""

from __future__ import annotations

import json
import os
from pathlib import Path

from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.sizes import parse_size_bytes

ANSWER_TOKENS = 16
CONTEXT_MIN = 256


def read_prompt(model: Path, document: Path, context: int) -> tuple[int, ...]:
    """The first ``context`` tokens of the document, and one more. Raises ConfigError when model, document or length do
    not fit."""
    check_model_dir(model)
    text = read_document(document)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoTokenizer

    try:
        limit = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # whatever transformers meets in somebody's files
        first_line = str(error).partition("\n")[0]  # its advice is not ours
        raise _unusable_model(model, f"{type(error).__name__}: {first_line}") from error
    if limit is not None and context + 1 + ANSWER_TOKENS > limit:
        raise ConfigError(
            f"--context {context} does not fit the model's {limit} positions",
            next_step=_advise_context(limit - ANSWER_TOKENS - 1, "another --model"),
        )
    token_ids = tokenizer(text).input_ids
    if len(token_ids) <= context:
        raise ConfigError(
            f"--document {document} has {len(token_ids)} tokens, --context {context} needs {context + 1}",
            next_step=_advise_context(len(token_ids) - 1, "a longer --document"),
        )
    return tuple(token_ids[: context + 1])


def _advise_context(context_max: int, otherwise: str) -> str:
    return f"use --context {context_max} or {otherwise}" if context_max >= CONTEXT_MIN else f"use {otherwise}"


def check_context(context: int) -> None:
    """Raises ConfigError for less than ``CONTEXT_MIN``."""
    if context < CONTEXT_MIN:
        raise ConfigError(
            f"--context {context} is too short to reuse anything", next_step=f"use at least {CONTEXT_MIN}"
        )


def read_document(document: Path) -> str:
    """The text. Raises ConfigError unless it is a file of UTF-8 text."""
    next_step = "give the path of a UTF-8 text file, or leave --document out"
    if not document.is_file():
        problem = "is not a file" if document.exists() else "does not exist"
        raise ConfigError(f"--document {document} {problem}", next_step=next_step)
    try:
        return document.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--document {document} is not UTF-8 text (byte {error.start})", next_step=next_step
        ) from error


def check_model_dir(model: Path) -> None:
    """Raises ConfigError unless there is a config.json that can be read; what it says is left to transformers."""
    config = model / "config.json"
    if not config.is_file():
        raise _unusable_model(model, "it has no config.json")
    try:
        is_object = isinstance(json.loads(config.read_text(encoding="utf-8")), dict)
    except ValueError as error:
        raise _unusable_model(model, f"its config.json is not JSON: {error}") from error
    if not is_object:
        raise _unusable_model(model, "its config.json is not a JSON object")


def _unusable_model(model: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{model} is not a usable model folder: {why}",
        next_step="give the path of a folder in Hugging Face format, with a config.json and the weights",
    )


def check_pool_size(pool_size: str) -> None:
    """Raises ConfigError for what is no size, and for one that an embedded pool cannot be made with."""
    from meshfusion.dpu.pool_sizes import size_problems
    from meshfusion.host.connector.config import EmbeddedPool

    next_step = "use a size such as --pool-size 4GiB"
    try:
        size_bytes = parse_size_bytes(pool_size)
    except ValueError as error:
        raise ConfigError(f"--pool-size: {error}", next_step=next_step) from error
    for problem in size_problems(size_bytes, EmbeddedPool.model_fields["segment_size"].default):
        raise ConfigError(f"--pool-size {pool_size}: {problem.problem}", next_step=next_step)
