"""A drive made of pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshfusion.jbof.drives.pages import CSI_NVM
from meshfusion.jbof.errors import MediaError
from tests.jbof.drives.recordings import page_of


def refused(what: str) -> MediaError:
    return MediaError(f"no {what}", next_step="none")


@dataclass
class FakePages:
    """By what asks for them; what is not there is refused. ``asked``: all of it, in order."""

    identify_pages: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # (cns, nsid, csi)
    log_pages: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (page, endurance group)
    features: dict[tuple[int, int], int] = field(default_factory=dict)
    asked: list[tuple[object, ...]] = field(default_factory=list)

    def identify(self, cns: int, *, nsid: int = 0, csi: int = CSI_NVM) -> bytes:
        self.asked.append(("identify", cns, nsid, csi))
        try:
            return self.identify_pages[cns, nsid, csi]
        except KeyError:
            raise refused(f"page {cns}") from None

    def log_page(self, page: int, length_bytes: int, *, nsid: int = 0xFFFFFFFF, group: int = 0) -> bytes:
        self.asked.append(("log", page, length_bytes, group))
        try:
            return self.log_pages[page, group].ljust(length_bytes, b"\0")[:length_bytes]
        except KeyError:
            raise refused(f"log page {page}") from None

    def feature(self, feature: int, *, group: int = 0) -> int:
        return self.features[feature, group]


def drive_pages(serial: str = "S1", *, nguid: bytes = bytes(16)) -> FakePages:
    """An ordinary drive: QEMU's, under another name, with a health log that says something."""
    controller = bytearray(page_of("controller", "QEMU 7.2"))
    controller[4:24] = serial.encode().ljust(20)
    namespace = bytearray(page_of("namespace", "QEMU 7.2"))
    namespace[104:120] = nguid
    return FakePages(
        identify_pages={
            (0x01, 0, 0): bytes(controller),
            (0x00, 1, 0): bytes(namespace),
            (0x03, 1, 0): page_of("descriptors", "QEMU 7.2"),
        },
        log_pages={(0x02, 0): page_of("smart")},
    )
