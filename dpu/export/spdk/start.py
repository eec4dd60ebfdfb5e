"""From a fresh SPDK process, or one that runs, to one that can export: probing, start-up, transports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshfusion.dpu.export.errors import ExportError
from meshfusion.dpu.export.spdk.calls import REQUIRED_METHODS
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.dpu.export.spdk.sizing import Sizing
from meshfusion.jbof.errors import UnsupportedError

TESTED_MAJOR = 26
"""The release year whose behaviour the tests ran against (rule 6)."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the kinds of RPC may take, in seconds. A removal waits for requests in flight: SPDK itself gives up on
    removing a host after 15 s (lib/nvmf/nvmf_internal.h, NVMF_CTRLR_RESET_SHN_TIMEOUT_IN_MS), and it should say so
    before we stop listening.
    """

    read_s: float = 10.0
    change_s: float = 20.0
    start_s: float = 60.0


def bring_up(rpc: SpdkRpc, sizing: Sizing, transports: Iterable[str], timeouts: Timeouts) -> None:
    """Idempotent. Raises :class:`~meshfusion.jbof.errors.UnsupportedError` for a version, a method or a size that does
    not fit, and :class:`~meshfusion.dpu.export.errors.ExportError`.
    """
    _probe(rpc, timeouts)
    callable_now = rpc.call("rpc_get_methods", timeouts.read_s, current=True)
    if "framework_start_init" in callable_now:  # only before it was called (SPDK's option --wait-for-rpc)
        rpc.call("iobuf_set_options", timeouts.change_s, **sizing.iobuf_options())
        rpc.call("framework_start_init", timeouts.start_s)
    rpc.call("framework_wait_init", timeouts.start_s)
    there = {report["trtype"]: report for report in rpc.call("nvmf_get_transports", timeouts.read_s)}
    for transport in sorted({transport.upper() for transport in transports}):
        if transport not in there:
            rpc.call("nvmf_create_transport", timeouts.change_s, **sizing.transport_options(transport))
        else:
            _check_transport(there[transport], sizing)


def _probe(rpc: SpdkRpc, timeouts: Timeouts) -> None:
    version = rpc.call("spdk_get_version", timeouts.read_s)
    if version.get("fields", {}).get("major") != TESTED_MAJOR:
        raise UnsupportedError(
            f"this is {version['version']}; tested is SPDK {TESTED_MAJOR}",
            next_step=f"Run nvmf_tgt of SPDK {TESTED_MAJOR}.",
        )
    missing = sorted(REQUIRED_METHODS - set(rpc.call("rpc_get_methods", timeouts.read_s)))
    if missing:
        raise UnsupportedError(
            f"{version['version']} lacks the methods {', '.join(missing)}",
            next_step="Allow them (its option --rpcs-allowed), or build SPDK with the modules that have them.",
        )


def _check_transport(report: Any, sizing: Sizing) -> None:
    """A transport cannot be changed or removed. A larger one serves as well."""
    if report["max_io_size"] < sizing.max_io_bytes:
        raise ExportError(
            f"the {report['trtype']} transport takes I/O of {report['max_io_size']} bytes, not {sizing.max_io_bytes}",
            next_step="Start nvmf_tgt anew with --wait-for-rpc, and leave its transports to MeshFusion.",
        )
