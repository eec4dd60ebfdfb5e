"""The status page of a real service, in a real browser, while engines look up and save. Nightly, as the browser is."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.dpu.api.client import GrpcChunkService
from tests.dpu.pool_cases import Holder
from tests.dpu.telemetry.browser import Browser, find_browser
from tests.tools.mfctl.test_telemetry import Daemon

pytestmark = pytest.mark.nightly

PUTS = 8


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@pytest.fixture
def daemon(tmp_path: Path, port: int) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, listen=f"127.0.0.1:{port}")
    yield daemon
    daemon.process.kill()
    daemon.process.communicate()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = find_browser()
    assert program is not None, "no browser: apt-get install chromium-headless-shell, or chromium"
    (tmp_path / "browser").mkdir()
    browser = Browser(program, tmp_path / "browser")
    yield browser
    browser.close()


def shown(browser: Browser, name: str) -> str:
    """A row of the funnel or a tile, by its name."""
    found = browser.evaluate(
        f"([...document.querySelectorAll('#funnel tr')].find((r) => r.cells[0].textContent === {name!r})?.cells[1] || "
        f"[...document.querySelectorAll('#tiles div')].find((t) => t.firstChild.textContent === {name!r})?.lastChild)"
        "?.textContent"
    )
    assert isinstance(found, str), name
    return found


def test_it_follows_a_service_under_load(daemon: Daemon, browser: Browser, port: int, tmp_path: Path) -> None:
    end = threading.Event()
    lookups = 0

    def load() -> None:
        nonlocal lookups
        with Holder(client) as other:
            while not end.wait(0.02):
                other.release(other.match(*range(PUTS)))
                lookups += 1

    client = GrpcChunkService(daemon.address)
    with Holder(client) as holder:
        for i in range(PUTS):
            assert holder.put(i)
        reply = holder.match(*range(PUTS), PUTS + 1)
        assert reply.chunk_count == PUTS
        loading = threading.Thread(target=load)
        loading.start()
        try:
            browser.open(f"http://127.0.0.1:{port}/")
            browser.wait_for("document.querySelectorAll('#holders tbody tr').length === 3")  # two, and the probe
            first = int(shown(browser, "lookups answered").replace(",", ""))
            asked = re.escape(browser.evaluate("document.getElementById('answer').textContent"))
            browser.wait_for(f"!/^{asked}$/.test(document.getElementById('answer').textContent)")
            assert int(shown(browser, "lookups answered").replace(",", "")) > first, "it asks again by itself"
        finally:
            end.set()
            loading.join()
        browser.wait_for(
            f"[...document.querySelectorAll('#funnel tr')][0].cells[1].textContent.replace(',', '') === '{lookups + 1}'"
        )
        assert shown(browser, "found something and took a lease").replace(",", "") == str(lookups + 1)
        assert shown(browser, "leases given back: the load is over").replace(",", "") == str(lookups)
        assert shown(browser, "chunks looked up").replace(",", "") == f"{PUTS * lookups + PUTS + 1}"
        assert shown(browser, "found of the chunks looked up").startswith("99.") or lookups < 20
        states = browser.evaluate(
            "Object.fromEntries(['sealed', 'open', 'held', 'quarantined'].map((name) => "
            "[name, document.querySelectorAll('#map .cell.' + name).length]))"
        )
        cells = browser.evaluate("document.querySelectorAll('#map .cell').length")
        kinds = browser.evaluate(
            "[...document.querySelectorAll('#holders tbody tr')].map((r) => r.cells[1].textContent)"
        )
        assert cells == 15, "segments of 1 MiB in 16 MiB, but for the first MiB"
        assert states["quarantined"] == 0
        assert states["open"] >= 1, "what is written to"
        assert states["held"] >= 1, "what the lease holds"
        assert any(kind.startswith("probe ") for kind in kinds)
        assert any(kind == "vllm 1" for kind in kinds)
        assert browser.complaints == []
        browser.screenshot(tmp_path / "page.png")
        if folder := os.environ.get("MESHFUSION_SCREENSHOTS"):
            shutil.copy(tmp_path / "page.png", Path(folder) / "status-page.png")
        holder.release(reply)
    client.close()
    daemon.process.kill()
    browser.wait_for("document.getElementById('answer').className === 'silent'")
