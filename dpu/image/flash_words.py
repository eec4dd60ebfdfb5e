"""What is said about the end of a flash: problems, next steps, and the state that the card is left in."""

from __future__ import annotations

from typing import Final

from meshfusion.dpu.image.flash_types import Phase
from meshfusion.dpu.image.misc import Misc

GO_ON: Final = "Run the same command again to go on."
LATE_PUSH: Final = "Look at the card's console and at the load of its host; then run the same command again."
INSTALLATION_STEP: Final = (
    "Read the lines above and, once the card is up, /root/*.installation.log on it; then run the same command again."
)
PARTIAL_STEP: Final = "Read the lines above and /root/*.installation.log on the card; the same command flashes it anew."
NOT_INSTALLED: Final = (
    "the card came up without having said that the installation finished, so what runs on it may be what was there "
    "before",
    "Log in to the card and look at /etc/mlnx-release; see that nothing else reads the card's log. The same command "
    "flashes it anew.",
)
IS_INSTALLING: Final = (
    "by its log an installation runs on the card",
    "Wait until it has ended. If it is known to hang: run the same command with `--reset-installing`.",
)
SILENT: Final = (
    "neither the card's log nor an answer at its address tells what it is at, so it may be at an installation",
    "Look at its console (screen /dev/rshimN/console). If nothing is installed there: run the same command with "
    "`--reset-installing`.",
)
OWNED_ELSEWHERE: Final = (
    "the rshim belongs to the other side (DROP_MODE 1): the BMC's, or the host's if this is the BMC",
    "Release it there: `systemctl stop rshim` on the host, or BmcRShimEnabled false on the BMC; then run this again. "
    "Or flash from that side.",
)
LOCKED: Final = (
    "the card is in secure NIC mode (SECURE_NIC_MODE 1), which keeps the host from its rshim",
    "Flash it over its BMC, or end secure NIC mode in its firmware.",
)
NIC_MODE: Final = (
    "the card is in NIC mode, in which its Arm cores run nothing, so no service is possible on it",
    "Set INTERNAL_CPU_OFFLOAD_ENGINE to 0 with mlxconfig, switch the host off and on, and run this again.",
)


def refusal(misc: Misc) -> tuple[str, str] | None:
    """Problem and next step, of a card that cannot be flashed as it stands; None: it can."""
    if misc.is_dropped:
        return OWNED_ELSEWHERE
    if misc.is_locked:
        return LOCKED
    if misc.mode == "NIC mode":
        return NIC_MODE
    return None


def partial(lines: tuple[str, ...]) -> str:
    return f"it is flashed, but not all of it succeeded: {'; '.join(lines)}"


def card_state(
    phase: Phase, end: Phase, *, is_drained: bool, was_reset: bool, done_bytes: int, total_bytes: int
) -> str:
    """What state the card was left in by a flash that ended in ``phase``."""
    if end is Phase.DONE:
        return "it runs what was flashed"
    if phase.goes_on_by_itself:
        if end is Phase.STOPPED:
            return "it goes on by itself: do not reset it or its host"
        return "everything was pushed into it; what it runs now is not known"
    if was_reset:
        return (
            f"it was reset, and {done_bytes} of {total_bytes} bytes were pushed: nothing on its storage has changed, "
            "and it waits for the rest; SW_RESET 1 to its misc file lets it boot what was there before"
        )
    if phase is Phase.PUSHING:
        return "it may have been reset"
    return "nothing was done to it" + (", but the service on it was drained and has stopped" if is_drained else "")
