from __future__ import annotations

import uuid

import pytest

from meshfusion.jbof.drives.identity import inode_identity, label_identity, nvme_identity
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.namespaces import NamespaceIds, NamespaceInfo, parse_namespace
from tests.jbof.drives.recordings import Recording, of_kind, page_of


def namespace(*, nguid: bytes = bytes(16), eui64: bytes = bytes(8)) -> NamespaceInfo:
    page = bytearray(page_of("namespace"))
    page[104:120], page[120:128] = nguid, eui64
    parsed = parse_namespace(bytes(page))
    assert parsed is not None
    return parsed


@pytest.mark.parametrize("recording", of_kind("namespace", "made"))
def test_nguid_as_nvme_cli_prints_it(recording: Recording) -> None:
    parsed = parse_namespace(recording.page)
    assert parsed is not None
    said = recording.said
    assert nvme_identity("M", "S1", 1, parsed).key == f"S1/nguid.{said['nguid']}"


def test_the_best_identifier_wins() -> None:
    nguid, eui64, of_uuid = bytes(range(1, 17)), bytes(range(1, 9)), uuid.UUID(int=7)
    ids = NamespaceIds(uuid=of_uuid)
    both = namespace(nguid=nguid, eui64=eui64)
    assert nvme_identity("M", "S", 1, both, ids).unique == "nguid.0102030405060708090a0b0c0d0e0f10"
    assert nvme_identity("M", "S", 1, namespace(eui64=eui64), ids).unique == "eui64.0102030405060708"
    assert nvme_identity("M", "S", 1, namespace(), ids).unique == f"uuid.{of_uuid.hex}"
    # The descriptors say the same as the page, and more where it has no room.
    assert nvme_identity("M", "S", 1, namespace(), NamespaceIds(nguid=nguid)).unique.startswith("nguid.0102")


def test_without_an_identifier_the_serial_number_and_the_namespace_tell() -> None:
    assert nvme_identity("M", "S1", 3, namespace()).key == "S1/nsid.3"
    assert nvme_identity("M", "S1", 1, namespace()) != nvme_identity("M", "S2", 1, namespace())
    # Zeros in a descriptor are none.
    assert nvme_identity("M", "S1", 3, namespace(), NamespaceIds(nguid=bytes(16), uuid=uuid.UUID(int=0))).key == (
        "S1/nsid.3"
    )


def test_a_drive_that_cannot_be_told_from_others_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="neither a serial number nor an NGUID"):
        nvme_identity("M", "", 1, namespace())
    assert nvme_identity("M", "", 1, namespace(eui64=b"12345678")).key == "eui64.3132333435363738"


def test_files() -> None:
    assert label_identity(bytes(15) + b"\x01").key == "label.00000000000000000000000000000001"
    assert inode_identity(0x10, 0xAB).key == "inode.10-ab"
