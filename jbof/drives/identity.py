"""What a drive is known by: serial number and the namespace's own identifier, never a path.

Paths and PCI addresses change with the order of a start or when a drive is plugged elsewhere. A slot is where a drive
is, not which one: it belongs to :class:`~meshfusion.jbof.drives.domain.Location`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.namespaces import NamespaceIds, NamespaceInfo


class IdKind(enum.Enum):
    """Where a unique identifier comes from, the best first."""

    NGUID = "nguid"
    EUI64 = "eui64"
    UUID = "uuid"
    LABEL = "label"  # the drive's UUID there, which its pool gave it
    INODE = "inode"  # of a file or a device node: only until the next start of the machine for the latter


@dataclass(frozen=True, slots=True, order=True)
class DriveIdentity:
    """Two are the same drive exactly when they are equal.

    ``unique``: ``kind.value``, such as ``nguid.0123...``, or ``nsid.N`` for a namespace that has no identifier of its
    own, which its serial number then tells apart.
    """

    model: str
    serial: str
    unique: str

    @property
    def key(self) -> str:
        """For indexes, messages and configuration: ``serial/unique``, without the serial number if there is none."""
        return f"{self.serial}/{self.unique}" if self.serial else self.unique

    def __str__(self) -> str:
        return self.key


def nvme_identity(
    model: str, serial: str, nsid: int, namespace: NamespaceInfo, ids: NamespaceIds | None = None
) -> DriveIdentity:
    """From Identify Controller and Identify Namespace; ``ids``: of the Namespace Identification Descriptors.

    Identifiers of zeros say that there is none (NVM Figure 114). Raises
    :class:`~meshfusion.jbof.errors.UnsupportedError` for a drive without serial number and identifier.
    """
    ids = ids or NamespaceIds()
    nguid, eui64 = ids.nguid or namespace.nguid, ids.eui64 or namespace.eui64
    if any(nguid):
        return DriveIdentity(model, serial, f"{IdKind.NGUID.value}.{nguid.hex()}")
    if any(eui64):
        return DriveIdentity(model, serial, f"{IdKind.EUI64.value}.{eui64.hex()}")
    if ids.uuid is not None and ids.uuid.int:
        return DriveIdentity(model, serial, f"{IdKind.UUID.value}.{ids.uuid.hex}")
    if not serial:
        raise UnsupportedError(
            f"namespace {nsid} of a drive {model or 'without a model name'} has neither a serial number nor an NGUID, "
            "EUI64 or UUID",
            next_step="Give the namespace an NGUID where it is made, or use a drive that has a serial number.",
        )
    return DriveIdentity(model, serial, f"nsid.{nsid}")


def label_identity(drive_uuid: bytes) -> DriveIdentity:
    """Of a file or device that carries a pool's label: it keeps it wherever it is moved."""
    return DriveIdentity("file", "", f"{IdKind.LABEL.value}.{drive_uuid.hex()}")


def inode_identity(device: int, inode: int) -> DriveIdentity:
    """Of a file without a label. A copy or a restored file is another one."""
    return DriveIdentity("file", "", f"{IdKind.INODE.value}.{device:x}-{inode:x}")
