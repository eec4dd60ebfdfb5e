"""What we change in the kernel's source before it is built: few lines, each looked for exactly, or the build stops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple


class SourceChangeError(Exception):
    """The source of this version is not as a change expects it."""


class SourceChange(NamedTuple):
    """``pattern`` (a regular expression) is found exactly once in ``file`` and becomes ``replacement``."""

    file: str
    pattern: str
    replacement: str


TIMER_HZ: Final = 1000

TIMER_RATE: Final = SourceChange(
    "arch/um/Kconfig",
    r"(?m)^(config HZ\n\tint\n\tdefault) 100$",
    rf"\g<1> {TIMER_HZ}",
)
"""The rate is fixed at 100 Hz there, and a poller that sleeps for a moment would sleep 10 ms."""

_REGISTERS: Final = "arch/x86/um/os-Linux/registers.c"
_SIZE: Final = r"FP_SIZE \* sizeof\(unsigned long\)"

XSTATE_SIZE: Final = (
    SourceChange(
        _REGISTERS,
        r"int have_xstate_support;\n",
        "int have_xstate_support;\n"
        "static unsigned long host_xstate[8192];\n"
        "static unsigned long host_xstate_bytes = sizeof(host_xstate);\n",
    ),
    SourceChange(_REGISTERS, r"#include <errno\.h>\n", "#include <errno.h>\n#include <string.h>\n"),
    SourceChange(
        _REGISTERS,
        rf"iov\.iov_base = fp_regs;\n(\t+)iov\.iov_len = {_SIZE};\n(\t+if \(ptrace\(PTRACE_SETREGSET)",
        "memcpy(host_xstate, fp_regs, FP_SIZE * sizeof(unsigned long));\n"
        r"\g<1>iov.iov_base = host_xstate;" + "\n" + r"\g<1>iov.iov_len = host_xstate_bytes;" + "\n" + r"\g<2>",
    ),
    SourceChange(
        _REGISTERS,
        rf"fp_regs = malloc\({_SIZE}\);\n(\s+if ?\(fp_regs == NULL\)\n\s+return;\n)",
        r"fp_regs = host_xstate;" + "\n",
    ),
    SourceChange(
        _REGISTERS,
        rf"iov\.iov_len = {_SIZE};\n(\s+if \(ptrace\(PTRACE_GETREGSET, pid, NT_X86_XSTATE, &iov\) == 0\))\n"
        r"(\s+)have_xstate_support = 1;\n\n\s+free\(fp_regs\);\n",
        r"iov.iov_len = sizeof(host_xstate);" + "\n" + r"\g<1> {" + "\n"
        r"\g<2>have_xstate_support = 1;" + "\n" + r"\g<2>host_xstate_bytes = iov.iov_len;" + "\n\t}\n",
    ),
)
"""The host sets a process's extended registers only as a whole, and with AMX they are longer (11,008 bytes) than the
2,696 that Linux 6.1 reserves: every guest process would die at once (EFAULT). What lies beyond, AMX tiles, no guest
process can have: the permission for them is a call that User-Mode Linux does not pass on. So it is kept at zero."""

CHANGES: Final = (TIMER_RATE, *XSTATE_SIZE)


def apply_changes(tree: Path, changes: tuple[SourceChange, ...] = CHANGES) -> None:
    """In the source under ``tree``. Raises :class:`SourceChangeError`, naming the file; some may be applied then."""
    for change in changes:
        path = tree / change.file
        text, count = re.subn(change.pattern, change.replacement, path.read_text())
        if count != 1:
            raise SourceChangeError(f"{change.file} of this version has {count} places like {change.pattern!r}, not 1")
        path.write_text(text)
