"""Looking at what one service does, again and again."""

from __future__ import annotations

import sys
import time
from typing import Final

import click

from meshfusion.tools.mfctl.context_types import Member
from meshfusion.tools.mfctl.output import format_bytes
from meshfusion.tools.mfctl.service_access import access_to
from meshfusion.tools.mfctl.sources import explained
from meshfusion.tools.mfctl.top_rates import Look

DEADLINE_S: Final = 5.0
"""Of each of the two calls of a look."""
_CLEAR: Final = "\x1b[H\x1b[2J"


class Watched:
    """The clients of one service, kept between looks."""

    def __init__(self, member: Member, pool_name: str) -> None:
        from meshfusion.dpu.api.client import GrpcChunkService
        from meshfusion.dpu.api.drive_client import GrpcDriveAdmin

        self.member = member
        access = access_to(member.address)
        self._service = GrpcChunkService(member.address, access, pool=pool_name)
        self._drives = GrpcDriveAdmin(member.address, access, pool=pool_name)

    def look(self) -> Look:
        """Raises ServiceError."""
        with explained(self.member.address):
            status = self._service.status(deadline_s=DEADLINE_S)
            return Look(time.monotonic(), status, self._drives.drives(deadline_s=DEADLINE_S))

    def close(self) -> None:
        self._service.close()
        self._drives.close()


def begin_look(*, is_first: bool) -> None:
    """For people: on a terminal each look takes the place of the one before."""
    if sys.stdout.isatty():
        click.echo(_CLEAR, nl=False)
    elif not is_first:
        click.echo()


def format_rate(name: str, rate: float) -> str:
    return format_bytes(round(rate)) if name.endswith("_bytes") else f"{rate:.1f}"
