"""What the simulations' command lines take."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(smallest: int) -> Callable[[str], int]:
    """For ``type`` of an argument: whole numbers from ``smallest`` on. Others end with the usage and exit code 2."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {smallest} on")
        return number

    return parse
