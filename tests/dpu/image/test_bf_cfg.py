"""What a ``bf.cfg`` must say before it may be pushed; why is in the installers' scripts, named in the module."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.dpu.image.bf_cfg import MAX_BF_CFG_BYTES, assignments, bf_cfg_problems
from tests.dpu.image.fake_card import BF_CFG

GOOD = b"device=/dev/mmcblk0\nERASE_SSD=no\n"


@pytest.mark.parametrize(
    "text",
    [
        BF_CFG,
        GOOD,
        b"#!/bin/bash\nexport device='/dev/mmcblk0'\nERASE_SSD=\"no\"  # the pool's\n",
        b"device=$(readlink -f /dev/disk/by-id/nvme-SAMSUNG_123)\nERASE_SSD=no\n",
        GOOD + b"ubuntu_PASSWORD='$1$3B0RIrfX$TlHry93NFUJzg3Nya00rE1'\n",
        b"ERASE_SSD=yes\n" + GOOD,
    ],
)
def test_what_may_be_pushed(text: bytes) -> None:
    assert bf_cfg_problems(text) == []


@pytest.mark.parametrize(
    ("text", "field", "word"),
    [
        (b"ERASE_SSD=no\n", "bf.cfg device", "last NVMe drive"),
        (b"device=\nERASE_SSD=no\n", "bf.cfg device", "last NVMe drive"),
        (b"# device=/dev/mmcblk0\nERASE_SSD=no\n", "bf.cfg device", "last NVMe drive"),
        (b"device=/dev/nvme0n1\nERASE_SSD=no\n", "bf.cfg device", "changes with the drives"),
        (b"device=/dev/mmcblk0\n", "bf.cfg ERASE_SSD", "erase the last NVMe drive"),
        (GOOD + b"ERASE_SSD=yes\n", "bf.cfg ERASE_SSD", "erase the last NVMe drive"),
        (GOOD + b"SHRED_DRIVES=yes\n", "bf.cfg SHRED_DRIVES", "shreds"),
        (GOOD + b"ubuntu_PASSWORD=hunter2\n", "bf.cfg ubuntu_PASSWORD", "is not the hash"),
        (GOOD + b"\0", "bf.cfg", "NUL at byte"),
        (b"\xfd7zXZ\0", "bf.cfg", "NUL"),
        (b"\xfd7zXZ.", "bf.cfg", "xz archive"),
        (GOOD + b"\xff", "bf.cfg", "not UTF-8"),
        (GOOD + b"#" * MAX_BF_CFG_BYTES, "bf.cfg", "more than"),
    ],
)
def test_what_may_not(text: bytes, field: str, word: str) -> None:
    (problem,) = bf_cfg_problems(text)
    assert problem.field == field
    assert word in problem.problem
    assert problem.fix
    assert "hunter2" not in str(problem), "a password is in no message"


@given(st.binary(max_size=200))
def test_no_bytes_are_too_odd(data: bytes) -> None:
    bf_cfg_problems(data)


def test_the_last_assignment_holds() -> None:
    assert assignments("a=1\n a=2\nb='x y'\nif a=3; then\n") == {"a": "2", "b": "x y"}
