"""An SPDK process as target of exports."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from meshfusion.dpu.export.actual import Actual, ActualSubsystem
from meshfusion.dpu.export.desired import Address, Export, Host, Namespace
from meshfusion.dpu.export.errors import ExportError, StepRefusedError
from meshfusion.dpu.export.fence import Confirmed, Fence, NotYet, verdict, withdrawal
from meshfusion.dpu.export.reconcile import Report, reconcile
from meshfusion.dpu.export.spdk.actual import is_nvm_subsystem, parse_subsystem, psks_of
from meshfusion.dpu.export.spdk.calls import call_of, key_name, keys_of, plain_listeners
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from meshfusion.dpu.export.spdk.sizing import Sizing
from meshfusion.dpu.export.spdk.start import Timeouts, bring_up
from meshfusion.dpu.export.steps import AddHost, AddListener, AddNamespace, RemoveHost, SetHostKey, Step
from meshfusion.jbof.errors import UnsupportedError

_LOG = logging.getLogger(__name__)

KEY_EXISTS = -17
"""keyring_file_add_key answers with the negative errno: EEXIST."""


@dataclass(frozen=True, slots=True)
class SpdkSettings:
    """``attach``: called on every new connection, before exports are applied, with the connected client. ``make``:
    then, for every namespace, and before one is added: it makes the bdev that the namespace is backed by, idempotently.
    ``drop``: called with the name of a bdev whose drive is shown to nobody any more.
    """

    sizing: Sizing
    transports: frozenset[str]
    attach: Callable[[SpdkRpc], None] = lambda _: None
    timeouts: Timeouts = field(default_factory=Timeouts)
    make: Callable[[SpdkRpc, Namespace], None] = lambda _, __: None
    drop: Callable[[SpdkRpc, str], None] = lambda _, __: None


class SpdkTarget:
    """Holds what is desired; after a restart of SPDK the next call applies all of it anew. One thread at a time."""

    removal_disconnects = True

    def __init__(self, rpc: SpdkRpc, settings: SpdkSettings, desired: Export) -> None:
        self._rpc = rpc
        self._settings = settings
        self._desired = desired
        self._connection = 0  # the one that was brought up

    def desire(self, desired: Export) -> Report:
        """From now on this. Hosts fenced before stay fenced: an incarnation is never readmitted (rule 3)."""
        self._desired = desired.fencing(self._desired.fenced)
        return self.reconcile()

    def reconcile(self) -> Report:
        """Make the target as desired, as far as it goes now. Never raises for faults of the target."""
        try:
            return reconcile(self, self._desired)
        except UnsupportedError as error:
            return Report(0, unreachable=ExportError(error.message, next_step=error.next_step))

    def fence(self, host_nqn: str) -> Fence:
        """Take the host's access away for good, and say whether that is confirmed; ask again until it is.

        Confirmed means that, on one connection and thus in one process, the host was listed nowhere and then had no
        queue pairs anywhere; a connection that is lost meanwhile is in the report.

        Why that is enough: nvmf_subsystem_get_qpairs pauses the subsystem, which waits for Connect commands in flight
        and keeps further ones until it resumes, when they are checked against the list of hosts anew (lib/nvmf/ctrlr.c,
        nvmf_ctrlr_cmd_connect). A queue pair is listed until its last request is done (lib/nvmf/nvmf.c,
        spdk_nvmf_qpair_disconnect). So neither a late Connect nor a late write can follow an empty list.
        """
        self._desired = self._desired.fencing(frozenset({host_nqn}))
        report = self.reconcile()
        if report.unreachable is not None:
            return NotYet(report.unreachable.message)
        try:
            actual = self.read(self._desired)
        except (ExportError, UnsupportedError) as error:
            return NotYet(error.message)
        return verdict(actual, host_nqn)

    def withdraw(self, nsid: int, backing: str) -> Fence:
        """Is the drive behind this namespace, which is not desired any more, shown to nobody, and at rest? Ask again
        until it is confirmed, after :meth:`desire`. Its bdev goes with it, where it was made by us."""
        try:
            found = withdrawal(self.read(self._desired), nsid, backing, self._desired.manages)
            if found == Confirmed() and backing:
                self._settings.drop(self._rpc, backing)
        except (ExportError, UnsupportedError) as error:
            return NotYet(error.message)
        return found

    def read(self, desired: Export) -> Actual:
        self._bring_up()
        read_s = self._settings.timeouts.read_s
        reports = [report for report in self._rpc.call("nvmf_get_subsystems", read_s) if is_nvm_subsystem(report)]
        psks: dict[tuple[str, str], str] = {}
        if any(subsystem.is_secure for subsystem in desired.subsystems):
            psks = psks_of(self._rpc.call("framework_get_config", read_s, name="nvmf"))
        return tuple(
            self._read_managed(report, psks) if desired.manages(report["nqn"]) else self._read_foreign(report)
            for report in reports
        )

    def _read_managed(self, report: Any, psks: dict[tuple[str, str], str]) -> ActualSubsystem:
        read_s, nqn = self._settings.timeouts.read_s, report["nqn"]
        listeners = self._rpc.call("nvmf_subsystem_get_listeners", read_s, nqn=nqn)
        return parse_subsystem(report, listeners, self._rpc.call("nvmf_subsystem_get_qpairs", read_s, nqn=nqn), psks)

    def _read_foreign(self, report: Any) -> ActualSubsystem:
        """Another pool's, or none of ours. It may be changed or removed meanwhile, and SPDK then refuses to list its
        queue pairs: that is no reason to keep this pool's hosts waiting, but one to confirm no fence. Its listeners
        need not have the form that a Listener has."""
        try:
            pairs = self._rpc.call("nvmf_subsystem_get_qpairs", self._settings.timeouts.read_s, nqn=report["nqn"])
        except StepRefusedError as error:
            return replace(parse_subsystem(report, (), ()), unread=error.message)
        return parse_subsystem(report, (), pairs)

    def apply(self, step: Step) -> None:
        if isinstance(step, AddHost | SetHostKey):
            self._add_keys(step.host)
        if isinstance(step, AddNamespace):
            self._settings.make(self._rpc, step.namespace)
        if isinstance(step, AddListener) and step.is_secure:
            self._check_secure(step.listener.address)
        method, parameters = call_of(step)
        self._rpc.call(method, self._settings.timeouts.change_s, **parameters)
        if isinstance(step, RemoveHost):
            self._drop_keys(step.host_nqn, step.key_ids)
        if isinstance(step, SetHostKey):
            self._drop_keys(step.host.nqn, (step.former_id,))
        _LOG.info("applied %s", step)

    def _bring_up(self) -> None:
        """On every new connection: behind it there may be a new process."""
        connection = self._rpc.connect(self._settings.timeouts.read_s)
        if connection != self._connection:
            self._start()
            self._settings.attach(self._rpc)
            for namespace in sorted(self._desired.namespaces, key=lambda namespace: namespace.backing):
                self._settings.make(self._rpc, namespace)
            self._connection = connection

    def _start(self) -> None:
        """Twice, if need be: another pool's keeper may have been faster at what SPDK does once."""
        for tries_left in (1, 0):
            try:
                bring_up(self._rpc, self._settings.sizing, self._settings.transports, self._settings.timeouts)
                return
            except StepRefusedError:
                if not tries_left:
                    raise

    def _add_keys(self, host: Host) -> None:
        change_s = self._settings.timeouts.change_s
        for key in keys_of(host):
            try:
                self._rpc.call("keyring_file_add_key", change_s, name=key_name(host.nqn, key.id), path=str(key.file))
            except StepRefusedError as error:
                if error.code != KEY_EXISTS:  # it does after a step whose answer was lost
                    raise

    def _check_secure(self, address: Address) -> None:
        """SPDK has one socket for an address, which is as the first who listened there wanted it: to whoever comes
        later and wants TLS it says that all is well (lib/nvmf/transport.c, spdk_nvmf_transport_listen)."""
        config = self._rpc.call("framework_get_config", self._settings.timeouts.read_s, name="nvmf")
        if plain := plain_listeners(config, address):
            raise StepRefusedError(
                f"port {address.service} of {address.ip} is not for TLS: {', '.join(plain)} listens there without it",
                code=0,
                next_step="give TLS a port of its own in exports.portals, or have the other one removed",
            )

    def _drop_keys(self, host_nqn: str, key_ids: Iterable[str]) -> None:
        """So that the keyring does not grow with every incarnation and key. One that is left over does no harm."""
        for key_id in key_ids:
            with contextlib.suppress(StepRefusedError):  # it may have been dropped, and this answer lost
                name = key_name(host_nqn, key_id)
                self._rpc.call("keyring_file_remove_key", self._settings.timeouts.change_s, name=name)
