"""How many pages a process in a User-Mode Linux guest may have: each can be a mapping of its own on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from meshfusion.tools.lab.progress import Note

_LIMIT: Final = Path("/proc/sys/vm/max_map_count")  # Linux, Documentation/admin-guide/sysctl/vm.rst
_PAGES_PER_MIB: Final = 256


def allow_large_processes(memory_mib: int, note: Note, limit: Path = _LIMIT) -> None:
    """Let one process have all of the guest's memory, as far as we may. Told, since it is the machine's setting."""
    wanted = memory_mib * _PAGES_PER_MIB
    current = int(limit.read_text())
    if current >= wanted:
        return
    try:
        limit.write_text(f"{wanted}\n")
    except OSError:
        note(
            f"processes in the guest may have {current // _PAGES_PER_MIB} MiB each, as vm.max_map_count is {current}; "
            f"for all of its memory: sudo sysctl vm.max_map_count={wanted}"
        )
    else:
        note(f"vm.max_map_count is now {wanted} (it was {current}) until this machine starts again")
