"""What stands before every call of the service: who calls, may they, in whose name, and the record of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from meshfusion.dpu.api.limits import malformed
from meshfusion.dpu.api.security.identity import CallerIdentity, Metadata
from meshfusion.dpu.api.security.peers import is_on_this_machine
from meshfusion.dpu.api.security.principal import MAX_INCARNATION_CHARS, Principal
from meshfusion.dpu.api.security.roles import RULES, Role, Rule
from meshfusion.dpu.api.types import Access
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import MeshFusionError, PermissionDeniedError, UnauthenticatedError, UnsupportedError

log = logging.getLogger("meshfusion.security")

R = TypeVar("R")

UNAUTHENTICATED: Final = "calls_unauthenticated"
DENIED: Final = "calls_denied"
FOREIGN_HOLDER: Final = "calls_for_foreign_holders"
_WARN_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, from where (as gRPC names it), and the rule of the call: ``name`` is "Service.Call"."""

    principal: Principal
    peer: str
    name: str
    rule: Rule


class Audit(Protocol):
    """The audit log. Each of them returns when the record is durable, or raises a MeshFusionError."""

    def begin(self, caller: Caller, request: Message | None) -> str:
        """Before the call; returns what :meth:`end` is told."""
        ...

    def end(self, entry: str, caller: Caller, outcome: str, duration_s: float) -> None: ...

    def refuse(self, caller: Caller, outcome: str) -> None:
        """Of a call that is not made; of many of one caller not each."""
        ...


class _Refusals:
    """Counted and, now and then, logged. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((UNAUTHENTICATED, DENIED, FOREIGN_HOLDER), 0)
        self._warned_s = -_WARN_EVERY_S

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def warn(self, text: str) -> None:
        """Not of each: who is refused may try as often as it likes, and the counts tell how often."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._warned_s < _WARN_EVERY_S:
                return
            self._warned_s = now_s
        log.warning("%s (such refusals are told once in %g s)", text.encode("unicode_escape").decode(), _WARN_EVERY_S)


class Guard:
    """Safe for use by several threads. ``audit`` None: nothing is recorded, for a service inside its one user.
    ``refusals``: of the service, where it has several guards."""

    def __init__(
        self,
        identity: CallerIdentity | None = None,
        audit: Audit | None = None,
        *,
        refusals: _Refusals | None = None,
    ) -> None:
        self._identity = identity or CallerIdentity()
        self._audit = audit
        self._refusals = refusals or _Refusals()

    @property
    def asks_who_calls(self) -> bool:
        return self._identity.asks

    def of_the_socket(self) -> Guard:
        """For a unix socket beside addresses where callers are asked: its mode says who calls, which is the service's
        own user. It records and counts where this one does."""
        return Guard(CallerIdentity(), self._audit, refusals=self._refusals)

    def is_unknown(self, metadata: Metadata) -> bool:
        """Must a caller with this metadata be refused, whoever it is? Told before anything else of the call is known;
        :meth:`admit` says and counts why."""
        return self._identity.lacks_token(metadata)

    def counts(self) -> dict[str, int]:
        """Refused calls since the start, by the cause."""
        return self._refusals.counts()

    def admit(self, name: str, context: grpc.ServicerContext) -> Caller:
        """Before anything is read of the call ``name``. Raises UnauthenticatedError and PermissionDeniedError.

        Of a caller without a name nothing goes into the audit log: anybody could fill it.
        """
        rule = RULES[name]
        try:
            principal = self._identity.identify(context)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            self._refusals.count(UNAUTHENTICATED if isinstance(error, UnauthenticatedError) else DENIED)
            self._refusals.warn(f"{name} of {context.peer()} refused: {error.message}")
            raise
        caller = Caller(principal, context.peer(), name, rule)
        if principal.roles.isdisjoint(rule.roles):
            self._refusals.count(DENIED)
            refusal = _wrong_role(caller)
            self._refusals.warn(f"{name} of {caller.peer} refused: {refusal.message}")
            if rule.is_audited and self._audit is not None:
                with suppress(MeshFusionError):  # it is refused in any case, and the log has said why that is not there
                    self._audit.refuse(caller, type(refusal).__name__)
            raise refusal
        return caller

    def run(self, caller: Caller, request: Message, call: Callable[[], R]) -> R:
        """Make the call, in the caller's own name only; the request of an attachment gets the caller's holder id."""
        self._keep_to_own(caller, request)
        if self._audit is None or not caller.rule.is_audited:
            return call()
        entry = self._audit.begin(caller, request)
        began_s = time.monotonic()
        outcome = "InternalError"
        try:
            result = call()
            outcome = "ok"
        except MeshFusionError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._audit.end(entry, caller, outcome, time.monotonic() - began_s)
        return result

    def _keep_to_own(self, caller: Caller, request: Message) -> None:
        principal = caller.principal
        if isinstance(request, pb.AttachRequest):
            self._check_tenant(principal, request.tenant)
            _check_reach(caller, request)
            if not principal.owns_all_holders and len(request.incarnation) > MAX_INCARNATION_CHARS:
                raise malformed("incarnation", f"is longer than {MAX_INCARNATION_CHARS} characters")
            if request.incarnation:
                request.incarnation = principal.holder_id(request.incarnation)
        elif "holder_id" in request.DESCRIPTOR.fields_by_name:
            self._check_holder(principal, request.holder_id)  # type: ignore[attr-defined]

    def _check_tenant(self, principal: Principal, tenant: str) -> None:
        if principal.tenant is not None and tenant != principal.tenant:
            self._refusals.count(DENIED)
            raise PermissionDeniedError(
                f"{principal} is of the tenant {principal.tenant!r} and cannot attach for {tenant[:100]!r}",
                next_step="Attach for its own tenant, or change its tenant in the service's configuration.",
            )

    def _check_holder(self, principal: Principal, holder_id: str) -> None:
        if not principal.owns(holder_id):
            self._refusals.count(FOREIGN_HOLDER)
            self._refusals.warn(f"{principal} called in the name of {holder_id[:100]!r}, which it did not attach")
            raise PermissionDeniedError(
                f"{principal} did not attach the holder {holder_id[:100]!r}",
                next_step="Attach again with this certificate or token, and use the holder id in the answer.",
            )


def _check_reach(caller: Caller, request: pb.AttachRequest) -> None:
    """Rule 3: that a process is gone is proven by its lock on a file here, which says nothing of one elsewhere that
    sees the same files over a network."""
    if request.access in ("", Access.LOCAL.value) and not is_on_this_machine(caller.peer):
        raise UnsupportedError(
            f"{caller.peer} is not on the service's machine, and so cannot open the pool's files",
            next_step="Give the service exports and the engine path: rdma; or run the engine on the service's machine.",
        )


def _wrong_role(caller: Caller) -> PermissionDeniedError:
    needed = " or ".join(role.value for role in Role if role in caller.rule.roles)
    held = ", ".join(role.value for role in Role if role in caller.principal.roles)
    return PermissionDeniedError(
        f"{caller.name} is for the role {needed}; {caller.principal} has {held}",
        next_step="Use a certificate or token with that role, or give it this one (docs/security.md).",
    )
