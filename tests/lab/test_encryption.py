"""A pool on an encrypted slice, with the kernel's dm-crypt: locally and exported, killed, stopped, and erased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunScript = Callable[[str, str], dict[str, Any]]


def test_a_service_on_an_encrypted_slice(run_script: RunScript) -> None:
    report = run_script("guest_encryption.py", "local")
    assert report["mapping_is_open"]
    assert report["known_is_read"], "through the mapping it is there"
    assert report["raw_is_noise"]
    assert "is in use" in report["raw_in_use"]
    assert report["left_open"], "the kernel keeps it open"
    assert report["found_after_kill"]
    assert report["rekeyed"].startswith("1 header is opened by")
    assert "in use by process" in report["refused_while_served"]
    assert report["closed"]
    assert "does not open the header" in report["old_key"]
    assert "has no encryption" in report["without"]
    assert report["checked"].startswith("checked 1 chunks")
    assert report["closed_after_check"]
    assert "is the header of another slice" in report["header_of_another"]
    assert "is not what the header" in report["other_device"]
    assert report["erased"].startswith("erased the key of")
    assert "is blank: another pool can have it" in report["erased"]
    assert report["headers_left"] == 0
    assert "was erased: nothing" in report["after_erase"]
    assert report["slice_again"]


def test_an_encrypted_slice_is_exported(run_script: RunScript) -> None:
    report = run_script("guest_encryption.py", "exported")
    assert (report["arrived"], report["failures"]) == (True, 0)
    assert report["raw_is_noise"]
    assert report["stays_open_while_exported"]
    assert "could be read there with its key erased" in report["erase_while_exported"]
    assert report["erased"].startswith("erased the key of")
    assert report["closed"]
