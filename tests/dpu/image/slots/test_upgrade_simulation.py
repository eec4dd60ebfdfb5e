"""Upgrades of cards that lose their power, by processes that are killed, over connections that break, to services that
are no good: whatever comes, a service that was ready runs in the end. A failure names its seed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from meshfusion.dpu.image.slots import words
from meshfusion.dpu.image.slots.card_state import ServiceRuns
from meshfusion.dpu.image.slots.types import Abort, Commit, Deadlines, Outcome, Phase, Probe, Switch
from meshfusion.dpu.image.slots.upgrade import Upgrade
from tests.dpu.image.slots.fake_card import FOREVER, Behaviour, FakeCard
from tests.dpu.image.slots.twin import Twin
from tests.dpu.image.slots.world import CrashedError, World, wanted_of

SEEDS = 600
DEADLINES = Deadlines()
STEADY_S = 40.0
OLD, NEW, OTHER = "old", "new", "other"
AFTER_ALL_S = 3 * DEADLINES.trial_s


def _new(rng: random.Random) -> Behaviour:
    good = Behaviour("2")
    return rng.choice((
        good, good, good, good,
        replace(good, ready_s=100.0),
        replace(good, ends_s=1.0),
        replace(good, ends_s=1.0, is_restarted=False),
        replace(good, start_s=FOREVER),
        replace(good, ready_s=FOREVER),
        replace(good, ends_s=rng.choice((9.0, 20.0, 45.0)), is_restarted=rng.random() < 0.5),
        replace(good, unready_s=rng.choice((9.0, 30.0, 47.0))),
        replace(good, tells="1"),
        replace(good, start_s=200.0, ready_s=260.0),
    ))  # fmt: skip


def _check_always(card: FakeCard) -> None:
    committed = card.twin.decided.committed
    if committed:
        assert card.twin.slots.get(committed), "the committed slot is not whole"
    elif card.twin.slots.get("a") == OLD:
        raise AssertionError("no slot is committed any more")
    trials = Counter(card.trials_started)
    assert all(count == 1 for count in trials.values()), "a trial was started twice"


def _upgrade(rng: random.Random, token: str, digest: str = NEW) -> Upgrade:
    return Upgrade(
        wanted_of(digest, "2"),
        token=token,
        deadlines=DEADLINES,
        steady_s=STEADY_S,
        drain_within_s=rng.choice((None, 60.0)),
    )


def _lives(world: World, rng: random.Random) -> Outcome | None:
    """As an operator would: again and again, until it ends without being killed; None: he does not come back."""
    card = world.card
    for number in range(rng.randrange(1, 5)):
        try:
            outcome = world.run(_upgrade(rng, f"t-{number}", rng.choice((NEW, NEW, NEW, OTHER)) if number else NEW))
            if rng.random() < 0.7:
                return outcome
        except CrashedError:
            card.advance(card.now_s + rng.choice((0.0, 5.0, 60.0, 300.0, 4000.0)))
            if rng.random() < 0.3:
                return None
        world.is_cut_off = False
    world.loss_rate = world.crash_rate = world.reboot_rate = world.damage_rate = 0.0
    card.cut_rate = card.kill_rate = 0.0
    world.crash_at, world.cut_off_from = None, ""
    return world.run(_upgrade(rng, "t-last"))


def _history(seed: int, card_class: type[FakeCard] = FakeCard) -> tuple[World, Outcome | None]:
    rng = random.Random(seed)
    services = {OLD: Behaviour("1", stop_s=rng.choice((1.0, 4.0, 70.0))), NEW: _new(rng), OTHER: Behaviour("3")}
    card = card_class(services, rng)
    if rng.random() < 0.9:
        card.install("a", OLD)
    card.checked = lambda: _check_always(card)
    card.cut_rate = rng.choice((0.0, 0.0, 0.0, 0.02, 0.1))
    card.kill_rate = rng.choice((0.0, 0.0, 0.05, 0.3))
    world = World(
        card,
        rng,
        loss_rate=rng.choice((0.0, 0.0, 0.05, 0.3)),
        crash_rate=rng.choice((0.0, 0.0, 0.01, 0.05)),
        reboot_rate=rng.choice((0.0, 0.0, 0.0, 0.005, 0.05)),
        damage_rate=rng.choice((0.0, 0.0, 0.0, 0.3, 1.0)),
        is_full=rng.random() < 0.03,
        interrupt_at=rng.choice((None, None, None, rng.randrange(30))),
        crash_at=rng.choice((None, None, rng.randrange(30))),
        cut_off_from=rng.choice(("",) * 6 + ("Arm", "Switch", "Probe", "Commit", "Abort")),
    )
    had_service = bool(card.twin.decided.committed)
    outcome = _lives(world, rng)
    card.cut_rate = 0.0
    _check_end(world, outcome, had_service=had_service)
    return world, outcome


def _check_end(world: World, outcome: Outcome | None, *, had_service: bool) -> None:
    card, twin = world.card, world.card.twin
    if outcome is not None:
        _check_outcome(world, outcome)
    card.advance(card.now_s + AFTER_ALL_S)
    state = twin.status()
    assert state.trial is None or state.trial.left_s <= 0, "a trial without end"
    for digest in card.committed_digests:
        assert card.services[digest].is_good_for(STEADY_S / 2), "a service that is no good was committed"
    if not state.committed:
        assert not had_service
        assert state.service.is_down, "a service runs that was not committed"
        return
    assert state.running == state.committed, "a service runs that was not committed"
    behaviour = card.services[state.committed_digest]
    if min(behaviour.ends_s, behaviour.unready_s) == FOREVER:
        assert state.service is ServiceRuns.RUNNING, "no service runs in the end"


def _check_outcome(world: World, outcome: Outcome) -> None:
    state = world.card.twin.status()
    if outcome.end is Phase.DONE:
        assert state.committed_digest in (NEW, OTHER), "done, and not committed"
    else:
        assert outcome.problem, "no problem named"
        assert outcome.next_step, "no next step"
    if outcome.end is Phase.ROLLED_BACK:
        assert state.running == state.committed, "rolled back, and not there"
        assert state.service is ServiceRuns.RUNNING, "rolled back, and it does not run"
    assert outcome.card_state


def _live_through(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            world, outcome = _history(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen["nobody came back" if outcome is None else f"{outcome.end.value} in {outcome.in_phase.value}"] += 1
        seen["boots"] += world.card.boots
    return seen


def test_whatever_goes_wrong() -> None:
    seen = _live_through(range(SEEDS))
    # Else it has not looked at what it is for.
    phases = ("draining", "switching", "probing")
    for end in ("done in committing", *(f"rolled back in {phase}" for phase in phases), "failed in copying",
                "stopped in copying", "nobody came back", "boots"):  # fmt: skip
        assert seen[end], (end, seen)


@pytest.mark.nightly
def test_whatever_goes_wrong_at_length() -> None:
    _live_through(range(SEEDS, 40 * SEEDS))


def _quiet(new: Behaviour, **faults: Any) -> World:
    card = FakeCard({OLD: Behaviour("1"), NEW: new, OTHER: Behaviour("3")})
    card.install("a", OLD)
    card.checked = lambda: _check_always(card)
    return World(card, **faults)


def _run(world: World, token: str = "t-1", **wishes: Any) -> Outcome:
    upgrade = Upgrade(wanted_of(NEW, "2"), token=token, deadlines=DEADLINES, steady_s=STEADY_S, **wishes)
    return world.run(upgrade)


def test_a_good_one_is_committed_and_then_there_already() -> None:
    world = _quiet(Behaviour("2"))
    outcome = _run(world, drain_within_s=60.0)
    assert (outcome.end, outcome.problem, outcome.notes) == (Phase.DONE, "", ())
    assert world.card.twin.slots == {"a": OLD, "b": NEW}
    assert world.card.twin.blobs == {}
    before = len(world.effects)
    again = _run(world, token="t-2")
    assert (again.end, again.notes) == (Phase.DONE, ("was there already",))
    assert len(world.effects) - before <= 3


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (Behaviour("2", ends_s=1.0), "its service stopped"),
        (Behaviour("2", ends_s=1.0, is_restarted=False), "the new service ended by itself"),
        (Behaviour("2", ready_s=FOREVER), "probing took longer than the 300 s it may take: not yet"),
        (Behaviour("2", ends_s=30.0), "its service stopped"),
        (Behaviour("2", unready_s=30.0), "probing took longer than the 300 s it may take: not yet"),
        (Behaviour("2", tells="1"), "version 1 answers, and 2 was started"),
    ],
)
def test_one_that_is_no_good_is_given_back(new: Behaviour, said: str) -> None:
    world = _quiet(new)
    outcome = _run(world)
    assert (outcome.end, outcome.in_phase) == (Phase.ROLLED_BACK, Phase.PROBING)
    assert said in outcome.problem
    assert outcome.card_state == "slot a is committed; its service: running"
    assert Commit("t-1") not in world.effects


def test_killed_after_each_effect_and_run_again_it_is_done() -> None:
    whole = len(_run_effects(_quiet(Behaviour("2"))))
    for crash_at in range(whole):
        world = _quiet(Behaviour("2"), crash_at=crash_at)
        with pytest.raises(CrashedError):
            _run(world)
        world.crash_at = None
        outcome = _run(world, token="t-2")
        assert outcome.end is Phase.DONE, (crash_at, outcome)
        assert world.card.twin.slots == {"a": OLD, "b": NEW}


def _run_effects(world: World) -> list[object]:
    _run(world)
    return list(world.effects)


def _on_trial() -> World:
    """Left by an upgrade that was killed while it probed."""
    whole = _run_effects(_quiet(Behaviour("2")))
    world = _quiet(Behaviour("2"), crash_at=whole.index(Probe(), whole.index(Switch("t-1"))) + 3)
    with pytest.raises(CrashedError):
        _run(world)
    world.crash_at = None
    return world


def test_a_trial_is_ended_by_whoever_asks() -> None:
    world = _on_trial()
    assert world.card.twin.decided.trial == "b"
    outcome = _run(world, token="t-2", ends_trial=True)
    assert (outcome.end, outcome.problem) == (Phase.ROLLED_BACK, "")
    assert world.card.twin.status().running == "a"


def test_another_ones_trial_is_left_alone() -> None:
    world = _on_trial()
    outcome = world.run(Upgrade(wanted_of(OTHER, "3"), token="t-2", deadlines=DEADLINES, steady_s=STEADY_S))
    assert outcome.end is Phase.FAILED
    assert "slot b is on trial with another bundle" in outcome.problem
    assert world.card.twin.decided.token == "t-1"


def test_cut_off_before_the_commit_it_goes_back_by_itself() -> None:
    world = _quiet(Behaviour("2"), cut_off_from="Commit")
    outcome = _run(world)
    assert outcome.end is Phase.FAILED
    assert any("it does so by itself within" in note for note in outcome.notes), outcome
    assert any(isinstance(effect, Abort) for effect in world.effects)
    world.card.advance(world.card.now_s + DEADLINES.trial_s)
    state = world.card.twin.status()
    assert (state.committed, state.running, state.service) == ("a", "a", ServiceRuns.RUNNING)


# Planted bugs.


def _first_violation(seeds: int = SEEDS, card_class: type[FakeCard] = FakeCard) -> str:
    for seed in range(seeds):
        try:
            _history(seed, card_class)
        except AssertionError as error:
            return str(error)
    return ""


def test_a_planted_trial_that_is_started_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def pick(self: Twin) -> str:
        self.current = self.decided.trial or self.decided.committed
        return self.current

    monkeypatch.setattr(Twin, "pick", pick)
    assert "started twice" in _first_violation()


def test_a_planted_lack_of_a_deadman_is_found() -> None:
    class Without(FakeCard):
        def arm(self, seconds: int, token: str) -> None:
            pass

    found = _first_violation(card_class=Without)
    assert "a service runs that was not committed" in found or "no service runs in the end" in found


def test_a_planted_abort_that_looks_at_the_trial_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_back(self: Twin, token: str, how: str) -> None:
        if self.decided.trial and self.decided.token == token:
            self._end(how)
            self.durable()
            self.runner.restart()

    monkeypatch.setattr(Twin, "_give_back", give_back)
    assert "a service runs that was not committed" in _first_violation()


def test_a_planted_commit_at_the_first_ready_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Upgrade.__init__

    def hasty(self: Upgrade, *args: Any, **wishes: Any) -> None:
        original(self, *args, **(wishes | {"steady_s": 0.0}))

    monkeypatch.setattr(Upgrade, "__init__", hasty)
    assert "no good was committed" in _first_violation()


def test_a_planted_blindness_to_versions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "not_yet", lambda seen, version: "" if seen.is_ready else seen.reason)
    assert "no good was committed" in _first_violation()


def test_a_planted_unpacking_over_what_runs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(self: Twin, slot: str, manifest: str, *others: str) -> None:
        for each in ("a", slot):
            self.slots[each] = ""
        self.durable()
        self.slots[slot] = manifest

    monkeypatch.setattr(Twin, "unpack", unpack)
    assert "not whole" in _first_violation()


def test_a_planted_commit_in_two_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Twin._end

    def end(self: Twin, how: str, committed: str | None = None) -> None:
        if committed is not None:
            self._save(replace(self.decided, committed=""))
        original(self, how, committed)

    monkeypatch.setattr(Twin, "_end", end)
    assert "no slot is committed" in _first_violation()
