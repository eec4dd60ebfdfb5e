"""How fast and how bad a link is, as tc commands. Sizes are the sender's: each end shapes what it sends."""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.tools.lab.guest_setup.steps import Run, run

QUEUE_PACKETS = 10_000
"""So that a rate makes packets wait rather than vanish: soft-RoCE has no flow control and resends what is lost."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """0 leaves a property as it is. ``delay_us`` is added to every packet; ``loss_percent`` of them vanish."""

    rate_mbit: float = 0.0
    delay_us: int = 0
    jitter_us: int = 0
    loss_percent: float = 0.0

    def __post_init__(self) -> None:
        assert min(self.rate_mbit, self.delay_us, self.jitter_us, self.loss_percent) >= 0, "no negative shaping"
        assert not self.jitter_us or self.delay_us, "jitter is of the delay"
        assert self.loss_percent <= 100, "percent"


def shaping_steps(interface: str, shaping: Shaping) -> list[Run]:
    """HTB holds the rate; netem below it, delay and loss.

    For an interface that is shaped already, too: packets that wait there are lost then.
    """
    netem = _netem(shaping)
    if shaping.rate_mbit:
        steps = [
            run(f"tc qdisc replace dev {interface} root handle 4: pfifo"),  # HTB cannot be put in place of HTB
            run(f"tc qdisc replace dev {interface} root handle 1: htb default 1"),
            run(f"tc class replace dev {interface} parent 1: classid 1:1 htb rate {shaping.rate_mbit:g}mbit"),
        ]
        leaf = netem or f"pfifo limit {QUEUE_PACKETS}"
        return [*steps, run(f"tc qdisc replace dev {interface} parent 1:1 handle 2: {leaf}")]
    # Another kind under a handle that is in use would be refused, so that each kind has its own.
    return [run(f"tc qdisc replace dev {interface} root handle {f'3: {netem}' if netem else '4: pfifo'}")]


def _netem(shaping: Shaping) -> str:
    words = []
    if shaping.delay_us:
        words.append(f"delay {shaping.delay_us}us" + (f" {shaping.jitter_us}us" if shaping.jitter_us else ""))
    if shaping.loss_percent:
        words.append(f"loss {shaping.loss_percent:g}%")
    return f"netem {' '.join(words)} limit {QUEUE_PACKETS}" if words else ""
