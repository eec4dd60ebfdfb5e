"""Completions are the same through either of pyverbs' queues."""

from __future__ import annotations

import errno
from typing import Any, cast

import pytest

from meshfusion.jbof.nvme.rdma_completions import ExtendedQueue, PlainQueue, WorkCompletion, completion_queue
from tests.jbof.nvme.fake_verbs import FakeCompletion, FakeVerbs, FakeVerbsError


def queue(*, has_extended_queues: bool) -> tuple[FakeVerbs, ExtendedQueue | PlainQueue]:
    verbs = FakeVerbs()
    verbs.has_extended_queues = has_extended_queues
    return verbs, completion_queue(cast(Any, verbs), None, 10)


@pytest.mark.parametrize("has_extended_queues", [True, False])
def test_completions_tell_what_became_of_the_work(has_extended_queues: bool) -> None:
    verbs, made = queue(has_extended_queues=has_extended_queues)
    assert isinstance(made, ExtendedQueue) == has_extended_queues
    assert made.take(4) == []
    failed = FakeCompletion(3, status=12, byte_len=0)
    failed.vendor_err = 0x81
    verbs.completions += [
        FakeCompletion(1 << 32 | 1, byte_len=16),
        FakeCompletion(1 << 32 | 2, byte_len=15, wc_flags=8, imm_data=0xABCD),
        failed,
        FakeCompletion(4, byte_len=0),
    ]
    assert made.take(3) == [
        WorkCompletion(1 << 32 | 1, 0, 0, 16, None),
        WorkCompletion(1 << 32 | 2, 0, 0, 15, 0xABCD),
        WorkCompletion(3, 12, 0x81, 0, None),
    ]
    assert made.take(3) == [WorkCompletion(4, 0, 0, 0, None)]
    assert made.take(3) == []


@pytest.mark.parametrize("has_extended_queues", [True, False])
def test_errors_of_polling_are_pyverbs(has_extended_queues: bool) -> None:
    verbs, made = queue(has_extended_queues=has_extended_queues)
    verbs.fails.add("poll")
    with pytest.raises(FakeVerbsError):
        made.take(1)


def test_an_error_code_is_no_end() -> None:
    verbs, made = queue(has_extended_queues=True)
    verbs.poll_error = errno.EINVAL
    with pytest.raises(FakeVerbsError, match="error 22"):
        made.take(1)
