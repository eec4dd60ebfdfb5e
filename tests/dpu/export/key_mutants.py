"""Planted bugs in how keys are replaced. Histories must find every one (``test_key_histories``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from meshfusion.dpu.api.types import Export as Reach
from meshfusion.dpu.export.actual import Actual
from meshfusion.dpu.export.desired import HostKey
from meshfusion.dpu.export.key_keeping import KeyKeeping, logger
from meshfusion.dpu.export.key_rotation import ServedKey
from meshfusion.dpu.export.keys import HostKeys
from meshfusion.dpu.export.plan import ExportPlan
from meshfusion.jbof.nvme.auth_keys import key_id
from tests.dpu.export.key_world import Parts


class _KeepsFormerKeys(HostKeys):
    def is_there(self, incarnation: str, there_id: str) -> None:
        pass


class _DropsTheFormerAtOnce(HostKeys):
    """The target asks for it still."""

    def replace(self, incarnation: str) -> None:
        super().replace(incarnation)
        self.is_there(incarnation, self.wanted(incarnation).id)


class _ReplacesInTheFile(HostKeys):
    """As long as there was one file for all."""

    def replace(self, incarnation: str) -> None:
        path = self.path(incarnation)
        if path in self._files(incarnation):
            text = self._kind.new_text()
            self._write(path, text)
            self._newest[incarnation] = HostKey(path, key_id(text))


class _WritesLater(HostKeys):
    """The target is given what the next owner of the pool may not find."""

    def replace(self, incarnation: str) -> None:
        super().replace(incarnation)
        if incarnation in self._newest:
            self._disk.durable.pop(self._newest[incarnation].file, None)  # type: ignore[attr-defined]


class _DoesNotSync(HostKeys):
    """What an owner finds that it has not written itself."""

    def forget_all_but(self, incarnations: Iterable[str]) -> None:
        self._disk.sync = lambda folder: None  # type: ignore[method-assign]
        super().forget_all_but(incarnations)
        del self._disk.sync


class _ForgetsAtRestart(HostKeys):
    """The first one is it, is it not?"""

    def path(self, incarnation: str) -> Path:
        known = self._newest.get(incarnation)
        return known.file if known is not None else (self._files(incarnation) or [self._file(incarnation, 0)])[0]


class _LeavesKeysBehind(HostKeys):
    def forget(self, incarnation: str) -> None:
        self._newest.pop(incarnation, None)
        self._disk.remove(self._file(incarnation, 0))


class _IsAsYoungAsTheService(HostKeys):
    def age_s(self, incarnation: str, wall_s: float) -> float:
        return 0.0


class _WritesForAnybody(HostKeys):
    def replace(self, incarnation: str) -> None:
        if self._files(incarnation):
            super().replace(incarnation)
        else:
            self.make(incarnation)


class _RenewsAllItKnew(KeyKeeping):
    """Fenced ones, too."""

    def renew(self, served: Iterable[str]) -> None:
        self._all = dict.fromkeys((*getattr(self, "_all", ()), *served))
        super().renew(self._all)

    def _served_key(self, keys: HostKeys, incarnation: str, wall_s: float) -> ServedKey:
        known = super()._served_key(keys, incarnation, wall_s)
        return known if known.id else ServedKey(self._rotation.known_by(incarnation))


class _TellsBeforeTheTargetHasIt(KeyKeeping):
    def hear(self, incarnation: str, known_id: str) -> str:
        super().hear(incarnation, known_id)
        assert self._keys is not None
        wanted = self._keys.wanted(incarnation)
        return self._keys.read(incarnation) if known_id and wanted.id not in ("", known_id) else ""


class _TellsOnce(KeyKeeping):
    """An answer that is lost is lost."""

    def hear(self, incarnation: str, known_id: str) -> str:
        text = super().hear(incarnation, known_id)
        told = self.__dict__.setdefault("_once", set())
        if not text or key_id(text) in told:
            return ""
        told.add(key_id(text))
        return text


class _DoesNotWaitForTheTarget(KeyKeeping):
    def _served_key(self, keys: HostKeys, incarnation: str, wall_s: float) -> ServedKey:
        known = super()._served_key(keys, incarnation, wall_s)
        return ServedKey(known.id, True, known.age_s)


class _RenewsThoseThatDoNotListen(KeyKeeping):
    def renew(self, served: Iterable[str]) -> None:
        served = tuple(served)
        assert self._keys is not None
        for incarnation in served:
            if not self._rotation.known_by(incarnation):
                self._rotation.heard(incarnation, self._keys.wanted(incarnation).id)
        super().renew(served)


class _TellsKeysToTheLog(KeyKeeping):
    def hear(self, incarnation: str, known_id: str) -> str:
        text = super().hear(incarnation, known_id)
        if text:
            logger.info("holder %s is told %s", incarnation, text)
        return text


class _AdmitsWithTheNewest(ExportPlan):
    def reach(self, incarnation: str, key_id: str = "") -> Reach:
        return super().reach(incarnation)


class _TakesAnyKeyForTheRightOne(ExportPlan):
    """The target asks for some key: so it asks for the newest."""

    def key_ids(self, actual: Actual, incarnations: Iterable[str]) -> dict[str, str]:
        keys, there = self.keys, super().key_ids(actual, incarnations)
        assert keys is not None
        return {incarnation: keys.wanted(incarnation).id if known else "" for incarnation, known in there.items()}


MUTANTS: Mapping[str, Parts] = {
    "keeps a former key for ever": Parts(keys=_KeepsFormerKeys),
    "drops a former key while the target asks for it": Parts(keys=_DropsTheFormerAtOnce),
    "replaces a key in its file": Parts(keys=_ReplacesInTheFile),
    "sets a key in the target before it is durable": Parts(keys=_WritesLater),
    "takes over a key that is not durable": Parts(keys=_DoesNotSync),
    "forgets at a restart that a key was replaced": Parts(keys=_ForgetsAtRestart),
    "forgets at a restart how old a key is": Parts(keys=_IsAsYoungAsTheService),
    "leaves keys of those that are gone": Parts(keys=_LeavesKeysBehind),
    "renews the key of a fenced incarnation": Parts(keys=_WritesForAnybody, keeping=_RenewsAllItKnew),
    "tells a key before the target has it": Parts(keeping=_TellsBeforeTheTargetHasIt),
    "tells a key once": Parts(keeping=_TellsOnce),
    "replaces a key that the target does not ask for yet": Parts(keeping=_DoesNotWaitForTheTarget),
    "replaces keys of engines that would not learn of it": Parts(keeping=_RenewsThoseThatDoNotListen),
    "writes a key to the log": Parts(keeping=_TellsKeysToTheLog),
    "admits with a key that the target does not ask for yet": Parts(plan=_AdmitsWithTheNewest),
    "takes any key of a target for the newest": Parts(plan=_TakesAnyKeyForTheRightOne),
}
