"""Refusals of calls: how they are told, and those that come before a message is read.

gRPC reads a request whole before it asks anybody: that is :data:`~meshfusion.dpu.api.limits.MAX_MESSAGE_BYTES` of
memory for each call, which is not for callers that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import grpc

from meshfusion.dpu.api.error_codec import encode_error
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.jbof.errors import MeshFusionError, ServiceUnavailableError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def abort(context: grpc.ServicerContext, error: MeshFusionError, code: grpc.StatusCode | None = None) -> NoReturn:
    """``code``: where it is not the error's own."""
    own, details, metadata = encode_error(error)
    context.set_trailing_metadata(metadata)
    context.abort(own if code is None else code, details)


class RefusesUnread(grpc.ServerInterceptor):
    """Of callers that must show a token and show none of this service, no message is read."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Handler | None], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = continuation(details)
        if handler is None or not self._guard.is_unknown(details.invocation_metadata or ()):
            return handler
        name = details.method.rpartition(".")[2].replace("/", ".")

        def refuse(unread: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
            try:
                self._guard.admit(name, context)
            except MeshFusionError as error:
                abort(context, error)
            # The tokens have changed just now.
            abort(context, ServiceUnavailableError("the call was refused before", next_step="Call again."))

        return grpc.stream_unary_rpc_method_handler(refuse)
