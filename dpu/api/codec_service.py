"""Between the value types of the service's administration and their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from meshfusion.dpu.api import service_types as t
from meshfusion.dpu.api.limits import (
    MAX_TEXT_CHARS,
    MAX_UINT32,
    check_count,
    check_id,
    check_int,
    check_seconds,
    check_text,
    malformed,
)
from meshfusion.dpu.api.v1 import chunk_pb2 as pb


def calls_of(admin: t.ServiceAdmin) -> dict[str, Callable[[Any, float], Message]]:
    """Each call of the service in the proto file: decode, ask ``admin``, encode."""
    return {
        "State": lambda m, d: service_state_to_pb(admin.state(deadline_s=d)),
        "Reload": lambda m, d: reload_report_to_pb(admin.reload(deadline_s=d)),
        "ReplaceKeys": lambda m, d: replaced_keys_to_pb(
            admin.replace_keys(replace_keys_request_from_pb(m), deadline_s=d)
        ),
        "Stacks": lambda m, d: pb.StacksReply(text=admin.stacks(deadline_s=d)),
        "Drain": lambda m, d: service_state_to_pb(admin.drain(drain_request_from_pb(m), deadline_s=d)),
    }


def service_state_to_pb(s: t.ServiceState) -> pb.ServiceState:
    return pb.ServiceState(
        version=s.version,
        pid=s.pid,
        uptime_s=s.uptime_s,
        phase=s.phase.value,
        remaining_s=s.remaining_s,
        open_write_count=s.open_write_count,
        open_lease_count=s.open_lease_count,
    )


def service_state_from_pb(m: pb.ServiceState) -> t.ServiceState:
    return t.ServiceState(
        version=check_id("version", m.version),
        pid=check_int("pid", m.pid, 0, MAX_UINT32),
        uptime_s=check_seconds("uptime_s", m.uptime_s),
        phase=_phase_from_pb(m.phase),
        remaining_s=check_seconds("remaining_s", m.remaining_s),
        open_write_count=check_int("open_write_count", m.open_write_count),
        open_lease_count=check_int("open_lease_count", m.open_lease_count),
    )


def _phase_from_pb(value: str) -> t.Phase:
    try:
        return t.Phase(value)
    except ValueError:
        raise malformed("phase", f"is {check_id('phase', value)!r}, which this version does not know") from None


def drain_request_to_pb(r: t.DrainRequest) -> pb.DrainRequest:
    return pb.DrainRequest(deadline_s=r.within_s, wait_s=r.wait_s)


def drain_request_from_pb(m: pb.DrainRequest) -> t.DrainRequest:
    return t.DrainRequest(within_s=check_seconds("deadline_s", m.deadline_s), wait_s=check_seconds("wait_s", m.wait_s))


# More than a configuration has keys.
_MAX_CHANGES = 1_000


def reload_report_to_pb(r: t.ReloadReport) -> pb.ReloadReply:
    return pb.ReloadReply(
        applied=map(_config_change_to_pb, r.applied), needs_restart=map(_config_change_to_pb, r.needs_restart)
    )


def _config_change_to_pb(c: t.ConfigChange) -> pb.ConfigChange:
    return pb.ConfigChange(key=c.key, before=c.before[:MAX_TEXT_CHARS], after=c.after[:MAX_TEXT_CHARS])


def reload_report_from_pb(m: pb.ReloadReply) -> t.ReloadReport:
    return t.ReloadReport(
        applied=_config_changes_from_pb("applied", m.applied),
        needs_restart=_config_changes_from_pb("needs_restart", m.needs_restart),
    )


def _config_changes_from_pb(field: str, found: Sequence[pb.ConfigChange]) -> tuple[t.ConfigChange, ...]:
    check_count(field, found, _MAX_CHANGES)
    return tuple(
        t.ConfigChange(
            key=check_id(f"{field}.key", c.key),
            before=check_text(f"{field}.before", c.before),
            after=check_text(f"{field}.after", c.after),
        )
        for c in found
    )


# More hosts than any service has.
_MAX_HOSTS = 100_000


def replace_keys_request_to_pb(r: t.ReplaceKeysRequest) -> pb.ReplaceKeysRequest:
    return pb.ReplaceKeysRequest(pool=r.pool, holder_id=r.holder_id, wait_s=r.wait_s)


def replace_keys_request_from_pb(m: pb.ReplaceKeysRequest) -> t.ReplaceKeysRequest:
    return t.ReplaceKeysRequest(
        pool=check_id("pool", m.pool, allow_empty=True),
        holder_id=check_id("holder_id", m.holder_id, allow_empty=True),
        wait_s=check_seconds("wait_s", m.wait_s),
    )


def replaced_keys_to_pb(keys: Sequence[t.ReplacedKey]) -> pb.ReplaceKeysReply:
    return pb.ReplaceKeysReply(keys=[pb.ReplacedKey(holder_id=k.holder_id, change=k.change.value) for k in keys])


def replaced_keys_from_pb(m: pb.ReplaceKeysReply) -> tuple[t.ReplacedKey, ...]:
    check_count("keys", m.keys, _MAX_HOSTS)
    return tuple(t.ReplacedKey(check_id("keys.holder_id", k.holder_id), _key_change_from_pb(k.change)) for k in m.keys)


def _key_change_from_pb(value: str) -> t.KeyChange:
    try:
        return t.KeyChange(value)
    except ValueError:
        raise malformed("change", f"is {check_id('change', value)!r}, which this version does not know") from None
