"""What the tests of the staged path share."""

from __future__ import annotations

import pytest

from meshfusion.jbof.digest import DigestKernels, load_kernels


@pytest.fixture(scope="module")
def kernels() -> DigestKernels:
    return load_kernels(64 << 10)
