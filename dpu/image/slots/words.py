"""What is said to operators of an upgrade: problems with what to do next, and what runs on a card. No I/O."""

from __future__ import annotations

from typing import Final

from meshfusion.dpu.image.slots.card_state import CardState, ServiceRuns, Trial
from meshfusion.dpu.image.slots.types import Probed

Worded = tuple[str, str]

GO_ON: Final = "Run the same command again to go on."
PROBE_STEP: Final = (
    "Look at the log of that service (journalctl -u meshfusion on the card), and at docs/dpu-upgrade.md."
)
ALREADY_THERE: Final = "was there already"
WENT_ON: Final = "went on with a trial that an earlier run had begun"
COMMITTED_AFTER_ALL: Final = "it had been committed before it was to be given back"
NOT_STEADY: Final = "it was ready, and not for long enough"
COMMITTED_BEFORE: Final[Worded] = (
    "it was committed before its trial could be ended",
    "Run the same command again to go back to the other slot.",
)
NO_TRIAL: Final[Worded] = (
    "no slot is on trial, and there is no other one to go back to",
    "See what the card has: mfctl dpu status CARD.",
)
NOT_THERE: Final[Worded] = (
    "the slot that is to run is not on the card any more",
    "Upgrade to the bundle that is wanted: mfctl dpu upgrade CARD --bundle FOLDER.",
)
COMMITTED_AND_NOT_READY: Final[Worded] = (
    "this bundle is there and committed, and its service is not ready",
    "Look at its log (journalctl -u meshfusion on the card); mfctl dpu rollback CARD goes back to the other slot.",
)
STILL_STOPS: Final[Worded] = (
    "the former service has not stopped",
    "Look at its log (journalctl -u meshfusion on the card), and give it longer: --deadline switching=SECONDS.",
)


def other_trial(trial: Trial) -> Worded:
    return (
        f"slot {trial.slot} is on trial with another bundle, for {trial.left_s:.0f} s more",
        "Wait for it to end, or end it: mfctl dpu rollback CARD.",
    )


def gone_back(how: str) -> Worded:
    return f"the new service was given up: {how}", PROBE_STEP


def went_down(service: ServiceRuns) -> Worded:
    return f"the new service has {service.value}" if service is ServiceRuns.FAILED else (
        "the new service ended by itself"
    ), PROBE_STEP


def not_yet(seen: Probed, version: str) -> str:
    """Why what answers is not the new service, ready; "" when it is."""
    if version and seen.version and seen.version != version:
        return f"version {seen.version} answers, and {version} was started"
    if not seen.is_ready:
        return seen.reason or "it does not answer"
    if version and seen.version != version:
        return "it does not tell its version"
    return "" if seen.has_written else "its probe has not written a chunk yet"


def not_back(problem: str, reason: str) -> Worded:
    said = f"the former service is not ready: {reason}" if reason else "the former service does not run"
    return "; ".join(filter(None, (problem, said))), PROBE_STEP


def not_reached(problem: str, within_s: float) -> str:
    return f"the card could not be told to go back ({problem}); it does so by itself within {within_s:.0f} s at most"


def card_state(state: CardState | None) -> str:
    """What runs, as it was last seen."""
    if state is None:
        return "it was never reached"
    if state.trial is not None and state.trial.left_s > 0:
        back = f"slot {state.committed} comes back" if state.committed else "it is stopped"
        return f"slot {state.trial.slot} is on trial; {back} by itself within {state.trial.left_s:.0f} s"
    if not state.committed:
        return "no slot is committed, and none runs"
    return f"slot {state.committed} is committed; its service: {state.service.value}"
