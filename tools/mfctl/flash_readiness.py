"""How far a card is from serving, now."""

from __future__ import annotations

import contextlib

from meshfusion.dpu.image.install_log import InstallLog
from meshfusion.dpu.image.misc import LOG_DISPLAY_LEVEL
from meshfusion.dpu.image.readiness import Standing, standing_of
from meshfusion.tools.mfctl.flash_cards import BmcAccess, open_card
from meshfusion.tools.mfctl.flash_targets import Target


def standing_at(target: Target, bmc: BmcAccess) -> Standing:
    """Raises CardError."""
    with contextlib.closing(open_card(target, bmc)) as card:
        level = card.rshim.read_misc().display_level
        if level != LOG_DISPLAY_LEVEL:
            card.rshim.set_misc("DISPLAY_LEVEL", LOG_DISPLAY_LEVEL)
        try:
            log = InstallLog().after(card.rshim.read_misc().log)
        finally:
            if level is not None and level != LOG_DISPLAY_LEVEL:
                card.rshim.set_misc("DISPLAY_LEVEL", level)
        return standing_of(log, card.observe())
