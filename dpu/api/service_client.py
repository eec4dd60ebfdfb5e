"""A :class:`~meshfusion.dpu.api.service_types.ServiceAdmin` that lives in another process, reached over gRPC."""

from __future__ import annotations

from meshfusion.dpu.api import codec_service as codec
from meshfusion.dpu.api import service_types as t
from meshfusion.dpu.api.caller import GrpcCaller
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


class GrpcServiceAdmin:
    """The administration of the service at ``address`` (``unix:///path`` or ``host:port``)."""

    def __init__(self, address: str, security: ClientSecurity | None = None) -> None:
        self._caller = GrpcCaller(address, "ServiceAdmin", security)

    def state(self, *, deadline_s: float) -> t.ServiceState:
        return self._caller.call(
            "State", None, lambda _: pb.ServiceStateRequest(), codec.service_state_from_pb, deadline_s
        )

    def drain(self, request: t.DrainRequest, *, deadline_s: float) -> t.ServiceState:
        return self._caller.call("Drain", request, codec.drain_request_to_pb, codec.service_state_from_pb, deadline_s)

    def reload(self, *, deadline_s: float) -> t.ReloadReport:
        return self._caller.call("Reload", None, lambda _: pb.ReloadRequest(), codec.reload_report_from_pb, deadline_s)

    def replace_keys(self, request: t.ReplaceKeysRequest, *, deadline_s: float) -> tuple[t.ReplacedKey, ...]:
        encode, decode = codec.replace_keys_request_to_pb, codec.replaced_keys_from_pb
        return self._caller.call("ReplaceKeys", request, encode, decode, deadline_s)

    def stacks(self, *, deadline_s: float) -> str:
        return self._caller.call("Stacks", None, lambda _: pb.StacksRequest(), lambda m: str(m.text), deadline_s)

    def close(self) -> None:
        self._caller.close()
