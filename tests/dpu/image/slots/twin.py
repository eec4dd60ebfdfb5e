"""A twin of ``slotctl`` in Python, for simulations: what it decides, what is durable, and what a loss of power leaves.

That it is a twin is shown by ``test_slotctl.py``, which takes the script and it through the same histories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from meshfusion.dpu.image.slots.card_state import CardState, ServiceRuns, Trial


class RefusedError(Exception):
    """The script's exit code 3."""


class BusyError(RefusedError):
    """The same, and it passes."""


class DamagedError(Exception):
    """Exit code 4."""


class Runner(Protocol):
    def restart(self) -> None: ...
    def stop(self) -> None: ...
    def state(self) -> ServiceRuns: ...
    def arm(self, seconds: int, token: str) -> None: ...
    def disarm(self) -> None: ...


@dataclass(frozen=True)
class Decided:
    """The file STATE."""

    committed: str = ""
    trial: str = ""
    token: str = ""
    phase: str = ""
    boot: str = ""
    until: int = 0
    last: str = ""


@dataclass
class Twin:
    """``now_s``: since this boot. ``durable``: called before each change that a loss of power may come before."""

    runner: Runner
    now_s: Callable[[], float]
    boot: str = "boot-0"
    machine: str = "aarch64"
    free_bytes: int = 10 << 30
    durable: Callable[[], None] = lambda: None
    decided: Decided = field(default_factory=Decided)
    current: str = ""
    slots: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, int] = field(default_factory=dict)

    def _save(self, decided: Decided) -> None:
        self.durable()
        self.decided = decided
        self.durable()

    def _is_over(self) -> bool:
        return self.decided.boot != self.boot or int(self.now_s()) >= self.decided.until

    def _end(self, how: str, committed: str | None = None) -> None:
        d = self.decided
        self._save(Decided(committed=d.committed if committed is None else committed, last=f"{d.token} {how}"))

    def pick(self) -> str:
        d = self.decided
        if d.trial and d.phase == "armed" and not self._is_over():
            self._save(replace(d, phase="started"))
            chosen = d.trial
        else:
            if d.trial:
                self._end("its time was over" if self._is_over() else "its service stopped")
            chosen = d.committed
        if not chosen:
            raise RefusedError
        self.current = chosen
        return chosen

    def status(self) -> CardState:
        d = self.decided
        left = 0 if self._is_over() else d.until - int(self.now_s())
        return CardState(
            machine=self.machine, boot=self.boot, service=self.runner.state(), running=self.current,
            committed=d.committed, free_bytes=self.free_bytes,
            trial=Trial(d.trial, d.token, d.phase == "started", left) if d.trial else None,
            last=d.last, slots=dict(self.slots), blobs=dict(self.blobs),
        )  # fmt: skip

    def put(self, digest: str, offset: int, total: int, data_bytes: int, *, is_damaged: bool = False) -> None:
        part = f"{digest}.part"
        if self.blobs.setdefault(part, 0) != offset:
            raise BusyError
        self.blobs[part] += data_bytes
        if self.blobs[part] < total:
            return
        if self.blobs[part] != total or is_damaged:
            del self.blobs[part]
            raise DamagedError
        self.durable()
        self.blobs[digest] = self.blobs.pop(part)

    def forget(self, *names: str) -> None:
        for name in names:
            self.blobs.pop(name, None)

    def unpack(self, slot: str, manifest: str, *others: str) -> None:
        if slot == self.decided.committed:
            raise RefusedError
        if slot == self.decided.trial:
            raise BusyError
        if self.current == slot and not self.runner.state().is_down:
            raise BusyError
        self.durable()
        if slot in self.slots:
            self.slots[slot] = ""
        self.durable()
        if not all(digest in self.blobs for digest in (manifest, *others)):
            raise RefusedError
        self.slots[slot] = ""
        self.durable()
        self.slots[slot] = manifest

    def arm(self, slot: str, token: str, seconds: int, digest: str) -> None:
        d = self.decided
        if d.trial:
            if (d.token, d.trial) == (token, slot):
                return
            if not self._is_over():
                raise BusyError
            self._end("its time was over")
            d = self.decided
        if slot == d.committed or self.slots.get(slot, "") != digest:
            raise RefusedError
        self.runner.arm(seconds, token)
        self._save(replace(
            d, trial=slot, token=token, phase="armed", boot=self.boot, until=int(self.now_s()) + seconds
        ))  # fmt: skip

    def switch(self, token: str) -> None:
        d = self.decided
        if not d.trial or d.token != token:
            raise RefusedError
        if d.phase == "armed":
            self.runner.restart()

    def commit(self, token: str) -> None:
        d = self.decided
        if d.last == f"{token} committed":
            return
        is_on = d.trial and d.token == token and d.phase == "started" and not self._is_over()
        if not is_on or self.runner.state() is not ServiceRuns.RUNNING:
            raise RefusedError
        self._end("committed", committed=d.trial)
        self.runner.disarm()

    def _give_back(self, token: str, how: str) -> None:
        d = self.decided
        if d.trial:
            if d.token != token:
                return
            self._end(how)
        elif self.current == d.committed and not self.runner.state().is_down:
            return
        if d.committed:
            self.runner.restart()
        else:
            self.runner.stop()

    def abort(self, token: str, how: str) -> None:
        self._give_back(token, how)
        self.runner.disarm()

    def expire(self, token: str) -> None:
        self._give_back(token, "its time was over")
