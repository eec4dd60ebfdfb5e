"""The configfs tree in the words of ``actual``."""

from __future__ import annotations

import errno
from uuid import UUID

from meshfusion.dpu.export.actual import Actual, ActualSubsystem, AllowedHost
from meshfusion.dpu.export.desired import ANA_GROUP, Address, AnaState, Listener, Namespace
from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.nvmet.configfs import ConfigFs
from meshfusion.jbof.errors import ConfigError
from meshfusion.jbof.nvme.auth_keys import key_id

ANA_WORDS = {
    AnaState.OPTIMIZED: "optimized",
    AnaState.NON_OPTIMIZED: "non-optimized",
    AnaState.INACCESSIBLE: "inaccessible",
}
"""drivers/nvme/target/configfs.c, nvmet_ana_state."""

READ_TRIES = 8


def read_actual(tree: ConfigFs) -> Actual:
    """Raises :class:`~meshfusion.dpu.export.errors.StepRefusedError`.

    What others have on this target may go while it is read; then everything is read again.
    """
    for _ in range(READ_TRIES - 1):
        try:
            return _read_once(tree)
        except StepRefusedError as error:
            if error.code != errno.ENOENT:
                raise
    return _read_once(tree)


def _read_once(tree: ConfigFs) -> Actual:
    ports = {port: _listener(tree, port) for port in sorted(tree.entries("ports"))}
    return tuple(_subsystem(tree, nqn, ports) for nqn in sorted(tree.entries("subsystems")))


def port_at(tree: ConfigFs, address: Address) -> str | None:
    """The number of the port there, as a name; None if there is none."""
    for port in sorted(tree.entries("ports")):
        listener = _listener(tree, port)
        if isinstance(listener, Listener) and listener.address == address:
            return port
    return None


def ana_group_path(port: str) -> str:
    return f"ports/{port}/ana_groups/{ANA_GROUP}/ana_state"


def _listener(tree: ConfigFs, port: str) -> Listener | str:
    values = [tree.read(f"ports/{port}/addr_{name}") for name in ("trtype", "traddr", "trsvcid")]
    words = {word: state for state, word in ANA_WORDS.items()}
    state = tree.read(ana_group_path(port))
    try:
        return Listener(Address(values[0], values[1], int(values[2])), words[state])  # type: ignore[arg-type]
    except (ConfigError, ValueError, KeyError):
        return f"port {port} at {'/'.join(values)} in ANA state {state}"


def _subsystem(tree: ConfigFs, nqn: str, ports: dict[str, Listener | str]) -> ActualSubsystem:
    folder = f"subsystems/{nqn}"
    folders = {f"{folder}/namespaces/{nsid}": int(nsid) for nsid in tree.entries(f"{folder}/namespaces")}
    there = [_namespace(tree, its_folder, nsid) for its_folder, nsid in folders.items()]
    linked = [listener for port, listener in ports.items() if nqn in tree.entries(f"ports/{port}/subsystems")]
    oddities = [thing for thing in (*there, *linked) if isinstance(thing, str)]
    return ActualSubsystem(
        nqn=nqn,
        serial=tree.read(f"{folder}/attr_serial").rstrip(),
        allow_any_host=tree.read(f"{folder}/attr_allow_any_host") == "1",
        namespaces=frozenset(namespace for namespace in there if isinstance(namespace, Namespace)),
        hosts=frozenset(AllowedHost(host, _key_id(tree, host)) for host in tree.entries(f"{folder}/allowed_hosts")),
        listeners=frozenset(listener for listener in linked if isinstance(listener, Listener)),
        foreign="; ".join(sorted(oddities)),
        backings=frozenset(tree.read(f"{its_folder}/device_path") for its_folder in folders),
    )


def _namespace(tree: ConfigFs, folder: str, nsid: int) -> Namespace | str:
    """A namespace that is not enabled is one whose making or removal was not finished: an oddity."""
    if tree.read(f"{folder}/enable") != "1":
        return f"namespace {nsid} is disabled"
    if tree.read(f"{folder}/ana_grpid") != str(ANA_GROUP):
        return f"namespace {nsid} is in another ANA group"
    try:
        return Namespace(
            nsid,
            UUID(tree.read(f"{folder}/device_uuid")),
            UUID(tree.read(f"{folder}/device_nguid")).hex,  # the kernel writes it like a UUID
            tree.read(f"{folder}/device_path"),
        )
    except (ConfigError, ValueError) as error:
        return f"namespace {nsid}: {error}"


def _key_id(tree: ConfigFs, host: str) -> str:
    """Kernels without CONFIG_NVME_TARGET_AUTH have no such attribute."""
    text = tree.read(f"hosts/{host}/dhchap_key") if "dhchap_key" in tree.entries(f"hosts/{host}") else ""
    return key_id(text) if text.strip() else ""
