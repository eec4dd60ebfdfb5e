"""Between typed errors and gRPC statuses, so that a client raises what the service raised.

The status code is for any gRPC tool; our own client reads the class name, the message and the next step
from the trailing metadata entry :data:`DETAIL_METADATA_KEY`.
"""

from __future__ import annotations

import errno

import grpc
from google.protobuf.message import DecodeError

from meshfusion.dpu.api.limits import MalformedMessageError
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import (
    ConfigError,
    FormatError,
    MediaError,
    MeshFusionError,
    PermissionDeniedError,
    PoolBusyError,
    ServiceDrainingError,
    ServiceError,
    ServiceUnavailableError,
    StaleHolderError,
    UnauthenticatedError,
    UnsupportedError,
)

DETAIL_METADATA_KEY = "meshfusion-error-bin"
# gRPC drops a reply whose trailing metadata exceeds 8 KiB; a character may take four bytes, base64 adds a third.
_MAX_MESSAGE_CHARS = 1_000
_MAX_NEXT_STEP_CHARS = 300
_MAX_DETAILS_CHARS = 500

# Most derived classes first: the first match decides.
_CODES: tuple[tuple[type[MeshFusionError], grpc.StatusCode], ...] = (
    (MalformedMessageError, grpc.StatusCode.INVALID_ARGUMENT),
    (StaleHolderError, grpc.StatusCode.FAILED_PRECONDITION),
    (ServiceDrainingError, grpc.StatusCode.UNAVAILABLE),
    (ServiceUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (ServiceError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (PoolBusyError, grpc.StatusCode.FAILED_PRECONDITION),
    (FormatError, grpc.StatusCode.DATA_LOSS),
    (MediaError, grpc.StatusCode.INTERNAL),
)
_KINDS: dict[str, type[MeshFusionError]] = {kind.__name__: kind for kind, _ in _CODES}
_REACH = "Start it with `mfctl service run --config FILE`, or correct the address."
# A service over TLS closes such a connection, and gRPC tells no more than that.
_REACH_PLAIN = (
    "Start it with `mfctl service run --config FILE`, or correct the address; if it serves over TLS, name its CA, and "
    "the certificate or token that it asks for (docs/security.md): --service-ca of mfctl, service_tls of the connector."
)
# gRPC tells a refused handshake from a closed connection in its details at best.
_REACH_TLS = (
    "Start it, or correct the address; if it runs, its certificate must be of this client's CA and name the host (or "
    "the server name given), and this client's certificate must be of the service's tls.client_ca."
)
_OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT}


def status_code(error: MeshFusionError) -> grpc.StatusCode:
    """The code that describes ``error`` best to a tool that knows only gRPC."""
    if isinstance(error, MediaError) and getattr(error.__cause__, "errno", None) in _OUT_OF_SPACE:
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def encode_error(error: MeshFusionError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """``(code, details, trailing metadata)`` for :meth:`grpc.ServicerContext.abort`."""
    message = error.message[:_MAX_MESSAGE_CHARS]
    kind = next((kind.__name__ for kind, _ in _CODES if isinstance(error, kind)), ServiceError.__name__)
    detail = pb.ErrorDetail(kind=kind, message=message, next_step=error.next_step[:_MAX_NEXT_STEP_CHARS])
    # The status text is percent-encoded on the wire, which triples anything but ASCII.
    details = message.encode("ascii", "replace").decode()[:_MAX_DETAILS_CHARS]
    return (status_code(error), details, ((DETAIL_METADATA_KEY, detail.SerializeToString()),))


def decode_error(
    error: grpc.RpcError, *, address: str, call: str, deadline_s: float, is_tls: bool = False
) -> MeshFusionError:
    """What the failed call means to the caller. Statuses of gRPC's own making become ServiceErrors."""
    assert isinstance(error, grpc.Call), "every RpcError of a call in progress is also a Call"
    code = error.code()
    details = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_METADATA_KEY:
            return _from_detail(value) or _foreign(address, call, code, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServiceUnavailableError(
            f"the chunk service at {address} did not answer {call} within {deadline_s:.3g} s",
            next_step="Look at the service's log and load; the engine goes on without the pool meanwhile.",
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ServiceUnavailableError(
            f"the chunk service at {address} cannot be reached ({details or code.name.lower()})",
            next_step=_REACH if address.startswith("unix:") else _REACH_TLS if is_tls else _REACH_PLAIN,
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _exhausted(address, call, details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnsupportedError(
            f"the server at {address} does not know the call {call}",
            next_step="Run a service and a client of the same MeshFusion version.",
        )
    return _foreign(address, call, code, details)


def _from_detail(value: str | bytes) -> MeshFusionError | None:
    try:
        detail = pb.ErrorDetail.FromString(value if isinstance(value, bytes) else value.encode())
    except DecodeError:
        return None
    # An error class of a newer service is still a refusal by the service.
    return _KINDS.get(detail.kind, ServiceError)(detail.message, next_step=detail.next_step)


def _exhausted(address: str, call: str, details: str) -> ServiceError:
    if "larger than max" in details:
        return ServiceError(
            f"a message of {call} is too large for the chunk service at {address} ({details})",
            next_step="Ask for fewer keys or items in one call.",
        )
    return ServiceUnavailableError(
        f"the chunk service at {address} is overloaded and refused {call} ({details})",
        next_step="Share the service among fewer engines; the engine goes on without the pool meanwhile.",
    )


def _foreign(address: str, call: str, code: grpc.StatusCode, details: str) -> ServiceError:
    return ServiceError(
        f"{call} failed at the chunk service at {address}: {code.name} {details}",
        next_step="Look at the service's log; check that both sides run the same MeshFusion version.",
    )
