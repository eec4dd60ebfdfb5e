"""What keys of hosts lie on, in histories: a disk that loses power, and targets that ask for keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from meshfusion.dpu.export.desired import Host
from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.key_disk import KeyDisk
from meshfusion.dpu.export.plan import TargetKind
from meshfusion.dpu.export.steps import AddHost, SetHostKey, Step
from meshfusion.jbof.errors import MediaError
from meshfusion.jbof.nvme.auth_keys import key_id
from tests.sim.target import TargetModel, allowed

FULL_RATE = 0.03
REFUSED_RATE = 0.05


class DiskModel(KeyDisk):
    """``point``: called between every two things that are done; it may end the service. ``may_write``: a file of that
    incarnation now? ``wall_s``: what its clock says."""

    def __init__(
        self,
        rng: random.Random,
        point: Callable[[str], None],
        may_write: Callable[[str], bool],
        wall_s: Callable[[], float],
    ) -> None:
        self._rng, self._point, self._may_write, self._wall_s = rng, point, may_write, wall_s
        self.is_flawless = False
        self.texts: dict[Path, str] = {}
        self.made_s: dict[Path, float] = {}
        self.durable: dict[Path, str] = {}
        self.all_texts: list[str] = []

    # ---- as the service sees it ----------------------------------------------------------------------------------

    def names(self, folder: Path) -> list[str]:
        return [path.name for path in self.texts if path.parent == folder]

    def read(self, file: Path) -> str:
        if file not in self.texts:
            raise MediaError(f"the key file {file}: No such file or directory", next_step="none")
        return self.texts[file]

    def write(self, file: Path, text: str) -> None:
        assert self._may_write(file.name.split(".")[0]), f"{file} is written for one that is gone"
        self.all_texts.append(text)
        part = file.with_name(f".{file.name}.new")
        self._point(f"write {file.name}")
        self.texts[part] = text[: self._rng.randrange(len(text))]
        self._point("write: a part")
        self._may_be_full(file)
        self.texts[part] = self.durable[part] = text
        self._point("write: all of it")
        del self.texts[part]
        self.texts[file], self.made_s[file] = text, self._wall_s()
        self._point("write: under its name")
        self._may_be_full(file)
        self.sync(file.parent)
        self._point("write: durably")

    def remove(self, file: Path) -> None:
        for path in (file, file.with_name(f".{file.name}.new")):
            self._point(f"remove {path.name}")
            self.texts.pop(path, None)

    def sync(self, folder: Path) -> None:
        """All names; what a file that was not finished has in it matters to nobody."""
        self.durable = dict(self.texts)

    def made_at_s(self, file: Path) -> float | None:
        return self.made_s.get(file)

    # ---- what happens to it --------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """What was not synced may be there all the same, and what was removed may be back."""
        doubtful = (self.texts.keys() | self.durable.keys()) - {
            path for path, text in self.durable.items() if self.texts.get(path) == text
        }
        self.texts = {path: self.durable[path] for path in self.durable if path not in doubtful} | {
            path: (self.durable.get(path) or self.texts[path]) for path in sorted(doubtful) if self._rng.random() < 0.5
        }
        self.durable = dict(self.texts)

    def files_of(self, incarnation: str) -> list[Path]:
        return [path for path in self.texts if path.name.split(".")[0] == incarnation]

    def _may_be_full(self, file: Path) -> None:
        if not self.is_flawless and self._rng.random() < FULL_RATE:
            raise MediaError(f"the key file {file}: No space left on device", next_step="none")


class KeyedTarget(TargetModel):
    """It reads a key's file when a host connects (SPDK), or once, when it is told of the key (the kernel).

    ``set_texts``: by host NQN, the key that the last step named, as it was then. ``changes``: how often that, or
    whether it knows the host at all, has changed."""

    def __init__(self, kind: TargetKind, rng: random.Random, disk: DiskModel, point: Callable[[str], None]) -> None:
        super().__init__(kind, rng, lambda _: False, lambda _nqn, _nsid: False, lambda _: None)
        self._disk, self._point = disk, point
        self._files: dict[str, Path] = {}
        self.set_texts: dict[str, str] = {}
        self.ever_asked: dict[str, list[str]] = {}
        self.changes: dict[str, int] = {}

    def restart(self) -> None:
        super().restart()
        for host_nqn in self.set_texts:
            self._changed(host_nqn)
        self.set_texts.clear()
        self._files.clear()

    def knows(self, host_nqn: str) -> bool:
        return any(host_nqn in there.host_nqns for there in self.subsystems.values())

    def asked(self, host_nqn: str) -> str:
        """The key that it would ask the host for now; empty: it does not know the host."""
        if not self.knows(host_nqn):
            return ""
        if self.kind is TargetKind.SPDK:
            return self._disk.texts.get(self._files[host_nqn], "its file is gone")
        return self.set_texts[host_nqn]

    def connect_with(self, host_nqn: str, key: str) -> bool:
        return self.asked(host_nqn) == key and self.connect(host_nqn)

    def apply(self, step: Step) -> None:
        self._point(f"before {step}")
        if isinstance(step, SetHostKey) and not self.is_flawless and self._rng.random() < REFUSED_RATE:
            raise StepRefusedError("the target does not want to", code=-1, next_step="none")
        super().apply(step)
        self._point(f"after {step}")

    def _do(self, step: Step) -> None:
        if isinstance(step, AddHost | SetHostKey):
            self._take(step.host)
        super()._do(step)
        if isinstance(step, AddHost | SetHostKey) and self.kind is TargetKind.NVMET:
            self._report_as_read(step)

    def _take(self, host: Host) -> None:
        assert host.key is not None
        if host.key.file not in self._disk.texts:
            raise StepRefusedError(f"{host.key.file} is not there", code=-2, next_step="none")
        text = self._disk.texts[host.key.file]
        assert self._disk.durable.get(host.key.file) == text, "the target is given a key that a power failure undoes"
        self._files[host.nqn], self.set_texts[host.nqn] = host.key.file, text
        asked = self.ever_asked.setdefault(host.nqn, [])
        assert text not in asked[:-1], f"{host.nqn} is asked for a key that had been replaced"
        if text not in asked:
            asked.append(text)
        self._changed(host.nqn)

    def _report_as_read(self, step: AddHost | SetHostKey) -> None:
        there = self.subsystems[step.nqn]
        known, text = allowed(step.host), self.set_texts[step.host.nqn]
        read = type(known)(known.nqn, key_id(text))
        self.subsystems[step.nqn] = type(there)(
            **{name: getattr(there, name) for name in there.__slots__} | {"hosts": there.hosts - {known} | {read}}
        )

    def _changed(self, host_nqn: str) -> None:
        self.changes[host_nqn] = self.changes.get(host_nqn, 0) + 1
