"""The block path over the kernel's NVMe/TCP initiator and target in a guest: what arrives, and a lost connection."""

from __future__ import annotations

from tests.lab.conftest import RunScript

SCRIPT = "guest_block.py"
FAIL_S = 2  # fast_io_fail_tmo, as the script sets it
NOTICE_S = 15  # a keep-alive of a second is missed; such a guest may be slow


def test_units_go_between_blocks_and_an_attached_namespace(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "round_trip")
    assert len(report["rounds"]) == 2
    for layout in report["rounds"]:
        assert layout["on_medium"]
        assert layout["header"]
        assert layout["failures"] == 0
        assert layout["arrived"]
        assert layout["untouched"]
        assert layout["after_flip"] == [[3, True]]
        assert layout["is_quiet"]
    memory_bytes, length_bytes, is_told = report["alignment"]
    assert is_told
    assert length_bytes == 4096, "the exported device's blocks"
    assert memory_bytes <= 4096
    assert report["links"] == [["nvme0", "tcp", FAIL_S]]


def test_a_lost_connection_fails_loads_when_the_kernel_gives_them_up_and_comes_back(run_script: RunScript) -> None:
    report = run_script(SCRIPT, "losses")
    for seen in (report["cut"], report["removed"]):
        assert not seen["told_early"], "the kernel could still write those blocks"
        assert FAIL_S - 0.5 < seen["told_s"] < FAIL_S + NOTICE_S
        assert seen["failed"] == 8
        assert seen["mismatches"] == 0
        assert seen["left_alone"]
        assert seen["fate"] == "unknown", "the target may have the write, and do it"
        assert "nvme0" in seen["reason"]
        assert seen["same"]
        assert seen["saved_again"]
    assert report["is_quiet"]
