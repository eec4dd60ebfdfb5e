"""What is known of one path: its health and speed, what is under way on it, and what it reaches. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from meshfusion.host.path.flexpath.choice import Candidate
from meshfusion.host.path.flexpath.health import Health
from meshfusion.host.path.flexpath.requests import Attempt, Kind, Request
from meshfusion.host.path.flexpath.settings import SpreadSettings
from meshfusion.host.path.flexpath.speed import Speed
from meshfusion.jbof.nvme.logs import AnaState

_PATIENCE_DOUBLINGS_MAX = 2


class Lane:
    """``weight``: how much worse its way to the memory is than the best one (see
    :mod:`meshfusion.host.path.flexpath.locality`). ``is_disabled``: by an operator, whatever its health is.
    ``read_bytes`` and ``written_bytes``: of requests that were answered well."""

    def __init__(self, path: int, name: str, weight: float, settings: SpreadSettings) -> None:
        assert weight >= 1
        self.path = path
        self.name = name
        self.is_disabled = False
        self.read_bytes = 0
        self.written_bytes = 0
        self.health = Health(settings)
        self.speed = Speed(settings.assumed_bandwidth_bytes_per_s, settings.assumed_latency_s)
        self.outstanding_bytes = 0
        self._weight = weight
        self._settings = settings
        self._attempts: dict[Attempt, None] = {}  # those whose memory is not free, in the order of their beginning
        self._unanswered: dict[Attempt, None] = {}
        self._access: Mapping[int, AnaState] = {}
        self._refused_until_s: dict[int, float] = {}
        self._heard_s = 0.0
        self._overruns = 0

    @property
    def is_usable(self) -> bool:
        """May it be given something new?"""
        return self.health.is_usable and not self.is_disabled

    @property
    def may_recover(self) -> bool:
        """Is it worth waiting for? Nobody knows when an operator enables a path again."""
        return self.health.may_recover and not self.is_disabled

    # ---- what it reaches -----------------------------------------------------------------------------------------

    def set_access(self, access: Mapping[int, AnaState]) -> None:
        self._access = access
        self._refused_until_s.clear()

    def refused(self, now_s: float, nsid: int) -> None:
        """The target said that the namespace is not to be reached here, or the controller knows that it is not."""
        self._refused_until_s[nsid] = now_s + self._settings.access_pause_s

    def reaches(self, now_s: float, nsid: int) -> bool:
        state = self._access.get(nsid)
        return state is not None and state.is_usable and now_s >= self._refused_until_s.get(nsid, 0.0)

    def reached(self, now_s: float) -> list[int]:
        """The namespaces that it reaches, whatever its health is."""
        return [nsid for nsid in self._access if self.reaches(now_s, nsid)]

    def candidate(self, now_s: float, request: Request) -> Candidate:
        return Candidate(
            path=self.path,
            speed=self.speed,
            weight=self._weight,
            share=self.health.share,
            outstanding_bytes=self.outstanding_bytes,
            outstanding_requests=len(self._attempts),
            is_optimized=self._access[request.nsid] is AnaState.OPTIMIZED,
            was_tried=self.path in request.tried,
            wants_probe=now_s - self._heard_s >= self._settings.probe_s,
        )

    def words(self, now_s: float, nsid: int) -> str:
        """Why it is not used for the namespace."""
        state = self._access.get(nsid)
        if self.is_disabled:
            return "disabled by an operator"
        if not self.health.is_usable:
            return self.health.state.value
        if state is None:
            return "does not have it"
        return "refused it" if state.is_usable else state.name.lower().replace("_", " ")

    # ---- what is under way ---------------------------------------------------------------------------------------

    def begin(self, now_s: float, request: Request, *, is_only_one: bool) -> Attempt:
        """``is_only_one``: nothing is gained by giving up early, for there is no other path."""
        self.outstanding_bytes += request.length_bytes
        ahead_bytes = self.outstanding_bytes
        deadline_s = request.deadline_s
        if request.kind is Kind.READ and not is_only_one:
            deadline_s = min(deadline_s, now_s + self._patience_s(self._settings.patience_s, ahead_bytes))
        attempt = Attempt(request, self.path, now_s, deadline_s, ahead_bytes)
        self._attempts[attempt] = self._unanswered[attempt] = None
        return attempt

    def answered(self, now_s: float, attempt: Attempt) -> None:
        """It is done: learn from it."""
        self._heard(now_s, attempt)
        self._overruns = 0
        if attempt.request.kind is Kind.READ:
            self.read_bytes += attempt.request.length_bytes
        else:
            self.written_bytes += attempt.request.length_bytes
        self.speed.observe(now_s, attempt.bytes_ahead, now_s - attempt.begun_s)
        self.health.answered()

    def erred(self, now_s: float, attempt: Attempt, *, is_path_error: bool) -> None:
        """It failed, and it is known how far. Otherwise than in doubt, somebody spoke."""
        self._heard(now_s, attempt)
        if is_path_error:
            self.health.erred(now_s)
        else:
            self.health.answered()

    def failed(self, now_s: float, attempt: Attempt) -> None:
        """The path did not answer in time, or broke."""
        self._unanswered.pop(attempt, None)
        if now_s >= attempt.deadline_s:
            self._overruns += 1
        self.speed.forget()
        self.health.failed(now_s)

    def lost(self, now_s: float) -> None:
        """Its connection. What is under way ends by itself."""
        self.speed.forget()
        self.health.lost(now_s)

    def memory_free(self, attempt: Attempt) -> None:
        """Only now does what was under way not count any more: until then the path works on it for all one knows."""
        del self._attempts[attempt]
        self.outstanding_bytes -= attempt.request.length_bytes
        assert self.outstanding_bytes >= 0

    def tick(self, now_s: float) -> None:
        if self._unanswered:
            oldest = next(iter(self._unanswered))
            since_s = max(self._heard_s, oldest.begun_s)
            if now_s - since_s >= self._patience_s(self._settings.suspect_s, oldest.bytes_ahead):
                self.health.silent()
        self.health.tick(now_s)

    def _heard(self, now_s: float, attempt: Attempt) -> None:
        self._heard_s = now_s
        self._unanswered.pop(attempt, None)

    def _patience_s(self, least_s: float, bytes_ahead: int) -> float:
        """Doubled for a path that is given up again and again: it may just be slow."""
        expected_s = self._settings.patience_factor * self.speed.completion_s(bytes_ahead)
        return max(least_s, expected_s) * 2.0 ** min(self._overruns, _PATIENCE_DOUBLINGS_MAX)
