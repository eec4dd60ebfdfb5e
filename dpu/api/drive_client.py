"""A :class:`~meshfusion.dpu.api.drive_types.DriveAdmin` that lives in another process, reached over gRPC."""

from __future__ import annotations

from meshfusion.dpu.api import codec_drives
from meshfusion.dpu.api import drive_types as t
from meshfusion.dpu.api.caller import GrpcCaller
from meshfusion.dpu.api.security.client_security import ClientSecurity
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


class GrpcDriveAdmin:
    """The administration of the service at ``address`` (``unix:///path`` or ``host:port``), of its ``pool`` where it
    has several."""

    def __init__(self, address: str, security: ClientSecurity | None = None, *, pool: str = "") -> None:
        self._pool = pool
        self._caller = GrpcCaller(address, "DriveAdmin", security)

    def drives(self, *, deadline_s: float) -> tuple[t.DriveStatus, ...]:
        decode = codec_drives.drives_reply_from_pb
        return self._caller.call("Drives", None, lambda _: pb.DrivesRequest(pool=self._pool), decode, deadline_s)

    def add_drive(self, request: t.AddDriveRequest, *, deadline_s: float) -> t.DriveStatus:
        def encode(r: t.AddDriveRequest) -> pb.AddDriveRequest:
            message = codec_drives.add_drive_request_to_pb(r)
            message.pool = self._pool
            return message

        return self._caller.call("AddDrive", request, encode, codec_drives.drive_status_from_pb, deadline_s)

    def drain_drive(self, request: t.DrainDriveRequest, *, deadline_s: float) -> t.DriveStatus:
        def encode(r: t.DrainDriveRequest) -> pb.DrainDriveRequest:
            message = codec_drives.drain_drive_request_to_pb(r)
            message.pool = self._pool
            return message

        return self._caller.call("DrainDrive", request, encode, codec_drives.drive_status_from_pb, deadline_s)

    def remove_drive(self, request: t.RemoveDriveRequest, *, deadline_s: float) -> int:
        def encode(r: t.RemoveDriveRequest) -> pb.RemoveDriveRequest:
            return pb.RemoveDriveRequest(number=r.number, pool=self._pool)

        return self._caller.call("RemoveDrive", request, encode, lambda m: int(m.chunk_count), deadline_s)

    def close(self) -> None:
        self._caller.close()
