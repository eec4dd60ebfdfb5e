"""``mfctl dpu flash`` on fake cards behind real files: what an operator sees, and what the card then is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from meshfusion.dpu.image.edge import card as card_module
from meshfusion.dpu.image.edge import shell as shell_module
from meshfusion.tools.mfctl.main import mfctl
from tests.dpu.image.bundle_cases import make_files
from tests.dpu.image.fake_bmc import FakeBmc, served
from tests.dpu.image.fake_card import BF_CFG, INSTALLATION, tiny_bfb
from tests.dpu.image.fake_host import FakeHost
from tests.dpu.image.rshim_mount import Mounted, mounted
from tests.dpu.security.authority import Authority

SPEED = 30.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that lives faster is looked at more often."""
    for name, seconds in {"POLL_S": 0.1, "PROBE_S": 0.1, "RETRY_S": 0.1, "GRACE_S": 0.3}.items():
        monkeypatch.setattr(f"meshfusion.dpu.image.flash.{name}", seconds)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("dev") / "rshim0", speed=SPEED) as found:
        yield found


@pytest.fixture
def rshim(place: Mounted) -> Mounted:
    return place.renew()


@pytest.fixture
def host(rshim: Mounted, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    made = FakeHost([rshim])
    monkeypatch.setattr(shell_module, "LocalShell", lambda: made)
    monkeypatch.setattr(card_module, "LocalShell", FakeHost)
    return made


Flash = Callable[..., Result]


@pytest.fixture
def flash(rshim: Mounted, host: FakeHost, tmp_path: Path) -> Flash:
    files = make_files(tmp_path / "files")

    def run(*options: str, options_of_image: list[str] | None = None, card: str = str(rshim.folder)) -> Result:
        image = files.options if options_of_image is None else options_of_image
        journal = ["--journal", str(tmp_path / "journal")]
        return CliRunner().invoke(mfctl, ["dpu", "flash", card, *image, *journal, *options], prog_name="mfctl")

    return run


def _document(result: Result) -> Any:
    return json.loads(result.stdout)


def _error(result: Result) -> Any:
    return json.loads(result.stderr.splitlines()[-1])["error"]


def test_a_card_is_flashed_and_then_left_alone(flash: Flash, rshim: Mounted) -> None:
    result = flash("--no-drain", "--yes", "--format", "json")
    assert result.exit_code == 0, result.output
    (card,) = _document(result)["cards"]
    assert (card["state"], card["readiness"], card["problem"]) == ("done", "ready", "")
    state = rshim.state
    assert (state["resets"], state["installed"], state["erased_pool_drives"], state["cut_short"]) == (1, 1, 0, 0)
    assert (state["clear_on_read"], state["display_level"]) == (False, 0)

    again = flash("--no-drain", "--yes", "--format", "json")
    assert (again.exit_code, _document(again)["cards"][0]["state"]) == (0, "done")
    assert rshim.state["resets"] == 1
    assert "was flashed with this image before" in flash("--no-drain", "--yes").stdout
    assert flash("--no-drain", "--yes", "--again").exit_code == 0
    assert rshim.state["installed"] == 2


def test_without_a_yes_and_a_terminal_no_card_is_touched(
    flash: Flash, rshim: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained = ("--service", "unix:///run/nobody.sock")
    refused = flash(*drained)
    assert refused.exit_code == 2
    for words in ("What is on the boot drive of 1 card will be lost", "chunks in its pool stay", "--yes"):
        assert words in refused.stderr.replace("\n", " ")
    monkeypatch.setattr("meshfusion.tools.mfctl.consent.has_terminal", lambda: True)
    denied = flash(*drained)  # an answer that is none
    assert denied.exit_code == 130
    assert (rshim.state["resets"], rshim.state["installed"]) == (0, 0)


def test_a_failure_in_the_log_is_one_though_what_follows_is_ready(flash: Flash, rshim: Mounted) -> None:
    rshim.behave(installation=[*INSTALLATION[:27], " ERR[MISC]: Installation failed"])
    result = flash("--no-drain", "--yes")
    assert result.exit_code == 1
    assert "the installer on the card failed: ERR[MISC]: Installation failed" in result.stdout
    assert "next step: " in result.stdout
    assert result.stderr.splitlines()[-2].startswith("error: not flashed: ")


def test_a_part_that_failed_is_told_in_the_end(flash: Flash, rshim: Mounted) -> None:
    lines = [" ERR[MISC]: NIC firmware update failed" if "update done" in line else line for line in INSTALLATION]
    rshim.behave(installation=lines)
    result = flash("--no-drain", "--yes", "--format", "json")
    assert result.exit_code == 1
    (card,) = _document(result)["cards"]
    assert (card["state"], card["readiness"]) == ("failed", "ready")
    assert card["failure_lines"] == ["ERR[MISC]: NIC firmware update failed"]
    assert "not all of it succeeded" in card["problem"]
    assert _error(result)["kind"] == "ImageError"


@pytest.mark.parametrize(
    ("behaviour", "field", "word"),
    [
        ({"mode": "NIC mode"}, "card mode", "NIC mode"),
        ({"chip": "BlueField-2(Rev 1)"}, "card chip", "the bundle is not for it"),
        ({"is_dropped": True}, "rshim", "belongs to the other side"),
        ({"is_locked": True}, "rshim", "secure NIC mode"),
        ({"device_name": "usb-1.1"}, "host network", "cannot be looked at"),
    ],
)
def test_a_card_that_is_not_right_is_refused(
    flash: Flash, rshim: Mounted, behaviour: dict[str, object], field: str, word: str
) -> None:
    rshim.behave(**behaviour)
    result = flash("--no-drain", "--yes", "--format", "json")
    assert result.exit_code == 1
    error = _error(result)
    assert error["kind"] == "FlashRefusedError"
    problem = next(p for p in error["problems"] if p["field"].endswith(field))
    assert word in problem["problem"]
    assert problem["fix"]
    assert rshim.state["resets"] == 0


def test_a_card_with_the_only_way_out_of_the_host_is_refused(flash: Flash, host: FakeHost, rshim: Mounted) -> None:
    host.default = "bond0"
    result = flash("--no-drain", "--yes")
    assert result.exit_code == 1
    assert "all its default routes go through the card" in result.stderr
    assert rshim.state["resets"] == 0
    assert flash("--no-drain", "--yes", "--host-network-elsewhere").exit_code == 0


def _image(tmp_path: Path, **changes: Any) -> list[str]:
    return make_files(tmp_path / "other", **changes).options


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"is_signed": False}, "bundle signature = 'unsigned'"),
        ({"architecture": "x86_64"}, "bundle architecture = 'x86_64'"),
        ({"devices": {"chips": ["BlueField-3"], "psids": ["MT_0000000999"]}}, "card PSID = 'MT_0000000884'"),
        ({"devices": {"chips": ["BlueField-3"], "part_numbers": ["OTHER"]}}, "card part number = '900-9D3B6"),
        ({"bfb_sha256": ["0" * 64]}, "BFB = '"),
        ({"bfb": tiny_bfb(1000, hardware_version=1)}, "the BFB is not for it"),
        ({"bfb": b"PK" * 100}, "not a BlueField boot stream (BFB): at byte 0"),
        ({"bfb": tiny_bfb(1000)[:-8]}, "the file ends 8 bytes before image 63 does"),
        ({"bf_cfg": b"ERASE_SSD=no\n"}, "bf.cfg device: is missing"),
        ({"bf_cfg": b"device=/dev/mmcblk0\n"}, "bf.cfg ERASE_SSD: is not no"),
        ({"bf_cfg": BF_CFG + b"if then\n"}, "syntax error"),
    ],
)
def test_an_image_that_is_not_right_is_refused(
    flash: Flash, rshim: Mounted, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    result = flash("--no-drain", "--yes", options_of_image=_image(tmp_path, **changes))
    assert result.exit_code == 1
    assert word in result.stderr
    assert "next step: " in result.stderr
    assert rshim.state["resets"] == 0


def test_a_dry_run_shows_every_step_and_does_none(flash: Flash, rshim: Mounted) -> None:
    result = flash("--no-drain", "--dry-run", "--format", "json")
    assert result.exit_code == 0, result.output
    (card,) = _document(result)["cards"]
    phases = [step["phase"] for step in card["steps"]]
    assert phases == ["draining", "preparing", "pushing", "installing", "restarting", "settling"]
    assert f"write to {rshim.folder}/boot" in card["steps"][2]["what"]
    assert (rshim.state["resets"], rshim.state["display_level"]) == (0, 0)
    assert flash("--no-drain", "--dry-run", "--deadline", "installing=7200").stdout.count("2.0 h") == 1


def test_a_service_that_is_gone_needs_no_draining(flash: Flash) -> None:
    result = flash("--service", "unix:///nowhere/socket", "--yes", "--format", "json")
    assert result.exit_code == 0, result.output
    assert _document(result)["cards"][0]["notes"] == ["no service answered there, so nothing was drained"]


def test_without_a_service_or_a_word_nothing_is_flashed(flash: Flash, rshim: Mounted) -> None:
    result = flash("--yes")
    assert result.exit_code == 1
    assert "service: is not named, so that it cannot be drained" in result.stderr
    assert flash("--no-drain").exit_code == 2
    assert rshim.state["resets"] == 0


@pytest.mark.parametrize(
    "card", ["nvme0", "ssh://host", "ssh://-oX=x/rshim0", "redfish://", "redfish://h/x", "ssh://h:99999/rshim0"]
)
def test_what_is_no_card_is_wrong_usage(flash: Flash, card: str) -> None:
    result = flash("--no-drain", "--yes", card=card)
    assert result.exit_code == 2
    assert "CARD" in result.stderr


def _readiness(*options: str) -> Result:
    return CliRunner().invoke(mfctl, ["dpu", "readiness", *options], prog_name="mfctl")


def test_readiness_of_a_card_that_is_ready(rshim: Mounted, host: FakeHost) -> None:
    result = _readiness(str(rshim.folder))
    assert (result.exit_code, result.stdout.splitlines()[1].split()) == (0, ["readiness", "ready"])
    assert (rshim.state["display_level"], rshim.state["resets"]) == (0, 0)


def test_readiness_of_a_card_that_restarts(rshim: Mounted, host: FakeHost) -> None:
    rshim.behave(hangs_after="UEFI loaded")
    (rshim.folder / "misc").write_text("SW_RESET 1\n")
    give_up_s = time.monotonic() + 20
    while "UEFI started" not in (result := _readiness(str(rshim.folder), "--format", "json")).stdout:
        assert time.monotonic() < give_up_s
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert (told["readiness"], told["detail"]) == ("UEFI only", "last heard: UEFI started")
    assert "console" in told["next_step"]


def test_a_bmc_is_looked_at_and_nothing_is_changed(tmp_path: Path, flash: Flash) -> None:
    pair = Authority(tmp_path).issue("bmc")
    credentials = tmp_path / "credentials"
    credentials.write_text("root:secret\n")
    credentials.chmod(0o600)
    with served(FakeBmc(), pair) as bmc:
        at = f"redfish://127.0.0.1:{bmc.port}"
        options = (
            "--no-drain",
            "--dry-run",
            "--bmc-credentials",
            str(credentials),
            "--bmc-ca",
            str(tmp_path / "ca.pem"),
        )
        refused = flash(*options, card=at)
        assert refused.exit_code == 1
        assert "host network: cannot be looked at from here" in refused.stderr
        result = flash(*options, "--host-network-elsewhere", "--format", "json", card=at)
        assert result.exit_code == 0, result.output
        (card,) = _document(result)["cards"]
        assert "SimpleUpdate" in card["steps"][2]["what"]
        assert {method for method, _, _ in bmc.seen} == {"GET"}

        credentials.chmod(0o644)
        opened = flash(*options, card=at)
        assert opened.exit_code == 1
        assert "has the mode 0644" in opened.stderr
        assert "secret" not in opened.output
