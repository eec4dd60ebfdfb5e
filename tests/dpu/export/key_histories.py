"""What may happen in a history of keys, and what must be true when it has become quiet."""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from meshfusion.dpu.export.key_rotation import RETRY_S
from meshfusion.dpu.export.plan import TargetKind
from tests.dpu.export.key_world import HEARTBEAT_S, LIFETIME_S, PERIOD_S, SLACK_S, Parts, World

STEPS = 60
SHORT_S = 3.0  # less than from heartbeat to heartbeat: no configuration says so, and nobody is locked out by it


class HistoryFailed(AssertionError):
    """Names the seed that brings the failure back."""


class _Log(logging.Handler):
    """All that is logged, to be looked through for secrets."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def live(seed: int, parts: Parts | None = None) -> Counter[str]:
    """One history: what happened in it. Raises :class:`HistoryFailed`."""
    with _watched(f"seed {seed}") as watched:
        watched.append(_live(random.Random(seed), parts or Parts()))
    return watched[0].told


def live_once_replaced(kind: TargetKind, kill_at: int, *, with_power: bool, parts: Parts | None = None) -> bool:
    """A host, its key is replaced, and the service ends after ``kill_at`` things that it did; then all goes on. False:
    it had done all by then."""
    with _watched(f"{kind}, killed at {kill_at}, with power: {with_power}") as watched:
        world = World(random.Random(1), parts or Parts(), kind)
        watched.append(world)
        world.is_calm = world.target.is_flawless = world.disk.is_flawless = True
        world.start()
        world.attach()
        world.engines[0].is_old = False
        world.kill_at = world.points + kill_at
        _pass_time(world, 3 * HEARTBEAT_S)
        world.rekey()
        _pass_time(world, 3 * HEARTBEAT_S)
        is_killed = bool(world.told["killed"])
        if is_killed and with_power:
            world.lose_power()
        _become_quiet(world, has_right_clock=True)
    return is_killed


@contextlib.contextmanager
def _watched(what: str) -> Iterator[list[World]]:
    """Whoever lives through a history puts it in there."""
    log, logger, worlds = _Log(), logging.getLogger("meshfusion"), list[World]()
    before = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    try:
        yield worlds
        told = "\n".join(log.lines)
        assert told
        assert not any(text.split(":")[2] in told for text in worlds[0].disk.all_texts), "a key is in the log"
    except Exception as error:
        raise HistoryFailed(f"{what}: {error!r}") from error
    finally:
        logger.removeHandler(log)
        logger.setLevel(before)


def _live(rng: random.Random, parts: Parts) -> World:
    world = World(rng, parts, rng.choice(list(TargetKind)))
    has_right_clock = world.disk.is_flawless = rng.random() < 0.5
    world.lifetime_s = rng.choice((SHORT_S, LIFETIME_S, LIFETIME_S))
    world.start()
    for _ in range(rng.choice((2, 4))):
        world.attach()
    world.kill_rate = rng.choice((0.0, 0.01, 0.1))
    ways = _ways(world, has_right_clock=has_right_clock)
    for way in rng.choices(list(ways), list(ways.values()), k=STEPS):
        way()
        world.pass_time(rng.choice((1.0, 3.0, 20.0)))
        world.check()
    _become_quiet(world, has_right_clock=has_right_clock)
    return world


def _ways(world: World, *, has_right_clock: bool) -> dict[Callable[[], None], float]:
    return {
        world.round: 4,
        world.stir_host: 7,
        world.rekey: 2,
        world.attach: 1,
        partial(_condemn, world): 0.5,
        world.lose_service: 0.7,
        partial(_start, world): 4,
        world.target.restart: 0.7,
        partial(_toggle_target, world): 1,
        world.lose_power: 0.4,
        partial(_set_clock, world): 0 if has_right_clock else 1,
    }


def _condemn(world: World) -> None:
    served = world.holders_to_serve()
    if served and world.life is not None:
        world.condemned.add(world.rng.choice(served))


def _start(world: World) -> None:
    if world.life is None:
        world.start()
        world.told["started again"] += 1


def _toggle_target(world: World) -> None:
    world.target.is_down = not world.target.is_down


def _set_clock(world: World) -> None:
    world.wall_off_s += world.rng.choice((-1e6, -100.0, 100.0, 1e6))


def _become_quiet(world: World, *, has_right_clock: bool) -> None:
    """No faults any more: soon every host that is alive connects with its newest key, which is not too old."""
    world.is_calm = world.target.is_flawless = world.disk.is_flawless = True
    world.target.is_down = False
    for engine in world.engines:
        engine.late_replies.clear()
    _start(world)
    _pass_time(world, SLACK_S if has_right_clock else SLACK_S + RETRY_S)
    if has_right_clock:
        _check_ages(world)
    assert world.life is not None
    world.life.keeping.renew = lambda served: None  # type: ignore[method-assign]  # or there is always somebody's turn
    _pass_time(world, 3 * HEARTBEAT_S)
    _check_quiet(world)


def _pass_time(world: World, time_s: float) -> None:
    end_s = world.now_s + time_s
    while world.now_s < end_s:
        world.pass_time(PERIOD_S)


def _check_ages(world: World) -> None:
    """However often the service was restarted."""
    for engine in world.served():
        age_s = world.now_s - world.born_s[world.target.asked(engine.nqn)]  # it may not have heard of it yet
        assert engine.is_old or age_s <= LIFETIME_S + SLACK_S, f"{engine.name} has had its key for {age_s:g} s"


def _check_quiet(world: World) -> None:
    assert world.life is not None
    for engine in world.served():
        newest = world.life.keys.read(engine.name)
        assert world.target.asked(engine.nqn) == newest, f"the target has not the newest key of {engine.name}"
        assert engine.key == newest, f"{engine.name} has not its newest key"
        assert len(world.disk.files_of(engine.name)) == 1, f"a former key of {engine.name} is still there"
        world.disconnect(engine)
        assert world.target.connect_with(engine.nqn, engine.key), f"{engine.name} is not let in"
    for name in world.gone:
        assert not world.disk.files_of(name), f"a key of {name} is left, which is gone"
    kept = {path.name.split(".")[0] for path in world.disk.texts}
    assert kept <= set(world.listed) - world.gone, "a key of nobody is left"
