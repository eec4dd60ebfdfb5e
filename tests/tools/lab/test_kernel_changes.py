"""Changes of the kernel's source: each where it belongs, or the build stops and names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshfusion.tools.lab.kernel_changes import (
    TIMER_RATE,
    XSTATE_SIZE,
    SourceChange,
    SourceChangeError,
    apply_changes,
)

KCONFIG = "config HZ\n\tint\n\tdefault 100\n\nconfig NR_CPUS\n\tint\n\tdefault 100\n"
REGISTERS = """#include <errno.h>
#include <registers.h>

int have_xstate_support;

int save(int pid, unsigned long *fp_regs)
{
\t\tiov.iov_base = fp_regs;
\t\tiov.iov_len = FP_SIZE * sizeof(unsigned long);
\t\tif (ptrace(PTRACE_GETREGSET, pid, NT_X86_XSTATE, &iov) < 0)
\t\t\treturn -errno;
}

int restore(int pid, unsigned long *fp_regs)
{
\t\tiov.iov_base = fp_regs;
\t\tiov.iov_len = FP_SIZE * sizeof(unsigned long);
\t\tif (ptrace(PTRACE_SETREGSET, pid, NT_X86_XSTATE, &iov) < 0)
\t\t\treturn -errno;
}

void arch_init_registers(int pid)
{
\tfp_regs = malloc(FP_SIZE * sizeof(unsigned long));
\tif(fp_regs == NULL)
\t\treturn;

\tiov.iov_base = fp_regs;
\tiov.iov_len = FP_SIZE * sizeof(unsigned long);
\tif (ptrace(PTRACE_GETREGSET, pid, NT_X86_XSTATE, &iov) == 0)
\t\thave_xstate_support = 1;

\tfree(fp_regs);
}
"""


def source(tree: Path, change: SourceChange, text: str) -> Path:
    path = tree / change.file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_timer_rate(tmp_path: Path) -> None:
    kconfig = source(tmp_path, TIMER_RATE, KCONFIG)
    apply_changes(tmp_path, (TIMER_RATE,))
    assert kconfig.read_text() == KCONFIG.replace("100", "1000", 1)


@pytest.mark.parametrize("text", [KCONFIG.replace("100", "250"), KCONFIG + KCONFIG])
def test_a_source_that_is_not_as_expected(tmp_path: Path, text: str) -> None:
    kconfig = source(tmp_path, TIMER_RATE, text)
    with pytest.raises(SourceChangeError, match=TIMER_RATE.file):
        apply_changes(tmp_path, (TIMER_RATE,))
    assert kconfig.read_text() == text


def test_registers_are_set_whole(tmp_path: Path) -> None:
    registers = source(tmp_path, XSTATE_SIZE[0], REGISTERS)
    apply_changes(tmp_path, XSTATE_SIZE)
    changed = registers.read_text()
    save, rest = changed.split("int restore(")
    restore, start = rest.split("void arch_init_registers")
    assert "iov.iov_base = fp_regs;" in save, "reading a part is allowed"
    assert "iov.iov_base = host_xstate;\n\t\tiov.iov_len = host_xstate_bytes;" in restore
    assert restore.index("memcpy(host_xstate, fp_regs, FP_SIZE") < restore.index("PTRACE_SETREGSET")
    assert "host_xstate_bytes = iov.iov_len;" in start
    assert "free(" not in start
    assert changed.count("{") == changed.count("}")
