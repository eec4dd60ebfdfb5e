"""The host: it asks for reads and writes, carries out effects, and knows what must have come back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshfusion.host.path.flexpath.health import PathState
from meshfusion.host.path.flexpath.requests import Attempt, Begin, Kind, NoPathError, PathChanged, SpreadEffect
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.flexpath.spread import Spread
from meshfusion.jbof.nvme.logs import AnaState
from meshfusion.jbof.nvme.transfer_effects import (
    TransferDone,
    TransferEffect,
    TransferFailed,
    TransferInDoubt,
    TransferMemoryFree,
)
from tests.host.path.flexpath.sim.memory import MAX_BLOCKS, NOMINAL_BLOCK_BYTES, Extent, HostMemory, Slot, View
from tests.host.path.flexpath.sim.path import MAX_KILL_S, SimPath, is_refusal
from tests.jbof.nvme.sim.fabric import Clock
from tests.jbof.nvme.sim.rules import must

TICK_S = 0.005
GRACE_S = 2 * TICK_S
NEW_SHARE_S = 0.2  # after it came back a path is on trial at least this long
ACCESS_SETTLED_S = 1.5  # longer than a refusal keeps a path from being asked
OPTIMIZED = AnaState.OPTIMIZED


@dataclass(eq=False)
class Asked:
    """One request. ``data``: what a write writes."""

    kind: Kind
    extent: Extent
    slot: Slot
    deadline_s: float
    timeout_s: float
    data: bytes = b""
    outcome: str = ""
    must_not_repeat: bool = False
    when_over: Callable[[], None] | None = None


@dataclass
class Watched:
    """What the host knows of a path by itself."""

    outstanding: dict[Attempt, int] = field(default_factory=dict)
    lost_s: float = -1e9
    first_use_s: float | None = None  # since it was lost
    had_trouble: bool = False
    access_s: float = -1e9  # when that changed
    refused_s: dict[int, float] = field(default_factory=dict)  # when, by namespace, and nothing was told since


class Host:
    """``is_protected``: path 0 has no faults, so that no read may fail."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        seen: Counter[str],
        paths: Sequence[SimPath],
        settings: SpreadSettings,
        *,
        is_protected: bool = False,
    ) -> None:
        self.clock = clock
        self.rng = rng
        self.seen = seen
        self.paths = paths
        self.settings = settings
        self.is_protected = is_protected
        self.spread = Spread(settings, [1.0] * len(paths))
        self.memory = HostMemory(rng)
        self.watched = [Watched() for _ in paths]
        self.disabled: set[int] = set()
        self.open: dict[Asked, None] = {}
        self.extents: list[Extent] = []  # with certain content
        self.free: list[Extent] = []
        self.nsids: Sequence[int] = (1,)
        self.done_bytes = 0
        for path in paths:
            path.tell, path.lost, path.up = self.on_transfer, self.on_lost, self.on_up
        self.tick()

    # ---- asking --------------------------------------------------------------------------------------------------

    def write(self, timeout_s: float, blocks: int | None = None) -> Asked:
        blocks = blocks or self.rng.randint(1, MAX_BLOCKS)
        fitting = [extent for extent in self.free if extent.blocks == blocks]
        if fitting and self.rng.random() < 0.8:
            extent = self.rng.choice(fitting)
            self.free.remove(extent)
        else:
            extent = Extent(self.rng.choice(self.nsids), blocks)
        extent.expected = None
        return self._ask(Kind.WRITE, extent, timeout_s)

    def read(self, timeout_s: float) -> Asked | None:
        if not self.extents:
            return None
        extent = self.rng.choice(self.extents)
        extent.reads += 1
        return self._ask(Kind.READ, extent, timeout_s)

    def recycle(self) -> None:
        """An extent that nobody reads is free for other data."""
        idle = [extent for extent in self.extents if not extent.reads]
        if idle:
            extent = self.rng.choice(idle)
            self.extents.remove(extent)
            self.free.append(extent)

    def _ask(self, kind: Kind, extent: Extent, timeout_s: float) -> Asked:
        now_s = self.clock.now_s
        asked = Asked(kind, extent, self.memory.lend(), now_s + timeout_s, timeout_s)
        if kind is Kind.WRITE:
            asked.data = self.rng.randbytes(len(extent.content))
            asked.slot.data[: len(asked.data)] = asked.data
        self.open[asked] = None
        length_bytes = extent.blocks * NOMINAL_BLOCK_BYTES
        self.on_effects(self.spread.begin(now_s, asked, kind, extent.nsid, length_bytes, asked.deadline_s))
        return asked

    # ---- operating -----------------------------------------------------------------------------------------------

    def disable(self, path: int) -> None:
        self.disabled.add(path)
        effects = self.spread.disable(self.clock.now_s, path)
        must(not any(isinstance(effect, PathChanged) for effect in effects), "a path that is disabled counts as failed")
        self.on_effects(effects)

    def enable(self, path: int) -> None:
        self.disabled.discard(path)
        self.on_effects(self.spread.enable(self.clock.now_s, path))

    # ---- events --------------------------------------------------------------------------------------------------

    def on_transfer(self, effect: TransferEffect) -> None:
        attempt = effect.owner
        assert isinstance(attempt, Attempt)
        if not isinstance(effect, TransferInDoubt):
            del self.watched[attempt.path].outstanding[attempt]
        if isinstance(effect, TransferFailed):
            owner = attempt.request.owner
            assert isinstance(owner, Asked)
            owner.must_not_repeat = not effect.is_retryable
            self.watched[attempt.path].had_trouble = True
            if is_refusal(effect.error):
                self.watched[attempt.path].refused_s[attempt.request.nsid] = self.clock.now_s
        self.on_effects(self.spread.on_transfer(self.clock.now_s, effect))

    def on_lost(self, path: int) -> None:
        watched = self.watched[path]
        watched.lost_s, watched.first_use_s, watched.had_trouble = self.clock.now_s, None, True
        self.on_effects(self.spread.lost(self.clock.now_s, path))

    def on_up(self, path: int, has_connected: bool) -> None:
        self.watched[path].access_s = self.clock.now_s
        self.watched[path].refused_s.clear()
        tell = self.spread.connected if has_connected else self.spread.access_changed
        self.on_effects(tell(self.clock.now_s, path, dict(self.paths[path].told_access)))

    def tick(self) -> None:
        self.on_effects(self.spread.tick(self.clock.now_s))
        for asked in self.open:
            late_s = self.clock.now_s - asked.deadline_s
            must(asked.outcome or late_s < GRACE_S, asked.kind.value, "is open after its deadline")
            must(late_s < GRACE_S + MAX_KILL_S, asked.kind.value, "keeps its memory when its queue pair is dead")
        self.clock.after(TICK_S, self.tick)

    def on_effects(self, effects: Sequence[SpreadEffect]) -> None:
        for effect in effects:
            match effect:
                case Begin(attempt):
                    self._begin(attempt)
                case PathChanged(path, state):
                    self.seen[f"path {state.value}"] += 1
                    if state is PathState.SUSPECT:
                        self.watched[path].had_trouble = True
                case _:
                    self._ended(effect)

    # ---- rules ---------------------------------------------------------------------------------------------------

    def _begin(self, attempt: Attempt) -> None:
        now_s, asked = self.clock.now_s, attempt.request.owner
        assert isinstance(asked, Asked)
        watched, path = self.watched[attempt.path], self.paths[attempt.path]
        must(asked in self.open and not asked.outcome, "a request that has ended is sent")
        must(attempt.path not in self.disabled, "something begins on a disabled path")
        must(now_s < asked.deadline_s, "a command is sent after its deadline")
        must(now_s < attempt.deadline_s <= asked.deadline_s, "a command may become older than its deadline")
        must(not asked.must_not_repeat, "what may not be repeated is")
        must(now_s >= watched.lost_s + 0.9 * self.settings.quarantine_s, "a path that was just lost is used")
        self._check_access(attempt, path.told_access)
        length_bytes = attempt.request.length_bytes
        outstanding_bytes = sum(watched.outstanding.values())
        limit_bytes = self.settings.max_outstanding_bytes
        if watched.lost_s > 0:
            if watched.first_use_s is None:
                watched.first_use_s = now_s
            if now_s < watched.first_use_s + NEW_SHARE_S:
                limit_bytes //= 4
        must(
            not outstanding_bytes or outstanding_bytes + length_bytes <= limit_bytes,
            f"path {attempt.path} has {outstanding_bytes} + {length_bytes} bytes under way, more than {limit_bytes}",
        )
        watched.outstanding[attempt] = length_bytes
        self.seen["attempts"] += 1
        if attempt.request.attempts > 1:
            self.seen[f"{asked.kind.value}s repeated"] += 1
        path.begin(attempt, asked.extent, View(asked.slot, asked.slot.lease, len(asked.extent.content)))

    def _check_access(self, attempt: Attempt, told: dict[int, AnaState]) -> None:
        nsid = attempt.request.nsid
        must(told[nsid].is_usable, "a namespace is used on a path that does not reach it")
        refused_s = self.watched[attempt.path].refused_s.get(nsid, -1e9)
        must(self.clock.now_s >= refused_s + self.settings.access_pause_s, "a path that refused is asked again at once")
        if told[nsid] is OPTIMIZED:
            return
        self.seen["attempts on a path that is not optimized"] += 1
        for other, watched in zip(self.paths, self.watched, strict=True):
            is_settled = self.clock.now_s > watched.access_s + ACCESS_SETTLED_S
            is_good = is_settled and other.is_connected and not watched.had_trouble
            is_good = is_good and other.number not in self.disabled
            must(
                not (is_good and other.told_access[nsid] is OPTIMIZED),
                f"path {attempt.path} is not optimized, path {other.number} is",
            )

    def _ended(self, effect: SpreadEffect) -> None:
        assert isinstance(effect, TransferDone | TransferFailed | TransferInDoubt | TransferMemoryFree)
        asked = effect.owner
        assert isinstance(asked, Asked)
        must(asked in self.open, "a request ends twice")
        self.seen[f"{asked.kind.value} {type(effect).__name__}"] += 1
        if isinstance(effect, TransferMemoryFree):
            must(asked.outcome == "in doubt", "memory is freed that was not in doubt")
            self._over(asked)
            return
        must(not asked.outcome, "a request has two outcomes")
        match effect:
            case TransferDone():
                asked.outcome = "done"
                self.done_bytes += asked.extent.blocks * NOMINAL_BLOCK_BYTES
                self._done(asked)
                self._over(asked)
            case TransferFailed(_, error, is_retryable):
                asked.outcome = "failed"
                if isinstance(error, NoPathError) and "disabled by an operator" in error.message:
                    self.seen["failed while paths are disabled"] += 1
                self._check_failure(asked, error if is_retryable else None)
                if asked.kind is Kind.WRITE:
                    self.free.append(asked.extent)  # its fate is known
                self._over(asked)
            case TransferInDoubt(_, error):
                asked.outcome = "in doubt"  # a write's extent is used for nothing any more
                if asked.kind is Kind.READ:
                    self._check_failure(asked, error)

    def _check_failure(self, asked: Asked, error: object) -> None:
        """Reads that have the time survive everything that happens to other paths."""
        can_fail = asked.kind is Kind.WRITE or not self.is_protected or asked.timeout_s < 8
        must(can_fail or error is None, "a read failed although path 0 is good:", error)

    def _done(self, asked: Asked) -> None:
        extent = asked.extent
        if asked.kind is Kind.WRITE:
            extent.expected = asked.data
            self.extents.append(extent)
            return
        data = bytes(asked.slot.data[: len(extent.content)])
        must(data == extent.expected, "a read brought other bytes than were written")
        self.seen["reads compared"] += 1

    def _over(self, asked: Asked) -> None:
        del self.open[asked]
        if asked.kind is Kind.READ:
            asked.extent.reads -= 1
        self.memory.give_back(asked.slot)
        if asked.when_over is not None:
            asked.when_over()
