"""Whether a path is used, and how much. A state machine; times are arguments. ::

LIVE <-> SUSPECT       answers stay away, then come after all
any  --> QUARANTINED   its connection is lost, what it was given is in doubt, or errors are frequent
QUARANTINED --> REENTERING --> LIVE    its share grows while it works
"""

from __future__ import annotations

import enum

from meshfusion.host.path.flexpath.settings import SpreadSettings

_ERROR_DECAY = 0.9
_ERRORS_MAX = 3.0  # three in a row, or about a third of the answers for long


class PathState(enum.Enum):
    LIVE = "live"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    REENTERING = "re-entering"


_S = PathState


class Health:
    """Of one path. It begins without a connection; the first one makes it live at once."""

    def __init__(self, settings: SpreadSettings) -> None:
        self._settings = settings
        self._state = _S.QUARANTINED
        self._is_connected = False
        self._is_suspect = False
        self._until_s = 0.0
        self._failed_s = 0.0
        self._strikes = 0
        self._errors = 0.0
        self._share = 1.0
        self._step_end_s = 0.0
        self._worked = False
        self._live_since_s = 0.0

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> PathState:
        return _S.SUSPECT if self._is_suspect else self._state

    @property
    def is_usable(self) -> bool:
        """May it be given something new?"""
        return self.state in (_S.LIVE, _S.REENTERING)

    @property
    def may_recover(self) -> bool:
        """Is it worth waiting for, because it is decided soon?"""
        return self._is_suspect

    @property
    def share(self) -> float:
        """Of what the path could take, above 0 and up to 1. Only for a usable one."""
        return self._share if self._state is _S.REENTERING else 1.0

    @property
    def strikes(self) -> int:
        """Failures that were not forgiven yet."""
        return self._strikes

    # ---- events --------------------------------------------------------------------------------------------------

    def connected(self, now_s: float) -> None:
        self._is_connected = True
        if self._strikes == 0 and self._state is _S.QUARANTINED:  # it was never there to fail
            self._state, self._live_since_s = _S.LIVE, now_s

    def lost(self, now_s: float) -> None:
        """Its connection."""
        self._is_connected = False
        self.failed(now_s)

    def failed(self, now_s: float) -> None:
        """It is not used for a while. One failure has many signs: those that come meanwhile only make it longer."""
        self._is_suspect = False
        self._failed_s = now_s
        if self._state is _S.QUARANTINED:
            self._until_s = max(self._until_s, now_s + self._settings.quarantine_s)
            return
        self._state = _S.QUARANTINED
        self._strikes += 1
        self._errors = 0.0
        pause_s = self._settings.quarantine_s * 2.0 ** min(self._strikes - 1, 30)
        self._until_s = now_s + min(pause_s, self._settings.quarantine_max_s)

    def needed(self) -> None:
        """There is no other way to what it reaches: it stays out no longer than after a first failure."""
        if self._state is _S.QUARANTINED:
            self._until_s = min(self._until_s, self._failed_s + self._settings.quarantine_s)

    def answered(self) -> None:
        """A request came back well."""
        self._is_suspect = False
        self._worked = True
        self._errors *= _ERROR_DECAY

    def erred(self, now_s: float) -> None:
        """The path itself caused an error."""
        self._is_suspect = False
        self._errors = self._errors * _ERROR_DECAY + 1
        if self._errors >= _ERRORS_MAX * _ERROR_DECAY:
            self.failed(now_s)

    def silent(self) -> None:
        """It should have answered by now."""
        if self.is_usable:
            self._is_suspect = True

    def tick(self, now_s: float) -> None:
        if self._is_suspect:
            return
        if self._state is _S.QUARANTINED and self._is_connected and now_s >= self._until_s:
            self._state = _S.REENTERING
            self._share = self._settings.reentry_share
            self._begin_step(now_s)
        elif self._state is _S.REENTERING and now_s >= self._step_end_s and self._worked:
            self._share *= 2
            self._begin_step(now_s)
            if self._share >= 1:
                self._state, self._live_since_s = _S.LIVE, now_s
        elif self._state is _S.LIVE and now_s - self._live_since_s >= self._settings.forgive_s:
            self._strikes = 0

    def _begin_step(self, now_s: float) -> None:
        self._worked = False
        self._step_end_s = now_s + self._settings.reentry_step_s
