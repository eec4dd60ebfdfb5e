"""From a call to its principal: by the caller's certificate, by a token, or by being on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, cast

import grpc

from meshfusion.dpu.api.security.principal import LOCAL, Principal
from meshfusion.jbof.errors import PermissionDeniedError, UnauthenticatedError

Metadata = Iterable[tuple[str, str | bytes]]

_NAMES: Final = ("x509_common_name", "x509_subject_alternative_name")
_SCHEME: Final = "bearer "
_ADD_SUBJECT: Final = "Name one of its names under access in the service's configuration, or use another certificate."


class CallerIdentity:
    """``subjects``: of certificates, by a common name or an alternative name. ``find_token``: whose token this is; None
    where there are no tokens. With neither, everybody who can connect is :data:`LOCAL`, so such a service may listen on
    this machine only."""

    def __init__(
        self,
        subjects: Mapping[str, Principal] | None = None,
        find_token: Callable[[str], Principal | None] | None = None,
    ) -> None:
        self._subjects = dict(subjects or {})
        self._find_token = find_token

    @property
    def asks(self) -> bool:
        """Must callers say who they are?"""
        return bool(self._subjects) or self._find_token is not None

    def lacks_token(self, metadata: Metadata) -> bool:
        """Is everybody known by a token, and none of them here?"""
        if self._find_token is None or self._subjects:
            return False
        try:
            token = _token(metadata)
        except UnauthenticatedError:
            return True
        return token is None or self._find_token(token) is None

    def identify(self, context: grpc.ServicerContext) -> Principal:
        """A token, where one is shown, says who calls, else the certificate.

        Raises :class:`~meshfusion.jbof.errors.UnauthenticatedError`; and
        :class:`~meshfusion.jbof.errors.PermissionDeniedError` of a certificate of the right CA that nobody is known by.
        """
        if not self.asks:
            return LOCAL
        token = _token(context.invocation_metadata() or ())
        if token is not None:
            found = None if self._find_token is None else self._find_token(token)
            if found is None:
                raise UnauthenticatedError(
                    "the token is not one of this service's",
                    next_step="Use a token whose entry stands in the service's tokens_file (`mfctl token create`).",
                )
            return found
        names = _names(context)
        if not names:
            raise UnauthenticatedError(
                "the call shows neither a certificate nor a token",
                next_step="Give the client what the service asks for (docs/security.md): a certificate or a token.",
            )
        return self._of_certificate(names)

    def _of_certificate(self, names: Iterable[str]) -> Principal:
        found = {self._subjects[name] for name in names if name in self._subjects}
        if len(found) == 1:
            return found.pop()
        shown = ", ".join(sorted({name[:100] for name in names})[:10])
        if not found:
            raise PermissionDeniedError(f"nobody is known by the certificate of {shown}", next_step=_ADD_SUBJECT)
        raise PermissionDeniedError(
            f"the certificate of {shown} stands for several callers",
            next_step="Keep one of its names under access in the service's configuration.",
        )


def _names(context: grpc.ServicerContext) -> frozenset[str]:
    shown = cast("Mapping[str, Sequence[bytes]]", context.auth_context())
    return frozenset(value.decode("utf-8", "replace") for key in _NAMES for value in shown.get(key, ()) if value)


def _token(metadata: Metadata) -> str | None:
    found = [value for key, value in metadata if key == "authorization"]
    if not found:
        return None
    text = found[0] if isinstance(found[0], str) else ""
    if len(found) > 1 or not text.lower().startswith(_SCHEME):
        raise UnauthenticatedError("the call's authorization is no bearer token", next_step="Send one bearer token.")
    return text[len(_SCHEME) :].strip()
