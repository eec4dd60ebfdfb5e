from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.host.kv import weights
from meshfusion.host.kv.weights import FileDigester, processor_fact, resolve_model_folder, weights_fact
from meshfusion.jbof.errors import UnsupportedError


def model_of(folder: Path | str, **more: Any) -> Any:
    return SimpleNamespace(model=str(folder), model_weights="", revision=None, trust_remote_code=False, **more)


def load_of(load_format: str = "auto") -> Any:
    return SimpleNamespace(load_format=load_format, download_dir=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "model-00001.safetensors").write_bytes(b"a" * 5000)
    (path / "model-00002.safetensors").write_bytes(b"b" * 3000)
    (path / "model.safetensors.index.json").write_text("{}")
    (path / "config.json").write_text("{}")
    return path


def digester(tmp_path: Path, **more: Any) -> FileDigester:
    return FileDigester(cache_path=tmp_path / "cache" / "weights.json", settle_s=-1.0, **more)


def by_hand(content: bytes) -> str:
    """The tree written out once more, from its description."""
    ranges = [content[at : at + weights.RANGE_BYTES] for at in range(0, len(content), weights.RANGE_BYTES)]
    leaves = b"".join(hashlib.sha256(part).digest() for part in ranges)
    return hashlib.sha256(struct.pack("<Q", len(content)) + leaves).hexdigest()


@given(content=st.binary(max_size=400), threads=st.integers(1, 4))
def test_file_digest_is_the_tree_it_says(
    content: bytes, threads: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("w") / "f.bin"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "RANGE_BYTES", 64)
        patch.setattr(weights, "READ_BYTES", 24)
        assert FileDigester(cache_path=None, thread_count=threads).digest_files([path]) == {path: by_hand(content)}


def test_content_and_name_count_but_not_the_folder(folder: Path, tmp_path: Path) -> None:
    first = weights_fact(model_of(folder), load_of(), digester=digester(tmp_path))
    assert first.startswith("files:")
    moved = folder.rename(tmp_path / "elsewhere")
    assert weights_fact(model_of(moved), load_of(), digester=digester(tmp_path)) == first
    (moved / "config.json").write_text("not weights")
    (moved / "notes.txt").write_text("not weights")
    assert weights_fact(model_of(moved), load_of(), digester=digester(tmp_path)) == first
    (moved / "model-00002.safetensors").write_bytes(b"b" * 2999 + b"c")
    second = weights_fact(model_of(moved), load_of(), digester=digester(tmp_path))
    assert second != first
    (moved / "model-00002.safetensors").rename(moved / "model-00003.safetensors")
    assert weights_fact(model_of(moved), load_of(), digester=digester(tmp_path)) not in (first, second)


def test_remote_code_counts_when_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    model = model_of(folder)
    model.trust_remote_code = True
    (folder / "modeling.py").write_text("x = 1")
    first = weights_fact(model, load_of(), digester=digester(tmp_path))
    (folder / "modeling.py").write_text("x = 2")
    assert weights_fact(model, load_of(), digester=digester(tmp_path)) != first


def count_reads(patch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []
    original = weights._digest_range

    def counting(path: Path, start: int, length: int) -> bytes:
        read.append(path)
        return original(path, start, length)

    patch.setattr(weights, "_digest_range", counting)
    return read


def test_cache_spares_reading_until_the_file_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_reads(monkeypatch)
    first = weights_fact(model_of(folder), load_of(), digester=digester(tmp_path))
    assert len(read) == 3
    assert weights_fact(model_of(folder), load_of(), digester=digester(tmp_path)) == first
    assert len(read) == 3
    changed = folder / "model-00001.safetensors"
    before = changed.stat()
    changed.write_bytes(b"z" * 5000)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same mtime, same inode
    assert weights_fact(model_of(folder), load_of(), digester=digester(tmp_path)) != first
    assert read[3:] == [changed]


def test_young_files_are_not_remembered(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_reads(monkeypatch)
    for _ in range(2):
        FileDigester(cache_path=tmp_path / "c.json", settle_s=3600).digest_files([folder / "config.json"])
    assert len(read) == 2
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff", b"[]", b"{}", b'{"version": 1}', b'{"version": 9, "files": {}}', b'{"version": 1, "files": []}',
     b'{"version": 1, "files": {"x": {"stamp": 3, "digest": "00"}}}', b'{"version": 1, "files": {"x": null}}'],
)  # fmt: skip
def test_damaged_cache_is_ignored_and_replaced(folder: Path, tmp_path: Path, content: bytes) -> None:
    clean = weights_fact(model_of(folder), load_of(), digester=FileDigester(cache_path=None))
    path = digester(tmp_path).cache_path
    assert path is not None
    path.parent.mkdir()
    path.write_bytes(content)
    assert weights_fact(model_of(folder), load_of(), digester=digester(tmp_path)) == clean
    assert json.loads(path.read_text())["version"] == weights.CACHE_VERSION


