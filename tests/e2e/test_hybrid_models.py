"""The tiny models are what their table says. No engine is started here: :mod:`tests.e2e.test_hybrid_engines` does."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.harness import ROOT
from tests.e2e.hybrid_models import HYBRID_MODELS, make_hybrid_models

WEIGHTS = "model.safetensors"
MAX_BYTES = 20 << 20


IN_EVERY_RUN = ("gemma3", "qwen3-next")
"""Other tests make these anyway; to make them all takes a minute."""
ALL = [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.nightly) for name in HYBRID_MODELS]


def made(name: str) -> Path:
    return make_hybrid_models(ROOT / ".cache", [name])[name]


class Tensors:
    """A file of weights, read without the library that wrote it: its length, a JSON header, then the bytes."""

    def __init__(self, path: Path) -> None:
        self._bytes = path.read_bytes()
        (header_bytes,) = struct.unpack_from("<Q", self._bytes)
        self._start = 8 + header_bytes
        self.header: dict[str, Any] = json.loads(self._bytes[8 : self._start])
        self.header.pop("__metadata__", None)

    def values(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One tensor of bfloat16, flat: the upper halves of float32."""
        begin, end = self.header[name]["data_offsets"]
        halves = np.frombuffer(self._bytes, np.uint16, (end - begin) // 2, self._start + begin)
        return (halves.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", ALL)
def test_weights_and_config_agree(name: str) -> None:
    model, folder = HYBRID_MODELS[name], made(name)
    config = json.loads((folder / "config.json").read_text())
    tensors = Tensors(folder / WEIGHTS)
    assert (folder / WEIGHTS).stat().st_size < MAX_BYTES
    assert config["model_type"] == model.model_type
    assert {entry["dtype"] for entry in tensors.header.values()} == {"BF16"}

    layers = {int(found[1]) for key in tensors.header if (found := re.search(r"\.layers\.(\d+)\.", key))}
    kinds = model.config.get("layers_block_type", ())  # the family that has it counts nothing else
    assert layers == set(range(model.config.get("num_hidden_layers", len(kinds))))
    embeddings = [key for key in tensors.header if re.search(r"embed(_tokens|dings?)\.weight$", key)]
    assert [tensors.header[key]["shape"] for key in embeddings] == [[config["vocab_size"], config["hidden_size"]]]
    for key, entry in tensors.header.items():
        assert np.isfinite(tensors.values(key)).all(), key
        if len(entry["shape"]) > 1 and "conv" not in key:
            assert tensors.values(key).std() == pytest.approx(0.08, rel=0.1), key


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3-next", marks=pytest.mark.nightly)])
def test_made_twice_they_are_the_same_bytes(name: str, tmp_path: Path) -> None:
    again = make_hybrid_models(tmp_path, [name])[name]
    assert again.is_relative_to(tmp_path)
    for file in (WEIGHTS, "config.json"):
        first, second = (hashlib.sha256((folder / file).read_bytes()).digest() for folder in (made(name), again))
        assert first == second


def test_the_models_have_every_kind_of_kv() -> None:
    kinds = {group.spec for model in HYBRID_MODELS.values() for group in model.groups}
    assert kinds == {
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "MLAAttentionSpec",
        "MambaSpec",
    }


def test_what_does_not_run_here_says_why() -> None:
    for model in HYBRID_MODELS.values():
        assert model.groups, model.name
        assert model.runs_on_cpu or model.reason, model.name
