"""Damaged wheels: each is refused with a message, however it is packed."""

from __future__ import annotations

import random
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.engine_surface import read_wheel

SOURCE = "class KVCacheSpec:\n    a: int = 1\n" * 30


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_wheel_is_refused(tmp_path: Path, how: int) -> None:
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", how) as archive:
        archive.writestr("vllm-0.32.0.dist-info/METADATA", "Name: vllm\nVersion: 0.32.0\n")
        archive.writestr("vllm/a.py", SOURCE)
    wheel = tmp_path / "vllm.whl"
    for seed in range(1500):
        rng, damaged = random.Random(seed), bytearray(packed.getvalue())
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        wheel.write_bytes(damaged)
        with pytest.raises(MeshFusionError):
            read_wheel(wheel)
