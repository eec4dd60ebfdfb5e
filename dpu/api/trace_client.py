"""A :class:`~meshfusion.dpu.api.trace_types.TraceSource` that lives in another process, reached over gRPC."""

from __future__ import annotations

from meshfusion.dpu.api.caller import GrpcCaller
from meshfusion.dpu.api.codec_traces import trace_from_pb
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.trace_types import Trace
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


class GrpcTraceSource:
    """What the service at ``address`` (``unix:///path`` or ``host:port``) remembers. Raises what calls raise."""

    def __init__(self, address: str, security: ClientSecurity | None = None, *, deadline_s: float = 5.0) -> None:
        self._caller = GrpcCaller(address, "Observe", security)
        self._deadline_s = deadline_s

    def trace(self, request_id: str) -> Trace:
        """See :class:`~meshfusion.dpu.api.trace_types.TraceSource`."""
        return self._caller.call(
            "Trace", request_id, lambda wanted: pb.TraceRequest(request_id=wanted), trace_from_pb, self._deadline_s
        )

    def close(self) -> None:
        self._caller.close()
