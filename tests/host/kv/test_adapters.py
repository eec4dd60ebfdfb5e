from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshfusion.host.kv.adapters import NO_ADAPTER, AdapterDigests


def adapter(folder: Path, number: int, content: bytes = b"w" * 100) -> Any:
    path = folder / f"adapter{number}"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text('{"r": 8}')
    (path / "adapter_model.safetensors").write_bytes(content)
    return SimpleNamespace(
        lora_name=f"a{number}", lora_int_id=number, lora_path=str(path), load_inplace=False, is_3d_lora_weight=False
    )


def test_content_decides_not_name_or_path(tmp_path: Path) -> None:
    digests = AdapterDigests()
    first, same, other = adapter(tmp_path, 1), adapter(tmp_path, 2), adapter(tmp_path, 3, b"v" * 100)
    assert digests.digest(None) == NO_ADAPTER == b""
    got = digests.digest(first)
    assert got is not None
    assert len(got) == 32
    assert digests.digest(first) == got == digests.digest(same) == AdapterDigests().digest(first)
    assert digests.digest(other) not in (None, got)
    (Path(other.lora_path) / "adapter_config.json").write_text('{"r": 16}')
    assert AdapterDigests().digest(other) != digests.digest(adapter(tmp_path, 4, b"v" * 100))


def test_what_changes_the_bytes_besides_the_files(tmp_path: Path) -> None:
    plain, fused = adapter(tmp_path, 1), adapter(tmp_path, 2)
    fused.is_3d_lora_weight = True
    assert AdapterDigests().digest(plain) != AdapterDigests().digest(fused)
    assert AdapterDigests(lora_dtype="float16").digest(plain) != AdapterDigests(lora_dtype="bfloat16").digest(plain)


def replace_content(request: Any) -> None:
    (Path(request.lora_path) / "adapter_model.safetensors").write_bytes(b"x" * 100)


def replace_hiding_the_time(request: Any) -> None:
    path = Path(request.lora_path) / "adapter_model.safetensors"
    before = path.stat()
    path.write_bytes(b"x" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def add_file(request: Any) -> None:
    (Path(request.lora_path) / "new_embeddings.safetensors").write_bytes(b"x")


def move(request: Any) -> None:
    target = Path(request.lora_path + "_b")
    Path(request.lora_path).rename(target)
    request.lora_path = str(target)


def remove(request: Any) -> None:
    (Path(request.lora_path) / "adapter_model.safetensors").unlink()


def load_inplace(request: Any) -> None:
    request.load_inplace = True


@pytest.mark.parametrize("change", [replace_content, replace_hiding_the_time, add_file, move, remove, load_inplace])
def test_a_changed_adapter_is_never_reused_again(tmp_path: Path, change: Any, caplog: pytest.LogCaptureFixture) -> None:
    digests, request = AdapterDigests(), adapter(tmp_path, 1)
    assert digests.digest(request) is not None
    change(request)
    assert digests.digest(request) is None
    request = adapter(tmp_path, 1)  # as it was: the engine may hold either
    assert digests.digest(request) is None
    assert digests.digest(request) is None
    assert caplog.text.count("is not reused") == 1
    assert digests.digest(adapter(tmp_path, 2)) is not None


def test_unknown_content_is_no_reuse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    digests = AdapterDigests()
    hub = SimpleNamespace(lora_name="h", lora_int_id=1, lora_path="org/adapter")
    empty = SimpleNamespace(lora_name="e", lora_int_id=2, lora_path=str(tmp_path))
    assert digests.digest(hub) is None
    assert digests.digest(empty) is None
    assert "not a local folder" in caplog.text
    assert "no weight files" in caplog.text


def test_files_that_change_while_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests, request = AdapterDigests(), adapter(tmp_path, 1)
    original = digests._content_digest

    def touching(files: Any, flags: Any) -> bytes:
        answer = original(files, flags)
        add_file(request)
        return answer

    monkeypatch.setattr(digests, "_content_digest", touching)
    assert digests.digest(request) is None
