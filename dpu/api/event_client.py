"""An :class:`~meshfusion.dpu.api.event_types.EventSource` that lives in another process, reached over gRPC."""

from __future__ import annotations

from collections.abc import Iterator

from meshfusion.dpu.api.caller import GrpcCaller
from meshfusion.dpu.api.codec_events import event_from_pb
from meshfusion.dpu.api.event_types import Event
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


class GrpcEventSource:
    """The events of the service at ``address`` (``unix:///path`` or ``host:port``)."""

    def __init__(self, address: str, security: ClientSecurity | None = None) -> None:
        self._caller = GrpcCaller(address, "Observe", security)

    def events(self, after_sequence: int, *, follow: bool) -> Iterator[Event]:
        """See :class:`~meshfusion.dpu.api.event_types.EventSource`; from another thread, :meth:`close` ends it."""
        request = pb.EventsRequest(after_sequence=after_sequence, follow=follow)
        return self._caller.stream("Events", request, lambda message: message, event_from_pb)

    def close(self) -> None:
        self._caller.close()
