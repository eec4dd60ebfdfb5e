"""Serves a :class:`~meshfusion.dpu.api.types.ChunkService` over gRPC: on unix sockets, loopback ports or TLS."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from meshfusion.dpu.api import codec, codec_drives, codec_match, codec_service, codec_status, codec_writes
from meshfusion.dpu.api.address import UnixAddress, parse_address
from meshfusion.dpu.api.doors import Address, doors_of
from meshfusion.dpu.api.drive_types import DriveAdmin, RemoveDriveRequest
from meshfusion.dpu.api.limits import MAX_MESSAGE_BYTES, check_id, check_key, malformed
from meshfusion.dpu.api.named_pools import NamedPools, OnePool
from meshfusion.dpu.api.observe_server import WatchedEvents, observe_handler
from meshfusion.dpu.api.observer import CallObserver, NobodyWatches
from meshfusion.dpu.api.refusing import abort
from meshfusion.dpu.api.running_server import MAX_DEADLINE_S, RunningServer, bind_server, make_server
from meshfusion.dpu.api.security.guard import Guard
from meshfusion.dpu.api.security.server_tls import ServerTls
from meshfusion.dpu.api.service_types import ServiceAdmin
from meshfusion.dpu.api.trace_types import TraceSource
from meshfusion.dpu.api.types import AbortRequest, ChunkService, DetachRequest, ReleaseRequest
from meshfusion.dpu.api.v1 import chunk_pb2 as pb
from meshfusion.jbof.errors import MeshFusionError, ServiceError, ServiceUnavailableError

log = logging.getLogger(__name__)

SERVICE_NAME = "meshfusion.v1.ChunkService"
ADMIN_NAME = "meshfusion.v1.DriveAdmin"
OPERATION_NAME = "meshfusion.v1.ServiceAdmin"
DEFAULT_DEADLINE_S = 10.0  # for callers that name no deadline (other gRPC tools)
# An answer that grants something and has less time left than this counts as not arriving, and is taken back: what a
# caller never learns of, it cannot give back.
ARRIVAL_MARGIN_S = 0.001
CONNECTION_AGE_S = 3600.0
# They wait for no drive and no target, and have threads of their own: all others may be held up by calls that do.
ANSWERED_AT_ONCE: Final = frozenset({"Match", "Release", "Abort", "Heartbeat", "Status"})

# (request, seconds left) -> reply
Call = Callable[[Any, float], Message]
# (request, reply) -> None: takes back what the caller will never learn of
Undo = Callable[[Any, Any], None]
# (call, request, reply) -> None: see CallObserver
Answered = Callable[[str, Message, Message | None], None]


def serve(
    service: ChunkService,
    listen: str | Sequence[str],
    *,
    admin: DriveAdmin | None = None,
    pools: NamedPools | None = None,
    guard: Guard | None = None,
    tls: ServerTls | None = None,
    connection_age_s: float = CONNECTION_AGE_S,
    observer: CallObserver | None = None,
    events: WatchedEvents | None = None,
    operation: ServiceAdmin | None = None,
    traces: TraceSource | None = None,
    thread_count: int = 32,
    lookup_thread_count: int = 8,
    max_concurrent_calls: int = 256,
) -> RunningServer:
    """Start serving ``service``, and ``admin``, ``operation``, ``events`` and ``traces`` to operators, at ``listen``
    (``unix:///path`` or ``host:port``, or several), all or none, and return at once. ``pools``: those of a service of
    several, which then are what operators ask, instead of ``admin``. ``observer`` sees each call.

    Writers' calls wait for the index to be synced, so there are more threads than could compute at once, and others for
    lookups and the like. More than ``max_concurrent_calls`` are refused with RESOURCE_EXHAUSTED. ``service`` must allow
    calls from several threads; it is not closed by the server. ``guard``: without one, everybody who can connect may
    make every call, and nothing is recorded; on a unix socket beside other addresses it asks nobody, see
    :mod:`~meshfusion.dpu.api.doors`. ``connection_age_s``: connections over TLS are made anew after that.
    Raises :class:`~meshfusion.jbof.errors.ConfigError` when an address cannot be listened on.
    """
    executor = ThreadPoolExecutor(thread_count, thread_name_prefix="chunk-service")
    lookups = ThreadPoolExecutor(lookup_thread_count, thread_name_prefix="chunk-lookup")
    observer = observer or NobodyWatches()
    named = OnePool(service, admin) if pools is None else pools

    def handlers(guard: Guard) -> Iterator[grpc.GenericRpcHandler]:
        undos: dict[str, Undo] = {"Match": _undo_match(service), "Reserve": _undo_reserve(service)}
        parts = [("ChunkService", SERVICE_NAME, _calls(service, named, guard), undos)]
        if admin is not None or pools is not None:
            parts.append(("DriveAdmin", ADMIN_NAME, _admin_calls(named), {}))
        if operation is not None:
            parts.append(("ServiceAdmin", OPERATION_NAME, codec_service.calls_of(operation), {}))
        for name, full_name, calls, undone in parts:
            handled = _handlers(name, calls, undone, guard, observer, lookups)
            yield grpc.method_handlers_generic_handler(full_name, handled)
        if events is not None or traces is not None:
            yield observe_handler(events, traces, guard)

    asked = [parse_address(text) for text in ((listen,) if isinstance(listen, str) else listen)]
    bound: dict[Address, Address] = {}
    servers: list[grpc.Server] = []
    try:
        for door in doors_of(asked, guard or Guard()):
            server = make_server(
                executor, door.guard, max_concurrent_calls, connection_age_s=None if tls is None else connection_age_s
            )
            servers.append(server)
            server.add_generic_rpc_handlers(tuple(handlers(door.guard)))
            for address in door.addresses:
                bound[address] = bind_server(server, address, tls, door.guard)
    except BaseException:
        RunningServer(servers, (executor, lookups), asked).stop(0.0)
        for address in bound.values():
            if isinstance(address, UnixAddress):  # which gRPC leaves behind, of a server that never started
                address.path.unlink(missing_ok=True)
        raise
    for server in servers:
        server.start()
    return RunningServer(servers, (executor, lookups), [bound[address] for address in asked])


def _handlers(
    service: str,
    calls: dict[str, Call],
    undos: dict[str, Undo],
    guard: Guard,
    observer: CallObserver,
    lookups: ThreadPoolExecutor,
) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
    """``service``: its name in the proto file. ``lookups``: threads for what is answered at once."""
    methods = pb.DESCRIPTOR.services_by_name[service].methods
    assert {m.name for m in methods} == calls.keys(), "the proto file and the server disagree about the calls"
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
    for m in methods:
        bare = _handler(
            service,
            m.name,
            GetMessageClass(m.input_type),
            calls[m.name],
            undo=undos.get(m.name),
            guard=guard,
            answered=observer.answered,
        )
        handle = observer.watch(m.name, bare)
        if m.name in ANSWERED_AT_ONCE:
            handle.experimental_thread_pool = lookups  # type: ignore[attr-defined]  # gRPC looks for it there
        handlers[m.name] = grpc.unary_unary_rpc_method_handler(handle)
    return handlers


def _admin_calls(pools: NamedPools) -> dict[str, Call]:
    c = codec_drives

    def add(m: pb.AddDriveRequest, d: float) -> Message:
        return c.drive_status_to_pb(pools.admin(m.pool).add_drive(c.add_drive_request_from_pb(m), deadline_s=d))

    def drain(m: pb.DrainDriveRequest, d: float) -> Message:
        return c.drive_status_to_pb(pools.admin(m.pool).drain_drive(c.drain_drive_request_from_pb(m), deadline_s=d))

    def remove(m: pb.RemoveDriveRequest, d: float) -> Message:
        count = pools.admin(m.pool).remove_drive(RemoveDriveRequest(m.number), deadline_s=d)
        return pb.RemoveDriveReply(chunk_count=count)

    return {
        "Drives": lambda m, d: c.drives_reply_to_pb(pools.admin(m.pool).drives(deadline_s=d)),
        "AddDrive": add,
        "DrainDrive": drain,
        "RemoveDrive": remove,
    }


def _calls(service: ChunkService, pools: NamedPools, guard: Guard) -> dict[str, Call]:
    """Each call of the API: decode, ask the service, encode. ``pools``: for what operators ask."""
    r, w, s = codec, codec_writes, service

    def release(m: pb.ReleaseRequest, d: float) -> Message:
        s.release(r.release_request_from_pb(m), deadline_s=d)
        return pb.ReleaseReply()

    def abort(m: pb.AbortRequest, d: float) -> Message:
        s.abort(w.abort_request_from_pb(m), deadline_s=d)
        return pb.AbortReply()

    def detach(m: pb.DetachRequest, d: float) -> Message:
        s.detach(DetachRequest(check_id("holder_id", m.holder_id)), deadline_s=d)
        return pb.DetachReply()

    def status(m: pb.StatusRequest, d: float) -> Message:
        reply = codec_status.pool_status_to_pb(pools.chunks(m.pool).status(deadline_s=d))
        reply.counters.extend(pb.Counter(name=name, value=value) for name, value in guard.counts().items() if value)
        return reply

    def get_chunk(m: pb.GetChunkRequest, d: float) -> Message:
        chunk = pools.chunks(m.pool).get_chunk(check_key("key", m.key), deadline_s=d)
        return pb.GetChunkReply(chunk=None if chunk is None else r.chunk_to_pb(chunk))

    def list_chunks(m: pb.ListRequest, d: float) -> Message:
        return r.list_reply_to_pb(pools.chunks(m.pool).list_chunks(r.list_request_from_pb(m), deadline_s=d))

    return {
        "Attach": lambda m, d: r.attachment_to_pb(s.attach(r.attach_request_from_pb(m), deadline_s=d)),
        "Match": lambda m, d: codec_match.match_reply_to_pb(
            s.match(codec_match.match_request_from_pb(m), deadline_s=d), packed=m.takes_packed
        ),
        "Release": release,
        "Reserve": lambda m, d: w.reserve_reply_to_pb(s.reserve(w.reserve_request_from_pb(m), deadline_s=d)),
        "Commit": lambda m, d: w.commit_reply_to_pb(s.commit(w.commit_request_from_pb(m), deadline_s=d)),
        "Abort": abort,
        "Heartbeat": lambda m, d: r.heartbeat_reply_to_pb(s.heartbeat(r.heartbeat_request_from_pb(m), deadline_s=d)),
        "Drop": lambda m, d: pb.DropReply(dropped=s.drop(r.drop_request_from_pb(m), deadline_s=d)),
        "Detach": detach,
        "Status": status,
        "ListChunks": list_chunks,
        "GetChunk": get_chunk,
    }


def _undo_match(service: ChunkService) -> Undo:
    """The caller gave up: nobody would give this lease back before it lapses."""

    def undo(request: pb.MatchRequest, reply: pb.MatchReply) -> None:
        if reply.lease_id:
            service.release(ReleaseRequest(request.holder_id, (reply.lease_id,)), deadline_s=DEFAULT_DEADLINE_S)

    return undo


def _undo_reserve(service: ChunkService) -> Undo:
    """The caller gave up: it never learns these grants, so no write under them can be outstanding."""

    def undo(request: pb.ReserveRequest, reply: pb.ReserveReply) -> None:
        grant_ids = tuple(result.grant_id for result in reply.results if result.grant_id)
        if grant_ids:
            service.abort(AbortRequest(request.holder_id, request.epoch, grant_ids), deadline_s=DEFAULT_DEADLINE_S)

    return undo


def _will_arrive(context: grpc.ServicerContext) -> bool:
    remaining_s = context.time_remaining()
    return context.is_active() and (remaining_s is None or remaining_s > ARRIVAL_MARGIN_S)


def _too_late(name: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(f"{name} ran into its deadline", next_step="Look at the service's load.")


def _handler(
    service: str,
    name: str,
    request_class: type[Message],
    call: Call,
    *,
    undo: Undo | None,
    guard: Guard,
    answered: Answered,
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def answer(raw: bytes, context: grpc.ServicerContext) -> bytes:
        caller = guard.admit(f"{service}.{name}", context)
        remaining_s = context.time_remaining()
        deadline_s = DEFAULT_DEADLINE_S if remaining_s is None else min(remaining_s, MAX_DEADLINE_S)
        if deadline_s <= 0:
            raise _too_late(name)
        try:
            request = request_class.FromString(raw)
        except DecodeError as e:
            raise malformed(f"the request of {name}", f"cannot be parsed ({e})") from e
        try:
            reply = guard.run(caller, request, lambda: call(request, deadline_s))
        except Exception:
            answered(name, request, None)
            raise
        answered(name, request, reply)
        data = reply.SerializeToString()
        too_large = len(data) > MAX_MESSAGE_BYTES
        if undo is not None and (too_large or not _will_arrive(context)):
            undo(request, reply)
            if not too_large:
                raise _too_late(name)
        if too_large:
            raise ServiceError(
                f"the answer to {name} has {len(data)} bytes, more than {MAX_MESSAGE_BYTES}",
                next_step="Ask for fewer keys or items in one call.",
            )
        return data

    def handle(raw: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return answer(raw, context)
        except MeshFusionError as e:
            log.debug("%s refused: %s", name, e.message)
            abort(context, e)
        except Exception:
            log.exception("%s failed: a defect of the service", name)
            error = ServiceError(f"{name} failed inside the service", next_step="Look at the service's log.")
            abort(context, error, grpc.StatusCode.INTERNAL)

    return handle
