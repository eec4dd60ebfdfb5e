"""The page for people in a real browser: what it shows, of whom it runs nothing, and that it says when nobody answers.

Nightly: the browser is 60 MB to fetch and 200 MB to keep. ``tools/test --nightly`` installs it where it may.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.api.address import TcpAddress
from meshfusion.dpu.telemetry.http_server import TelemetryServer
from meshfusion.dpu.telemetry.pages import JSON_TYPE, Page, Pages
from meshfusion.dpu.telemetry.status_page import status_page
from tests.dpu.telemetry.browser import Browser, find_browser
from tests.dpu.telemetry.page_cases import EVIL, several_pools_json, silent_pool_json, status_json
from tests.dpu.telemetry.test_http_server import port_of

pytestmark = pytest.mark.nightly

PHONE_PX = 360
CHOOSE_LAB = "{ const l = document.getElementById('pools'); l.value = 'lab'; l.dispatchEvent(new Event('change')); }"


class Served:
    """The page, and answers that a test sets. ``body`` None: the question is left without an answer until ``end``."""

    def __init__(self) -> None:
        self.code = 200
        self.body: bytes | None = status_json()
        self.several = several_pools_json()  # for ``body`` to be that of them all
        self.end = threading.Event()
        self.server = self.started(0)

    def started(self, port: int) -> TelemetryServer:
        of_pools = {path: partial(self.of_pool, path) for path in self.several if path != "/status.json"}
        pages: Pages = {**status_page(), "/status.json": self.status, **of_pools}
        server = TelemetryServer(TcpAddress("127.0.0.1", port), pages)
        server.start()
        return server

    def status(self) -> Page:
        body = self.body
        if body is None:
            self.end.wait(60.0)
        return Page(self.code, JSON_TYPE, body or b"{}")

    def of_pool(self, path: str) -> Page:
        return Page(200, JSON_TYPE, self.several[path])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{port_of(self.server)}/"


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.end.set()
    served.server.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = find_browser()
    assert program is not None, "no browser: apt-get install chromium-headless-shell, or chromium"
    browser = Browser(program, tmp_path)
    yield browser
    browser.close()


def opened(browser: Browser, served: Served) -> None:
    browser.open(served.url)
    browser.wait_for("document.querySelectorAll('#events tbody tr').length > 0")


def text(browser: Browser, selector: str) -> str:
    found = browser.evaluate(f"document.querySelector({selector!r}).innerText")
    assert isinstance(found, str)
    return found


def rows(browser: Browser, selector: str) -> list[list[str]]:
    found: list[list[str]] = browser.evaluate(
        f"[...document.querySelectorAll({selector!r})].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    return found


def test_it_shows_what_the_service_tells(browser: Browser, served: Served) -> None:
    opened(browser, served)
    assert text(browser, "#answer").startswith("The service answered at 20")
    assert browser.evaluate("document.querySelectorAll('#map .cell').length") == 5
    assert browser.evaluate("[...document.querySelectorAll('#map .cell')].map((c) => c.className)") == [
        *("cell sealed held", "cell mixed", "cell open held", "cell quarantined held", "cell"),
    ]
    assert browser.evaluate("[...document.querySelectorAll('#map .cell')].map((c) => c.title)") == [
        "segments 0 to 3: 4 sealed; held by readers: 2",
        "segments 4 to 7: 1 free, 3 sealed",
        "segments 8 to 11: 2 free, 1 open, 1 sealed; held by writers: 1",
        "segments 12 to 15: 1 open, 2 sealed, 1 quarantined; held by writers: 1",
        "segments 16 to 18: 3 free",
    ]
    funnel = rows(browser, "#funnel tr")
    assert [row[:3] for row in funnel][:8] == [
        ["lookups answered", "40", "100.0 %"],
        ["found something and took a lease", "30", "75.0 %"],
        ["leases given back: the load is over", "25", "62.5 %"],
        ["leases that lapsed", "1", "2.5 %"],
        ["chunks looked up", "2,000", "100.0 %"],
        ["chunks found and leased", "1,500", "75.0 %"],
        ["reported as damaged by engines", "3", "0.1 %"],
        ["dropped because of that", "2", "0.1 %"],
    ]
    assert [row[:3] for row in funnel][8] == ["chunks offered", "100", "100.0 %"]
    assert [row[:3] for row in funnel][-1] == ["committed", "60", "60.0 %"]
    drives = rows(browser, "#drives tbody tr")
    assert [row[:7] for row in drives] == [
        ["0", "online", "4.0 GiB", "7 %", "no end at this rate", "5.0 TiB", "512 MiB"],
        ["1", "failing", "4.0 GiB", "85 %", "40 months", "5.0 TiB", "no bound"],
        ["2", "online", "4.0 GiB", "not known", "not known", "not known", "512 MiB"],
    ]
    heats = browser.evaluate("[...document.querySelectorAll('#drives tbody tr')].map((r) => r.cells[3].className)")
    assert heats == ["cool", "hot", ""]
    tiles = dict(zip(*(browser.evaluate(f"[...document.querySelectorAll('#tiles {tag}')].map((e) => e.textContent)")
                       for tag in ("dt", "dd")), strict=True))  # fmt: skip
    assert tiles["stored"] == "12.0 MiB of 4.0 GiB"
    assert tiles["found of the chunks looked up"] == "75.0 %"
    assert tiles["oldest lease"] == "13 s"
    assert tiles["index transactions pending"] == "7"
    assert tiles["probe"] == "degraded, 3.0 s ago"
    holders = rows(browser, "#holders tbody tr")
    assert holders[0][1:] == ["vllm 0.32.0", "4242", "live", "local", "2", "1", "250 ms ago", "h-1"]
    assert holders[1][3:5] == ["silent", "nvmeof"]
    (call,) = rows(browser, "#calls tbody tr")
    assert call[:4] == ["2023-11-14 22:13:20 UTC", "Match", "250 ms", "DEADLINE_EXCEEDED"]
    assert rows(browser, "#events tbody tr")[-1][:3] == ["2023-11-14 22:13:20 UTC", "error", "saves_stopped"]
    alarms = text(browser, "#alarms").splitlines()
    assert len(alarms) == 5
    assert browser.evaluate("document.title") == "(5) MeshFusion"
    assert browser.complaints == []


def test_words_of_others_are_words(browser: Browser, served: Served) -> None:
    """A host's name, a path, a serial, reasons, a request's id and an event that all hold markup and a script."""
    opened(browser, served)
    assert browser.evaluate("window.owned") is None
    assert browser.evaluate("document.querySelectorAll('img, body script:not(:last-of-type)').length") == 0
    assert browser.evaluate("document.scripts.length") == 1
    assert rows(browser, "#holders tbody tr")[0][0] == EVIL
    drive = rows(browser, "#drives tbody tr")[0]
    assert drive[-2:] == [f"/dev/{EVIL}", EVIL]
    assert rows(browser, "#calls tbody tr")[0][-1] == EVIL
    assert rows(browser, "#events tbody tr")[-1][-1] == EVIL
    assert EVIL in browser.evaluate("document.getElementById('alarms').textContent")
    assert EVIL in browser.evaluate("document.getElementById('identity').textContent")
    assert browser.complaints == []


def test_the_policy_keeps_out_what_the_page_did_not_bring(browser: Browser, served: Served) -> None:
    """The second line of defence, tried on purpose: the page's own code would have to have a mistake first."""
    opened(browser, served)
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned=1\">')")
    browser.evaluate("{ const s = document.createElement('script'); s.textContent = 'window.owned = 2'; "
                     "document.body.append(s); }")  # fmt: skip
    browser.wait_for("true")
    assert browser.evaluate("window.owned") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_a_service_that_does_not_answer_is_told_with_since_when(browser: Browser, served: Served) -> None:
    opened(browser, served)
    port = port_of(served.server)
    answered = text(browser, "#answer").removeprefix("The service answered at ").removesuffix(".")
    served.server.close()
    browser.wait_for("document.getElementById('answer').className === 'silent'")
    told = text(browser, "#answer")
    assert told.startswith("The service does not answer since 20")
    assert answered[:13] in told, "the time of the last answer, or of one a poll later"
    assert told.endswith(" What is shown is from then.")
    assert browser.evaluate("document.title") == "(no answer) MeshFusion"
    assert browser.evaluate("document.getElementById('main').className") == "old"
    assert len(rows(browser, "#holders tbody tr")) == 2, "what was shown stays"
    since = told.split(", for ")[0]
    browser.wait_for(f"document.getElementById('answer').innerText !== {json.dumps(told)}", 10.0)
    assert text(browser, "#answer").split(", for ")[0] == since, "for longer, since then"
    served.server = served.started(port)
    browser.wait_for("document.getElementById('answer').className === ''")
    assert browser.evaluate("document.getElementById('main').className") == ""


