"""``mfctl dpu upgrade``, ``rollback`` and ``status``, with real scripts, processes and signals; ssh and systemd are
stand-ins."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.image.slots.card_rig import Card, make_programs, wait_until_active
from tests.dpu.image.slots.tiny_bundle import Signer, make_bundle, stand_in
from tests.host.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("--steady", "0.3", "--deadline", "probing=30", "--deadline", "switching=20")
Bundles = Callable[..., Path]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("talk.RETRY_S", "filling.RETRY_S", "upgrade.PROBE_S"):
        monkeypatch.setattr(f"meshfusion.dpu.image.slots.{name}", 0.1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(make_programs(tmp_path)), prepend=":")
    return tmp_path


@pytest.fixture
def signer(folder: Path) -> Signer:
    return Signer.make(folder)


@pytest.fixture
def bundles(folder: Path, signer: Signer) -> Bundles:
    def made(version: str, name: str = "", **behaviour: Any) -> Path:
        return make_bundle(folder / f"bundle-{name or version}", signer, version, stand_in(version, **behaviour))

    return made


@pytest.fixture
def card(folder: Path) -> Iterator[Card]:
    with Card(folder, "dpu-1", ROOT) as made:
        yield made


def _mfctl(*words: str | Path) -> Result:
    return CliRunner().invoke(mfctl, ["dpu", *map(str, words)], prog_name="mfctl")


def _upgrade(card: Card | str, bundle: Path, signer: Signer, *words: str) -> Result:
    name = card if isinstance(card, str) else f"root@{card.name}"
    return _mfctl(
        "upgrade", name, "--bundle", bundle, "--key", signer.path, "--yes", "--format", "json", *QUICK, *words
    )


def _outcome(result: Result) -> dict[str, Any]:
    (entry,) = json.loads(result.stdout)["cards"]
    assert isinstance(entry, dict)
    return entry


def _status(card: Card) -> dict[str, Any]:
    (entry,) = json.loads(_mfctl("status", f"root@{card.name}", "--format", "json").stdout)["cards"]
    assert isinstance(entry, dict)
    return entry


def _never_two(card: Card) -> None:
    assert not (card.folder / "two services").exists()


@pytest.fixture
def upgraded(card: Card, bundles: Bundles, signer: Signer) -> Card:
    """With version 1 in slot a."""
    first = _upgrade(card, bundles("1"), signer)
    assert first.exit_code == 0, first.output
    return card


def test_from_nothing_to_one_to_the_next_and_back(upgraded: Card, bundles: Bundles, signer: Signer) -> None:
    card = upgraded
    assert _status(card) | {"free_bytes": 0} == _status(card) | {
        "card": "root@dpu-1", "service": "running", "version": "1", "is_ready": True, "running": "a",
        "committed": "a", "trial": None, "free_bytes": 0, "copied_bytes": 0,
    }  # fmt: skip
    second = bundles("2")
    dry = _mfctl("upgrade", "dpu-1", "--bundle", second, "--key", signer.path, "--dry-run")
    assert dry.exit_code == 0, dry.output
    for word in ("copying", "empty slot b", "slot a comes back by itself", "committing"):
        assert word in dry.output
    assert card.started() == ["1"], "nothing was done"

    result = _upgrade(card, second, signer)
    assert result.exit_code == 0, result.output
    assert _outcome(result)["state"] == "done"
    status = _status(card)
    assert (status["version"], status["running"], status["committed"]) == ("2", "b", "b")
    assert [slot["version"] for slot in status["slots"]] == ["1", "2"]

    again = _upgrade(card, second, signer)
    assert (again.exit_code, _outcome(again)["notes"]) == (0, ["was there already"])
    assert card.started() == ["1", "2"]

    back = _mfctl("rollback", "root@dpu-1", "--yes", "--format", "json", *QUICK)
    assert back.exit_code == 0, back.output
    assert _status(card)["version"] == "1"
    assert card.started() == ["1", "2", "1"]
    _never_two(card)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"life_s": 0.0}, "its service stopped"),
        pytest.param({"life_s": 0.0, "code": 4}, "the new service has failed", marks=pytest.mark.nightly),
        pytest.param({"life_s": 0.3}, "its service stopped", marks=pytest.mark.nightly),
        pytest.param({"ready_s": None}, "the first probe has not ended yet", marks=pytest.mark.nightly),
    ],
)
def test_one_that_is_no_good_is_given_back(
    upgraded: Card, bundles: Bundles, signer: Signer, behaviour: dict[str, Any], said: str
) -> None:
    bad = bundles("2", **behaviour)
    result = _upgrade(upgraded, bad, signer, "--steady", "1", "--deadline", "probing=4")
    assert result.exit_code == 1
    outcome = _outcome(result)
    assert outcome["state"] == "rolled back"
    assert said in outcome["problem"]
    assert outcome["card_state"] == "slot a is committed; its service: running"
    status = _status(upgraded)
    assert (status["version"], status["is_ready"], status["trial"]) == ("1", True, None)
    assert upgraded.started().count("2") == 1, "it was started once"
    _never_two(upgraded)


@pytest.mark.nightly
def test_what_answers_must_be_what_was_started(upgraded: Card, folder: Path, signer: Signer) -> None:
    liar = make_bundle(folder / "liar", signer, "2", stand_in("1"))
    result = _upgrade(upgraded, liar, signer, "--deadline", "probing=2")
    assert "version 1 answers, and 2 was started" in _outcome(result)["problem"]
    assert _status(upgraded)["committed"] == "a"


class _Killed:
    """A ``mfctl dpu upgrade`` as a process, that dies when it says that it is in a phase."""

    def __init__(self, card: Card, bundle: Path, signer: Signer, *words: str) -> None:
        command = [
            "dpu",
            "upgrade",
            f"root@{card.name}",
            "--bundle",
            bundle,
            "--key",
            signer.path,
            "--yes",
            *QUICK,
            *words,
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshfusion.tools.mfctl.main", *map(str, command)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def in_phase(self, phase: str, sign: signal.Signals = signal.SIGKILL) -> int:
        assert self._process.stderr is not None
        seen = []
        for line in self._process.stderr:
            seen.append(line)
            if f": {phase}" in line:
                self._process.send_signal(sign)
                self._process.communicate()
                return self._process.returncode
        raise AssertionError(f"never {phase}: {seen}")


PHASES = ("checking", "copying", "unpacking", "draining", "switching", "probing", "committing")


@pytest.mark.nightly
@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_run_again_it_goes_on(upgraded: Card, bundles: Bundles, signer: Signer, phase: str) -> None:
    second = bundles("2")
    assert _Killed(upgraded, second, signer).in_phase(phase) == -signal.SIGKILL
    result = _upgrade(upgraded, second, signer)
    assert result.exit_code == 0, result.output
    assert (_status(upgraded)["version"], _outcome(result)["state"]) == ("2", "done")
    assert upgraded.started() == ["1", "2"]
    _never_two(upgraded)


SHORT = (
    "--deadline",
    "draining=1",
    "--deadline",
    "switching=4",
    "--deadline",
    "probing=4",
    "--deadline",
    "committing=1",
)


@pytest.mark.nightly
def test_killed_and_never_run_again_the_card_goes_back_by_itself(
    upgraded: Card, bundles: Bundles, signer: Signer
) -> None:
    killed = _Killed(upgraded, bundles("2"), signer, "--steady", "60", *SHORT)
    assert killed.in_phase("probing") == -signal.SIGKILL
    status = _status(upgraded)
    assert status["version"] == "2"
    assert 0 < status["trial"]["left_s"] <= 10
    until(lambda: _status(upgraded)["version"] == "1", limit_s=30)
    assert _status(upgraded)["last_trial"].endswith(" its time was over")
    assert upgraded.started() == ["1", "2", "1"]


def _once_it_started(version: str, card: Card, act: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        until(lambda: version in card.started(), limit_s=30)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.nightly
def test_a_card_that_loses_its_power_on_trial_boots_the_former_one(
    upgraded: Card, bundles: Bundles, signer: Signer
) -> None:
    second = bundles("2")
    cut = _once_it_started("2", upgraded, upgraded.lose_power)
    result = _upgrade(upgraded, second, signer, "--steady", "3")
    cut.join()
    assert result.exit_code == 1, result.output
    assert _outcome(result)["state"] == "rolled back"
    assert upgraded.started() == ["1", "2", "1"]
    _never_two(upgraded)


@pytest.mark.nightly
def test_interrupted_on_trial_the_former_one_comes_back(upgraded: Card, bundles: Bundles, signer: Signer) -> None:
    assert _Killed(upgraded, bundles("2"), signer, "--steady", "60").in_phase("probing", signal.SIGINT) == 130
    status = _status(upgraded)
    assert (status["version"], status["trial"]) == ("1", None)


@pytest.mark.nightly
def test_a_trial_is_ended_by_rollback(upgraded: Card, bundles: Bundles, signer: Signer) -> None:
    assert _Killed(upgraded, bundles("2"), signer, "--steady", "60").in_phase("probing") == -signal.SIGKILL
    other = _upgrade(upgraded, bundles("3"), signer)
    assert "slot b is on trial with another bundle" in _outcome(other)["problem"]
    result = _mfctl("rollback", "root@dpu-1", "--yes", "--format", "json", *QUICK)
    assert result.exit_code == 0, result.output
    assert _status(upgraded)["version"] == "1"


@pytest.mark.nightly
def test_the_network_goes_after_the_switch(upgraded: Card, bundles: Bundles, signer: Signer) -> None:
    cut = _once_it_started("2", upgraded, (upgraded.folder / "down").touch)
    result = _upgrade(upgraded, bundles("2"), signer, "--steady", "60", *SHORT, "--deadline", "rolling-back=1")
    cut.join()
    assert result.exit_code == 1
    assert any("it does so by itself within 10 s at most" in note for note in _outcome(result)["notes"]), result.output
    unreached = json.loads(_mfctl("status", "root@dpu-1", "--format", "json").stdout)["cards"][0]
    assert "Connection refused" in unreached["problem"]
    (upgraded.folder / "down").unlink()
    until(lambda: _status(upgraded)["version"] == "1", limit_s=30)


# Refused.


def _refused(result: Result, *words: str) -> None:
    assert result.exit_code == 1, result.output
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"architecture": "riscv64"}, ("bundle architecture", "riscv64", "take the bundle for")),
        ({"formats": {"medium": 99, "reads_medium": [99]}}, ("format of the medium", "cannot be read by 2")),
        ({"formats": {"index": 99, "reads_index": [2, 99]}}, ("format of the index", "could not read it afterwards")),
        ({"labels": False}, ("formats", "cannot be told of the new service", "--no-way-back")),
    ],
)
def test_refused_with_nothing_changed(
    upgraded: Card, folder: Path, signer: Signer, wishes: dict[str, Any], words: tuple[str, ...]
) -> None:
    bundle = make_bundle(folder / "other", signer, "2", stand_in("2"), **wishes)
    _refused(_upgrade(upgraded, bundle, signer), *words)
    assert sorted(path.name for path in upgraded.slots.iterdir() if path.name in "ab") == ["a"]
    assert upgraded.started() == ["1"]


@pytest.mark.nightly
def test_no_way_back_is_said_and_done(upgraded: Card, folder: Path, signer: Signer) -> None:
    formats = {"index": 99, "reads_index": [2, 99]}
    bundle = make_bundle(folder / "other", signer, "2", stand_in("2"), formats=formats)
    usage = _mfctl("upgrade", "dpu-1", "--bundle", bundle, "--key", signer.path, "--no-way-back")
    assert (usage.exit_code, "needs --yes" in usage.output) == (2, True)
    assert _upgrade(upgraded, bundle, signer, "--no-way-back").exit_code == 0
    back = _mfctl("rollback", "root@dpu-1", "--yes", *QUICK)
    _refused(back, "format of the index", "cannot be read by 1")
    assert _status(upgraded)["version"] == "2"


def test_a_bundle_of_another_signer(card: Card, bundles: Bundles, folder: Path) -> None:
    (folder / "else").mkdir()
    result = _upgrade(card, bundles("1"), Signer.make(folder / "else"))
    _refused(result, "bundle signature", "wrong")


def test_a_card_that_tells_nobody_whether_it_is_ready(card: Card, bundles: Bundles, signer: Signer) -> None:
    card.configure("listen: unix:///run/s\n")
    _refused(_upgrade(card, bundles("1"), signer), "telemetry.listen", "is not set")
    card.configure("telemetry: {listen: 'unix:///run/t'}\n")
    _refused(_upgrade(card, bundles("1", "again"), signer), "telemetry.listen", "cannot be reached through ssh")
    card.configure(f"telemetry: {{listen: '127.0.0.1:{card.port}', probe: false}}\n")
    _refused(_upgrade(card, bundles("1", "once more"), signer), "telemetry.probe", "is off")
    for text in ("- a list", "telemetry: 5", "}{", "telemetry: {listen: [5]}"):
        card.configure(text)
        _refused(_upgrade(card, bundles("1", f"with {len(text)}"), signer), "telemetry.listen", "is not set")


@pytest.mark.nightly
def test_nothing_to_roll_back_to(upgraded: Card) -> None:
    _refused(_mfctl("rollback", "dpu-1", "--yes"), "slot b", "holds nothing that could run")


@pytest.mark.parametrize("place", ["", "u:secret@h", "-oProxyCommand=x", "h/rshim0", "a b"])
def test_places_that_are_none(place: str) -> None:
    result = _mfctl("status", "--", place)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


# Many.


@pytest.mark.nightly
def test_a_canary_that_fails_keeps_the_others(folder: Path, bundles: Bundles, signer: Signer) -> None:
    with contextlib.ExitStack() as stack:
        cards = [stack.enter_context(Card(folder, f"dpu-{n}", ROOT)) for n in range(3)]
        targets = folder / "targets.yaml"
        entries = [{"ssh": f"root@{card.name}", "name": card.name, "at": "rshim0"} for card in cards]
        targets.write_text(json.dumps({"targets": entries}))

        def run(bundle: Path) -> Result:
            return _mfctl(
                "upgrade", "--targets", targets, "--bundle", bundle, "--key", signer.path, "--yes", "--format", "json",
                "--max-unavailable", "2", *QUICK,
            )  # fmt: skip

        good = run(bundles("1"))
        assert good.exit_code == 0, good.output
        bad = run(bundles("2", life_s=0.0))
        assert bad.exit_code == 1
        assert [entry["state"] for entry in json.loads(bad.stdout)["cards"]] == [
            "rolled back",
            "held back",
            "held back",
        ]
        assert [card.started() for card in cards] == [["1", "2", "1"], ["1"], ["1"]]
        for card in cards:
            wait_until_active(card)
