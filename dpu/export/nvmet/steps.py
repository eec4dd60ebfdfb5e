"""What each step is in configfs.

The kernel's order is kept: attributes are set before anything is enabled, links are removed before what they point to
(drivers/nvme/target/configfs.c). A step that is interrupted leaves what ``actual`` reports as odd, and such a subsystem
is made anew.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from meshfusion.dpu.export.desired import ANA_GROUP, Host, HostKey, Listener, Namespace
from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.nvmet.actual import ANA_WORDS, ana_group_path, port_at
from meshfusion.dpu.export.nvmet.configfs import ConfigFs
from meshfusion.dpu.export.steps import (
    AddHost,
    AddListener,
    AddNamespace,
    CreateSubsystem,
    DeleteSubsystem,
    DenyAnyHost,
    RemoveHost,
    RemoveListener,
    RemoveNamespace,
    SetAnaState,
    SetHostKey,
    Step,
)

MAX_PORTS = 65_535
"""A port's name is its 16-bit port ID."""

_PORT_TRIES = 4
_RACED = (errno.ENOENT, errno.EEXIST, errno.EADDRINUSE)
"""The port is gone; one of its number, or at its address, has just been made."""


def carry_out(tree: ConfigFs, step: Step) -> None:
    """Blocks as long as the kernel does. Raises :class:`~meshfusion.dpu.export.errors.StepRefusedError`."""
    folder = f"subsystems/{step.nqn}"
    match step:
        case DenyAnyHost():
            tree.write(f"{folder}/attr_allow_any_host", "0")
        case RemoveHost(_, host_nqn, _):
            _remove_host(tree, folder, host_nqn)
        case SetHostKey(_, host):
            assert host.key is not None
            _set_key(tree, host.nqn, host.key)
        case RemoveListener(nqn, address):
            if (port := port_at(tree, address)) is not None:
                _unlink_port(tree, port, nqn)
        case RemoveNamespace(_, nsid):
            _remove_namespace(tree, f"{folder}/namespaces/{nsid}")
        case DeleteSubsystem(nqn):
            _delete_subsystem(tree, folder, nqn)
        case CreateSubsystem(_, serial):
            tree.make(folder)
            tree.write(f"{folder}/attr_serial", serial)
            tree.write(f"{folder}/attr_allow_any_host", "0")
        case AddNamespace(_, namespace):
            _add_namespace(tree, f"{folder}/namespaces/{namespace.nsid}", namespace)
        case AddHost(_, host):
            _add_host(tree, folder, host)
        case AddListener(nqn, listener, _):
            _add_listener(tree, folder, nqn, listener)
        case SetAnaState(_, listener):
            if (port := port_at(tree, listener.address)) is not None:
                tree.write(ana_group_path(port), ANA_WORDS[listener.ana_state])


def _remove_host(tree: ConfigFs, folder: str, host_nqn: str) -> None:
    tree.unlink(f"{folder}/allowed_hosts/{host_nqn}")
    with _unless(errno.EBUSY, errno.ENOTEMPTY):  # another subsystem allows it, too
        tree.remove(f"hosts/{host_nqn}")


def _add_host(tree: ConfigFs, folder: str, host: Host) -> None:
    there = f"hosts/{host.nqn}"
    with _unless(errno.EEXIST):
        tree.make(there)
    if host.key is not None:
        _set_key(tree, host.nqn, host.key)
    tree.link(f"{folder}/allowed_hosts/{host.nqn}", there)


def _set_key(tree: ConfigFs, host_nqn: str, key: HostKey) -> None:
    """Asked for from the next connection on; a controller keeps that with which it came, for all its queues
    (drivers/nvme/target/auth.c, nvmet_setup_auth)."""
    try:
        text = key.file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StepRefusedError(
            f"key file {key.file} cannot be read: {error}",
            code=getattr(error, "errno", 0) or 0,
            next_step="check that it exists and who owns it",
        ) from error
    attribute = f"hosts/{host_nqn}/dhchap_key"
    tree.hide(attribute)  # the kernel shows it to every user of this machine (include/linux/configfs.h, CONFIGFS_ATTR)
    tree.write(attribute, text)