def test_one_that_takes_the_question_and_says_nothing(browser: Browser, served: Served) -> None:
    served.body = None
    browser.open(served.url)
    browser.wait_for("document.getElementById('answer').className === 'silent'")
    told = text(browser, "#answer")
    assert "no answer within 5 s" in told
    assert "What is shown" not in told, "nothing is"


@pytest.mark.parametrize(("code", "body"), [(500, b"{}"), (200, b"not JSON")])
def test_nonsense_is_no_answer(browser: Browser, served: Served, code: int, body: bytes) -> None:
    served.code, served.body = code, body
    browser.open(served.url)
    browser.wait_for("document.getElementById('answer').className === 'silent'")


def test_a_pool_that_does_not_answer_the_service(browser: Browser, served: Served) -> None:
    opened(browser, served)
    served.code, served.body = 503, silent_pool_json()
    browser.wait_for("document.getElementById('of-pool').className === 'old'")
    assert browser.evaluate("document.getElementById('answer').className") == "", "the service itself does"
    first = text(browser, "#alarms").splitlines()[0]
    assert first.startswith(f"The pool does not answer: it hangs {EVIL}. What is shown of it is from 20")
    served.code, served.body = 200, status_json(saves_stopped_reason="", exports_problem="")
    browser.wait_for("document.getElementById('of-pool').className === ''")


