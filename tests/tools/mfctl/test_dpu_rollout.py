"""``mfctl dpu flash`` of several cards, interrupted, and with a service to drain: real processes and real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.image.edge import card as card_module
from meshfusion.dpu.image.edge import shell as shell_module
from meshfusion.dpu.image.edge.journal_file import JournalFile
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.image.bundle_cases import make_files
from tests.dpu.image.fake_card import INSTALLATION, tiny_bfb
from tests.dpu.image.fake_host import FakeHost
from tests.dpu.image.rshim_mount import Mounted, mounted
from tests.host.support.waiting import until
from tests.tools.mfctl.service_process import ServiceProcess, small_config

SPEED = 30.0
SSH_S = 4.0  # of the card, after its Linux is up
FAILED = [*INSTALLATION[:27], " ERR[MISC]: Installation failed"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"POLL_S": 0.1, "PROBE_S": 0.1, "RETRY_S": 0.1, "GRACE_S": 0.3}.items():
        monkeypatch.setattr(f"meshfusion.dpu.image.flash.{name}", seconds)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Mounted]]:
    folder = tmp_path_factory.mktemp("dev")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(mounted(folder / f"rshim{n}", speed=SPEED)) for n in range(3)]


@pytest.fixture
def cards(places: list[Mounted], monkeypatch: pytest.MonkeyPatch) -> list[Mounted]:
    """Three, which are opened in their order."""
    for number, card in enumerate(places):
        card.renew().behave(device_name=f"pcie-0000:8{number + 3}:00.2")
    monkeypatch.setattr(card_module, "LocalShell", FakeHost)
    return places


@pytest.fixture(autouse=True)
def _hosts(cards: list[Mounted], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run opens each card's host once, in their order."""
    hosts: list[FakeHost] = []

    def next_host() -> FakeHost:
        if not hosts:
            hosts.extend(FakeHost([card], bus=f"8{number + 3}") for number, card in enumerate(cards))
        return hosts.pop(0)

    monkeypatch.setattr("tests.tools.mfctl.test_dpu_rollout._begin_run", hosts.clear)
    monkeypatch.setattr(shell_module, "LocalShell", next_host)


def _begin_run() -> None:
    """Another run opens the hosts from the first on."""


def _targets(tmp_path: Path, cards: list[Mounted], services: tuple[str, ...] = ()) -> Path:
    entries = [
        {"name": f"dpu-{n}", "at": str(card.folder)} | ({"service": services[n]} if services else {})
        for n, card in enumerate(cards)
    ]
    path = tmp_path / "targets.yaml"
    path.write_text(json.dumps({"targets": entries}))
    return path


def _flash(tmp_path: Path, targets: Path, *options: str) -> Result:
    if not (tmp_path / "files").exists():
        make_files(tmp_path / "files")
    files = tmp_path / "files"
    image = ["--bundle", str(files / "bundle"), "--bfb", str(files / "image.bfb"), "--key", str(files / "key.pem")]
    journal = ["--journal", str(tmp_path / "journal")]
    _begin_run()
    command = ["dpu", "flash", "--targets", str(targets), *image, *journal, "--yes", "--format", "json", *options]
    return CliRunner().invoke(mfctl, command, prog_name="mfctl")


def _cards(result: Result) -> dict[str, Any]:
    return {entry["card"]: entry for entry in json.loads(result.stdout)["cards"]}


def test_a_canary_that_fails_keeps_the_others_as_they_are(tmp_path: Path, cards: list[Mounted]) -> None:
    cards[0].behave(installation=FAILED)
    targets = _targets(tmp_path, cards)
    result = _flash(tmp_path, targets, "--no-drain", "--max-unavailable", "3")
    assert result.exit_code == 1
    assert [entry["state"] for entry in _cards(result).values()] == ["failed", "held back", "held back"]
    assert "the canary dpu-0 failed" in result.stderr
    assert [card.state["resets"] for card in cards] == [1, 0, 0]

    cards[0].behave(installation=list(INSTALLATION))
    until(lambda: cards[0].state["up_for_s"] > SSH_S, what="for the former system")  # a silent card is refused
    mended = _flash(tmp_path, targets, "--no-drain", "--max-unavailable", "3")
    assert mended.exit_code == 0, mended.output
    assert [card.state["installed"] for card in cards] == [1, 1, 1]


