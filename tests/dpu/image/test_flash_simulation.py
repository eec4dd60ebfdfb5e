"""Flashes of cards that misbehave, by processes that are killed, over connections that break: whatever comes, no drive
of a pool is lost, no card that installs is reset, and what is called done is done. A failure names its seed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from meshfusion.dpu.image.flash import Flash
from meshfusion.dpu.image.flash_types import Deadlines, Outcome, Phase
from meshfusion.dpu.image.install_log import Verdict, verdict_of
from tests.dpu.image.fake_card import INSTALLATION, Behaviour, FakeCard, tiny_bfb
from tests.dpu.image.world import CrashedError, World

SEEDS = 400
DEADLINES = Deadlines()
FAILED_INSTALLATION = (*INSTALLATION[:27], " ERR[MISC]: Installation failed")
FIRMWARE_FAILED = tuple(
    " ERR[MISC]: NIC firmware update failed" if "firmware update done" in line else line for line in INSTALLATION
)
INVALID_BF_CFG = tuple(" INFO[MISC]: Invalid bf.cfg" if "Found bf.cfg" in line else line for line in INSTALLATION)


def _behaviour(rng: random.Random) -> Behaviour:
    return Behaviour(
        mode=rng.choice(("DPU mode",) * 8 + ("NIC mode", "")),
        is_dropped=rng.random() < 0.05,
        is_locked=rng.random() < 0.05,
        busy_for_s=rng.choice((0.0, 0.0, 10.0, 1e9)),
        stall_at_bytes=rng.choice((None, None, None, 0, 50_000, 150_000, 199_000)),
        stalls=rng.choice((1, 1, 5)),
        line_s=rng.choice((0.1, 1.0, 7.0)),
        installation=rng.choice((INSTALLATION,) * 4 + (FAILED_INSTALLATION, FIRMWARE_FAILED, INVALID_BF_CFG)),
        hangs_after=rng.choice(("",) * 6 + ("UEFI loaded", "installation started", "Rebooting", "Linux up")),
        tmfifo_s=rng.choice((2.0, 2.0, 2.0, 1e9)),
        ssh_s=rng.choice((4.0, 4.0, 60.0, 1e9)),
        ports_s=rng.choice((6.0, 6.0, 120.0, 1e9)),
        is_secretly_read=rng.random() < 0.1,
    )


def _flashes(world: World, rng: random.Random) -> Outcome:
    """As an operator would: again and again, until it ends without being killed."""
    for _ in range(rng.randrange(1, 6)):
        flash = Flash(deadlines=DEADLINES, drain_within_s=rng.choice((None, 60.0)), resumed=world.kept)
        try:
            outcome = world.run(flash)
            if rng.random() < 0.7:
                return outcome  # else the same command once more
        except CrashedError:
            line_s = world.card.behaviour.line_s
            world.card.now_s += rng.choice((0.0, 10 * line_s, 27 * line_s, 30 * line_s, 4000.0))
            if rng.random() < 0.2:
                world.kept = None  # it is run on another machine, or its journal is gone
    world.crash_rate, world.is_lost_after_push = 0.0, False
    return world.run(Flash(deadlines=DEADLINES, drain_within_s=60.0, resumed=world.kept))


def _history(seed: int) -> tuple[World, Outcome]:
    rng = random.Random(seed)
    card = FakeCard(_behaviour(rng))
    world = World(
        card,
        rng,
        fault_rate=rng.choice((0.0, 0.0, 0.02, 0.2)),
        crash_rate=rng.choice((0.0, 0.0, 0.003, 0.03)),
        interrupt_at=rng.choice((None, None, rng.randrange(10), rng.randrange(200))),
        is_lost_after_push=rng.random() < 0.1,
        bfb=tiny_bfb(rng.choice((300, 70_000, 200_000))),
    )
    return world, _flashes(world, rng)


def _check(world: World, outcome: Outcome) -> None:
    card = world.card
    assert card.erased_pool_drives == 0, "the installer ran without bf.cfg"
    assert card.cut_short == 0, "a card was reset that was installing"
    if card.behaviour.is_dropped or card.behaviour.is_locked or card.behaviour.mode == "NIC mode":
        assert card.resets == 0, "a card was reset that cannot be flashed"
    if outcome.end is Phase.DONE:
        assert card.installed, "done, and nothing was installed"
        assert card.up_for_s() >= card.behaviour.ports_s, "done, and it is not up"
        assert all(verdict_of(line) is Verdict.FINE for line in card.behaviour.installation), "done, and it failed"
    else:
        assert outcome.problem, "no problem named"
        assert outcome.next_step, "no next step"
    assert outcome.card_state, "no state named"
    assert not card.is_boot_open or world.fault_rate, "boot was left open"
    if not world.fault_rate and outcome.in_phase is not Phase.DRAINING:
        assert (card.clear_on_read, card.display_level) == (False, 0), "the rshim was left as it was set"


@pytest.mark.nightly
def test_whatever_goes_wrong_at_length() -> None:
    _live_through(range(SEEDS, 20 * SEEDS))


def test_whatever_goes_wrong() -> None:
    _live_through(range(SEEDS))


def _live_through(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        world, outcome = _history(seed)
        try:
            _check(world, outcome)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}; {world.card.behaviour}; {outcome}") from error
        seen[f"{outcome.end.value} in {outcome.in_phase.value}"] += 1
        seen["resets"] += world.card.resets
    # Else it has not looked at what it is for.
    phases = ("preparing", "pushing", "installing", "restarting", "settling")
    for end in ("done in settling", *(f"failed in {phase}" for phase in phases), "stopped in pushing"):
        assert seen[end], (end, seen)


@pytest.mark.parametrize("crash_at", range(1, 55, 3))
def test_a_killed_flash_is_gone_on_with(crash_at: int) -> None:
    class Killed(World):
        def _perhaps_crash(self) -> None:
            if len(self.effects) == crash_at and self.crash_rate:
                self.crash_rate = 0.0
                self._close()
                raise CrashedError

    world = Killed(FakeCard(Behaviour(line_s=0.3)), crash_rate=1.0)
    with pytest.raises(CrashedError):
        world.run(Flash(deadlines=DEADLINES, drain_within_s=60.0))
    world.card.now_s += 20.0
    outcome = world.run(Flash(deadlines=DEADLINES, drain_within_s=60.0, resumed=world.kept))
    assert outcome.end is Phase.DONE, outcome
    assert (world.card.cut_short, world.card.erased_pool_drives) == (0, 0)
    assert world.card.installed == 1


def _first_violation(seeds: int) -> str:
    for seed in range(seeds):
        world, outcome = _history(seed)
        try:
            _check(world, outcome)
        except AssertionError as error:
            return str(error)
    return ""


def test_a_planted_end_without_bf_cfg_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.dpu.image.stream.KEPT_BACK_BYTES", 0)
    assert "without bf.cfg" in _first_violation(SEEDS)


def test_a_planted_reset_of_a_card_that_installs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.dpu.image.flash.is_installing", lambda lines: False)
    assert "a card was reset that was installing" in _first_violation(SEEDS)


def test_a_planted_deafness_to_failures_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshfusion.dpu.image.install_log.verdict_of", lambda line: Verdict.FINE)
    assert "and it failed" in _first_violation(SEEDS)
