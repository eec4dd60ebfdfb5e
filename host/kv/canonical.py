"""Values written down exactly and one way, so that equal facts give equal digests in every process."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch

from meshfusion.jbof.errors import UnsupportedError

# Where a configuration came from, not what it says.
_HF_VOLATILE_KEYS = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def normalised_hf_config(value: Any) -> Any:
    """The model's configuration without its origin; dtype spelled one way (``torch_dtype`` is the older name)."""
    if isinstance(value, Mapping):
        clean = {}
        for key, item in value.items():
            name = "dtype" if key == "torch_dtype" else str(key)
            if name in _HF_VOLATILE_KEYS or (key == "torch_dtype" and value.get("dtype") is not None):
                continue
            clean[name] = str(item).removeprefix("torch.") if name == "dtype" else normalised_hf_config(item)
        return clean
    if isinstance(value, list | tuple):
        return [normalised_hf_config(item) for item in value]
    return value


def canonical_json(value: Any) -> str:
    return json.dumps(
        _plain(value, ""),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )


def _plain(value: Any, where: str) -> Any:
    """As JSON, exactly, or a refusal: a ``repr`` might hold an address or leave something out."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype | Fraction):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(_plain(key, where)): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(item, where), sort_keys=True) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    raise UnsupportedError(
        f"identity: {where.lstrip('.')} is a {type(value).__name__}, which cannot be written down exactly",
        next_step="start the engine without this connector, or without the option named",
    )
