"""``python -S -m meshfusion.tools.lab.guest_agent --line /dev/tty1 [--seed FILE]``, started by ``boot/main.sh``."""

from __future__ import annotations

import argparse
import fcntl
import os
import struct
import termios
import tty
from pathlib import Path

from meshfusion.tools.lab.guest_agent.agent import Agent

RNDADDENTROPY = 0x40085203
"""``_IOW('R', 0x03, int[2])`` of linux/random.h."""


def seed_kernel(seed: bytes) -> None:
    """Credit bytes from the host's generator to the guest's: it has no other source, and getrandom(2) waits for one.

    struct rand_pool_info of linux/random.h: entropy_count in bits, buf_size in bytes, buf.
    """
    with open("/dev/random", "wb", buffering=0) as device:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack(f"ii{len(seed)}s", len(seed) * 8, len(seed), seed))


def open_line(path: str) -> int:
    """A terminal is set to pass every byte as it is."""
    line = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    if os.isatty(line):
        tty.setraw(line, termios.TCSANOW)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--line", required=True, help="serial line to the host")
    parser.add_argument("--seed", type=Path, help="file of random bytes from the host")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        seed_kernel(arguments.seed.read_bytes())
    Agent(open_line(arguments.line)).serve()


if __name__ == "__main__":
    main()