def test_cache_that_cannot_be_written_is_only_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert weights_fact(model_of(folder), load_of(), digester=digester(tmp_path)).startswith("files:")
    assert "computed again" in caplog.text


def test_several_processes_share_one_cache(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from meshfusion.host.kv.weights import *\n"
        "d = FileDigester(cache_path=Path(sys.argv[2]), settle_s=-1.0)\n"
        "m = N(model=sys.argv[1], model_weights='', revision=None, trust_remote_code=False)\n"
        "print(weights_fact(m, N(load_format='auto', download_dir=None), digester=d))"
    )
    cache = tmp_path / "shared.json"
    jobs = [
        subprocess.Popen([sys.executable, "-c", script, str(folder), str(cache)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = {job.communicate(timeout=60)[0].strip() for job in jobs}
    assert answers == {weights_fact(model_of(folder), load_of(), digester=FileDigester(cache_path=None))}
    assert len(json.loads(cache.read_text())["files"]) == 3
    assert [path.name for path in tmp_path.iterdir() if "shared" in path.name] == ["shared.json"]


def test_progress_reaches_the_total(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    weights_fact(
        model_of(folder),
        load_of(),
        digester=digester(tmp_path, progress=lambda done, total: seen.append((done, total))),
    )
    assert seen[-1] == (8002, 8002)
    assert seen == sorted(seen)


def test_a_file_that_changes_while_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = weights._digest_range

    def touching(path: Path, start: int, length: int) -> bytes:
        digest = original(path, start, length)
        path.write_bytes(b"longer than before" * 1000)
        return digest

    monkeypatch.setattr(weights, "_digest_range", touching)
    with pytest.raises(UnsupportedError, match="changed while they were read"):
        weights_fact(model_of(folder), load_of(), digester=FileDigester(cache_path=None))


def test_refusals_name_the_way_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for load_format in ("dummy", "tensorizer", "runai_streamer", "gguf"):
        with pytest.raises(UnsupportedError, match="weights_id"):
            weights_fact(model_of(folder), load_of(load_format))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UnsupportedError, match="no weight files"):
        weights_fact(model_of(empty), load_of())
    monkeypatch.setenv("HF_HUB_CACHE", str(empty))
    with pytest.raises(UnsupportedError, match="cannot find the files of model 'nobody/nothing'"):
        weights_fact(model_of("nobody/nothing"), load_of())
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(UnsupportedError, match="ModelScope"):
        resolve_model_folder(model_of("nobody/nothing"), load_of())


def test_unreadable_file_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot read"):
        FileDigester(cache_path=None).digest_files([folder / "gone.bin"])


def test_vouched_weights(folder: Path) -> None:
    assert weights_fact(model_of(folder), load_of("dummy"), weights_id="mine-3") == "vouched:mine-3"
    for wrong in ("", "  ", 7):
        with pytest.raises(UnsupportedError, match="weights_id"):
            weights_fact(model_of(folder), load_of(), weights_id=wrong)  # type: ignore[arg-type]


def test_hub_id_resolves_to_its_local_snapshot(tmp_path: Path, folder: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc123"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc123")
    load = SimpleNamespace(load_format="auto", download_dir=str(tmp_path / "hub"))
    assert resolve_model_folder(model_of("org/name"), load) == snapshot


def test_processor_files(folder: Path) -> None:
    assert processor_fact(model_of(folder), load_of()) == ""
    (folder / "preprocessor_config.json").write_text('{"size": 1}')
    first = processor_fact(model_of(folder), load_of())
    (folder / "preprocessor_config.json").write_text('{"size": 2}')
    assert processor_fact(model_of(folder), load_of()) not in ("", first)