def test_several_pools_are_chosen_from_and_all_their_alarms_are_there(browser: Browser, served: Served) -> None:
    served.body = served.several["/status.json"]
    opened(browser, served)
    assert browser.evaluate("document.getElementById('choice').hidden") is False
    assert browser.evaluate("[...document.getElementById('pools').options].map((o) => o.textContent)") == ["red", "lab"]
    assert text(browser, "#identity").startswith("pool red, ")
    assert len(rows(browser, "#drives tbody tr")) == 3
    alarms = text(browser, "#alarms").splitlines()
    assert sum(alarm.startswith("Pool red: ") for alarm in alarms) == 5
    assert [alarm for alarm in alarms if alarm.startswith("Pool lab: ")] == [
        "Pool lab: Segments in quarantine, because of writes of unknown fate: 1",
        f"Pool lab: The probe is degraded: {EVIL}",
    ]
    assert f"red: {EVIL}" in [row[-1] for row in rows(browser, "#events tbody tr")]
    browser.evaluate(CHOOSE_LAB)
    browser.wait_for("document.getElementById('identity').textContent.startsWith('pool lab, ')")
    assert "in /pool/lab" in text(browser, "#identity")
    assert len(rows(browser, "#drives tbody tr")) == 1
    assert browser.evaluate("location.hash") == "#lab"
    assert len(text(browser, "#alarms").splitlines()) == 7, "of all of them, whichever is looked at"
    browser.open(f"{served.url}#lab")
    browser.wait_for("document.getElementById('identity').textContent.startsWith('pool lab, ')")
    assert browser.evaluate("document.getElementById('pools').value") == "lab"
    assert browser.complaints == []


def test_a_pool_that_was_never_seen_shows_nothing_of_another(browser: Browser, served: Served) -> None:
    both, lab = (json.loads(served.several[path]) for path in ("/status.json", "/pools/lab/status.json"))
    silent: dict[str, Any] = {"pool": None, "drives": [], "problem": "it hangs"}
    both["pools"]["lab"] |= silent
    served.body = json.dumps(both).encode()
    served.several["/pools/lab/status.json"] = json.dumps({**lab, **silent, "segment_map": None}).encode()
    opened(browser, served)
    assert len(rows(browser, "#drives tbody tr")) == 3
    browser.evaluate(CHOOSE_LAB)
    browser.wait_for("document.getElementById('of-pool').className === 'old'")
    assert rows(browser, "#drives tr") == []
    assert rows(browser, "#holders tr") == []
    assert "Pool lab: The pool does not answer: it hangs." in text(browser, "#alarms")
    assert browser.complaints == []


def test_it_fits_a_phone_and_both_schemes(browser: Browser, served: Served) -> None:
    browser.screen(width_px=PHONE_PX, height_px=740, is_phone=True)
    opened(browser, served)
    assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE_PX, "nothing to scroll sideways"
    assert browser.evaluate("window.innerWidth") == PHONE_PX, "no zoom"
    grounds = {}
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        styles = "getComputedStyle(document.body)"
        grounds[scheme] = browser.evaluate(f"[{styles}.backgroundColor, {styles}.color]")
    assert grounds == {
        "light": ["rgb(255, 255, 255)", "rgb(27, 31, 36)"],
        "dark": ["rgb(20, 23, 27)", "rgb(228, 232, 236)"],
    }