def test_a_service_is_drained_before_its_card_is_reset(tmp_path: Path, cards: list[Mounted]) -> None:
    with ServiceProcess(small_config(tmp_path)) as service:
        targets = _targets(tmp_path, cards[:1], (service.address,))
        result = _flash(tmp_path, targets)
        assert result.exit_code == 0, result.output
        assert service.end() == 0, "it stopped in order"
        assert _cards(result)["dpu-0"]["notes"] == []


def _once(holds: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        give_up_s = time.monotonic() + 60
        while not holds() and time.monotonic() < give_up_s:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_while_it_installs_the_card_goes_on_and_the_next_run_looks_on(
    tmp_path: Path, cards: list[Mounted]
) -> None:
    card = cards[0]
    targets = _targets(tmp_path, cards[:1])
    complete = make_files(tmp_path / "files").bfb.stat().st_size
    watcher = _once(lambda: card.state["pushed_bytes"] > complete and not card.state["is_boot_open"], _interrupt)
    result = _flash(tmp_path, targets, "--no-drain")
    watcher.join()
    assert result.exit_code == 130, result.output
    entry = _cards(result)["dpu-0"]
    assert (entry["state"], entry["problem"]) == ("stopped", "interrupted")
    assert entry["card_state"] == "it goes on by itself: do not reset it or its host"
    assert entry["next_step"] == "Run the same command again to go on."

    again = _flash(tmp_path, targets, "--no-drain")
    assert again.exit_code == 0, again.output
    state = card.state
    assert (state["resets"], state["installed"], state["cut_short"]) == (1, 1, 0)
    assert (state["clear_on_read"], state["display_level"]) == (False, 0)


def test_interrupted_in_a_push_nothing_was_installed(tmp_path: Path, cards: list[Mounted]) -> None:
    card = cards[0]
    make_files(tmp_path / "files", bfb=tiny_bfb(60_000_000))
    watcher = _once(lambda: card.state["pushed_bytes"] > 0, _interrupt)
    result = _flash(tmp_path, _targets(tmp_path, cards[:1]), "--no-drain")
    watcher.join()
    assert result.exit_code == 130, result.output
    entry = _cards(result)["dpu-0"]
    assert entry["phase"] == "pushing"
    assert "nothing on its storage has changed" in entry["card_state"]
    state = card.state
    assert (state["is_boot_open"], state["installed"], state["erased_pool_drives"]) == (False, 0, 0)
    assert _flash(tmp_path, _targets(tmp_path, cards[:1]), "--no-drain").exit_code == 0


def test_one_card_is_flashed_by_one_process(tmp_path: Path, cards: list[Mounted]) -> None:
    held = JournalFile(tmp_path / "journal", f":{cards[0].folder}")
    result = _flash(tmp_path, _targets(tmp_path, cards[:1]), "--no-drain")
    held.close()
    assert result.exit_code == 1
    assert "another process is flashing it" in result.stderr


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("targets: []", "targets"),
        ("targets: [{at: nvme0}]", "is no card"),
        ("targets: [{at: rshim0, srvice: x}]", "unknown key"),
        ("targets: [{at: rshim0}, {at: rshim0}]", "stands twice"),
        ("- rshim0", "the file"),
        ("targets: [{at: 'ssh://u:secret@h/rshim0'}]", "holds a password"),
    ],
)
def test_a_file_of_targets_with_mistakes(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text(text)
    result = _flash(tmp_path, path, "--no-drain")
    assert result.exit_code == 1
    assert word in result.stderr