def _add_namespace(tree: ConfigFs, folder: str, namespace: Namespace) -> None:
    tree.make(folder)
    try:
        tree.write(f"{folder}/device_path", namespace.backing)
        tree.write(f"{folder}/device_uuid", str(namespace.uuid))
        tree.write(f"{folder}/device_nguid", namespace.nguid)
        tree.write(f"{folder}/ana_grpid", str(ANA_GROUP))
        tree.write(f"{folder}/enable", "1")
    except StepRefusedError:
        with contextlib.suppress(StepRefusedError):  # the subsystem and its host can stay
            tree.remove(folder)
        raise


def _remove_namespace(tree: ConfigFs, folder: str) -> None:
    """Returns only when no request to it is in flight (drivers/nvme/target/core.c, nvmet_ns_disable).

    It is written although it may read 0: then somebody's write before may still wait, and this one waits behind it for
    the configuration lock. Kernels before 6.10 do not take that lock there, unless it was backported (6.1.192 has it).
    """
    tree.write(f"{folder}/enable", "0")
    tree.remove(folder)


def _delete_subsystem(tree: ConfigFs, folder: str, nqn: str) -> None:
    """With all that is still in it, also what no step describes."""
    for host in sorted(tree.entries(f"{folder}/allowed_hosts")):
        _remove_host(tree, folder, host)
    for port in sorted(tree.entries("ports")):
        if nqn in tree.entries(f"ports/{port}/subsystems"):
            _unlink_port(tree, port, nqn)
    for nsid in sorted(tree.entries(f"{folder}/namespaces")):
        _remove_namespace(tree, f"{folder}/namespaces/{nsid}")
    tree.remove(folder)


def _unlink_port(tree: ConfigFs, port: str, nqn: str) -> None:
    """Its controllers there are deleted with the link. A port that nobody uses goes, too."""
    tree.unlink(f"ports/{port}/subsystems/{nqn}")
    if not tree.entries(f"ports/{port}/subsystems"):
        with _unless(errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):  # another pool has come to it, or has removed it
            tree.remove(f"ports/{port}")


def _add_listener(tree: ConfigFs, folder: str, nqn: str, listener: Listener) -> None:
    """Ports are shared by all who use the kernel's target: other pools, also of this service, make and remove them
    meanwhile. What that can refuse is looked at anew."""
    for _ in range(_PORT_TRIES - 1):
        with _unless(*_RACED):
            _link_port(tree, folder, nqn, listener)
            return
    _link_port(tree, folder, nqn, listener)


def _link_port(tree: ConfigFs, folder: str, nqn: str, listener: Listener) -> None:
    there = port_at(tree, listener.address)
    port = there or _make_port(tree, listener)
    try:
        tree.write(ana_group_path(port), ANA_WORDS[listener.ana_state])
        tree.link(f"ports/{port}/subsystems/{nqn}", folder)
    except StepRefusedError:
        if there is None:  # the address may be another port's by now: one that no subsystem is at would stay for ever
            with contextlib.suppress(StepRefusedError):
                tree.remove(f"ports/{port}")
        raise


def _make_port(tree: ConfigFs, listener: Listener) -> str:
    address, used = listener.address, tree.entries("ports")
    port = next(str(number) for number in range(1, MAX_PORTS + 1) if str(number) not in used)
    tree.make(f"ports/{port}")
    try:
        tree.write(f"ports/{port}/addr_adrfam", address.family)
        tree.write(f"ports/{port}/addr_trtype", address.transport)
        tree.write(f"ports/{port}/addr_traddr", address.ip)
        tree.write(f"ports/{port}/addr_trsvcid", str(address.service))
    except StepRefusedError:
        with contextlib.suppress(StepRefusedError):
            tree.remove(f"ports/{port}")
        raise
    return port


@contextlib.contextmanager
def _unless(*codes: int) -> Iterator[None]:
    """These refusals are as good as done."""
    try:
        yield
    except StepRefusedError as error:
        if error.code not in codes:
            raise
