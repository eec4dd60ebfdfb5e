"""What the tests of paths share."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.jbof.digest import DigestKernels, load_kernels
from tests.host.support.local_paths import LocalPath, block, staged


@pytest.fixture(scope="module")
def kernels() -> DigestKernels:
    return load_kernels(64 << 10)


@pytest.fixture(params=["staged", "block"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> LocalPath:
    """Each of the paths over files and block devices."""
    return staged() if request.param == "staged" else block(tmp_path)
