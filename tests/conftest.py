"""What every suite shares: no hub is asked for a model, no user's contexts count, and CI does not skip in silence."""

from __future__ import annotations

import functools
import os

import pytest
from hypothesis import settings

from meshfusion.host.memory.libcuda import load_cuda
from meshfusion.jbof.errors import UnsupportedError

os.environ["HF_HUB_OFFLINE"] = "1"
# No mfctl of any test takes the contexts of whoever runs it.
os.environ["MFCTL_CONFIG"] = "/nonexistent/contexts.yaml"

# In CI the same examples in every run: what fails there was changed by the commit that it fails on. Runs
# outside of CI try new ones each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI") == "true":
    settings.load_profile("ci")

ALLOWED_SKIP_PREFIX = "needs hardware:"
"""In CI only a test that names hardware no CI machine has (GPU, RDMA NIC, DPU) may be skipped."""

_skipped = pytest.StashKey[list[str]]()


def forbidden_skips(skips: list[tuple[str, str]]) -> list[str]:
    """The skips, given as (test, reason), that CI does not accept, as ``test: reason``."""
    return [f"{test}: {reason}" for test, reason in skips if not reason.startswith(ALLOWED_SKIP_PREFIX)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``device`` are skipped where there is none."""
    if item.get_closest_marker("device") is not None:
        reason = lacks_device()
        if reason:
            pytest.skip(f"{ALLOWED_SKIP_PREFIX} {reason}")


@functools.cache
def lacks_device() -> str:
    """Why tests cannot use a CUDA device; empty: they can. Costs a second where torch was not imported."""
    try:
        load_cuda()
    except UnsupportedError as error:
        return f"a CUDA device ({error.message})"
    import torch

    return "" if torch.cuda.is_available() else f"a PyTorch for CUDA (this is {torch.__version__})"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skip for any other reason makes the run fail."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return
    skips: list[tuple[str, str]] = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skips.append((report.nodeid, reason.removeprefix("Skipped: ")))
    forbidden = forbidden_skips(skips)
    session.config.stash[_skipped] = forbidden
    if forbidden and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skips that made CI fail."""
    forbidden = terminalreporter.config.stash.get(_skipped, [])
    if forbidden:
        terminalreporter.section(f'skips that CI does not accept (reason must start with "{ALLOWED_SKIP_PREFIX}")')
        for line in forbidden:
            terminalreporter.line(line)
