"""A card over its BMC: what Redfish is asked, what its answers mean, and a whole flash."""

from __future__ import annotations

import hashlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshfusion.dpu.image.edge.bmc_card import BmcCard, RedfishRshim
from meshfusion.dpu.image.edge.driver import Surroundings, run_flash
from meshfusion.dpu.image.edge.journal_file import JournalFile
from meshfusion.dpu.image.edge.redfish import Credentials, Redfish
from meshfusion.dpu.image.edge.rshim import LocalRshim
from meshfusion.dpu.image.errors import CardError, FaultKind
from meshfusion.dpu.image.flash import Flash
from meshfusion.dpu.image.flash_types import Deadlines, Phase, PushEnded, PushMoved
from meshfusion.dpu.image.stream import Stream
from tests.dpu.image.fake_bmc import ACTION, MANAGER, FakeBmc, failed_task, served
from tests.dpu.image.fake_card import BF_CFG, tiny_bfb
from tests.dpu.image.fake_host import FakeHost
from tests.dpu.image.rshim_mount import Mounted, mounted
from tests.dpu.security.authority import Authority, Pair

ROOT = Credentials("root", "secret")


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(ca: Authority) -> Pair:
    return ca.issue("bmc")


@pytest.fixture
def bmc(pair: Pair) -> Iterator[FakeBmc]:
    with served(FakeBmc(), pair) as found:
        yield found


@pytest.fixture
def redfish(bmc: FakeBmc, ca: Authority) -> Redfish:
    return Redfish("127.0.0.1", ROOT, port=bmc.port, ca=ca.path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("dev") / "rshim0", speed=30.0) as found:
        yield found


@pytest.fixture
def rshim(place: Mounted, bmc: FakeBmc) -> Mounted:
    bmc.boot = place.folder / "boot"
    return place.renew()


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    path = tmp_path / "image.bfb"
    path.write_bytes(tiny_bfb(3_000_000))
    return Stream(lambda: path.open("rb"), path.stat().st_size, BF_CFG)


@pytest.fixture
def card(redfish: Redfish) -> Iterator[RedfishRshim]:
    made = RedfishRshim(redfish, LocalRshim(Path("/nowhere")), sleep=lambda _: time.sleep(0.05))
    yield made
    made.abandon_push()


def test_its_rshim_is_switched_on_once(card: RedfishRshim, bmc: FakeBmc) -> None:
    card.take()
    card.take()
    assert [entry for entry in bmc.seen if entry[0] == "PATCH"] == [
        ("PATCH", MANAGER, {"BmcRShim": {"BmcRShimEnabled": True}})
    ]


def test_a_host_that_keeps_the_rshim_is_told_of(card: RedfishRshim, bmc: FakeBmc) -> None:
    bmc.host_has_rshim = True
    for _ in range(3):
        with pytest.raises(CardError, match="stays off, since the host has it") as raised:
            card.take()
        assert raised.value.kind is FaultKind.OWNED_ELSEWHERE
        assert "systemctl stop rshim" in raised.value.next_step
    assert len([entry for entry in bmc.seen if entry[0] == "PATCH"]) == 1, "it is asked again after a while only"


def test_it_fetches_all_of_a_stream(card: RedfishRshim, bmc: FakeBmc, rshim: Mounted, stream: Stream) -> None:
    card.begin_push(stream)
    told = []
    while isinstance(step := card.continue_push(), PushMoved):
        told.append(step.done_bytes)
    assert isinstance(step, PushEnded)
    assert told == sorted(told)
    assert bmc.fetched_bytes == stream.total_bytes
    assert (rshim.state["pushed_bytes"], rshim.state["erased_pool_drives"]) == (stream.total_bytes, 0)
    (body,) = [body for method, path, body in bmc.seen if (method, path) == ("POST", ACTION)]
    assert body["TransferProtocol"] == "HTTP"
    assert body["Targets"] == ["redfish/v1/UpdateService/FirmwareInventory/DPU_OS"]
    assert body["ImageURI"].startswith("127.0.0.1:"), "no scheme"


@pytest.mark.parametrize("path", ["", "/", "/x.bfb"])
def test_what_is_offered_is_at_a_path_that_nobody_guesses(card: RedfishRshim, stream: Stream, path: str) -> None:
    import urllib.error
    import urllib.request

    card._serve(stream)
    assert card._server is not None
    host = card._server.uri.partition("/")[0]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{host or '127.0.0.1'}{path}", timeout=5)


def _push(card: RedfishRshim, stream: Stream) -> None:
    card.begin_push(stream)
    while isinstance(card.continue_push(), PushMoved):
        pass


BUSY = {"error": {"message": "An update is in progress."}}


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        (lambda b: b.answers.update({("POST", ACTION): (400, BUSY)}), FaultKind.BUSY, "An update is in progress"),
        (lambda b: b.answers.update({("POST", ACTION): (400, {})}), FaultKind.REFUSED, "status 400"),
        (lambda b: b.answers.update({("POST", ACTION): (503, {})}), FaultKind.UNREACHABLE, "status 503"),
        (lambda b: setattr(b, "inventory", ("BMC_Firmware",)), FaultKind.REFUSED, "no DPU_OS among"),
        (
            lambda b: setattr(b, "ends_with", failed_task("Invalid FW Package", "Retry with valid FW package.")),
            FaultKind.REFUSED,
            "Invalid FW Package",
        ),
        (
            lambda b: setattr(b, "ends_with", failed_task("Transfer of image failed. Unknown Host.", "Fix it.")),
            FaultKind.BROKEN,
            "Unknown Host",
        ),
    ],
)
def test_what_the_bmc_refuses_is_told_apart(
    card: RedfishRshim, bmc: FakeBmc, stream: Stream, change: Callable[[FakeBmc], None], kind: FaultKind, word: str
) -> None:
    card.take()
    change(bmc)
    with pytest.raises(CardError, match=word) as raised:
        _push(card, stream)
    assert raised.value.kind is kind
    assert raised.value.next_step


def test_another_generations_inventory_is_read(card: RedfishRshim, bmc: FakeBmc) -> None:
    bmc.inventory = ("BMC_Firmware", "Bluefield_OS")
    assert card._inventory() == "redfish/v1/UpdateService/FirmwareInventory/Bluefield_OS"


@pytest.mark.parametrize(
    ("body", "status", "step"),
    [
        ({}, 401, "Correct the credentials"),
        ({"error": {"message": "The password must be changed"}}, 403, "Change the password"),
    ],
)
def test_access_that_is_refused(redfish: Redfish, bmc: FakeBmc, body: dict[str, Any], status: int, step: str) -> None:
    if status == 401:
        bmc.password = "other"
    bmc.answers["GET", "/redfish/v1/Managers"] = (status, body)
    with pytest.raises(CardError) as raised:
        redfish.get("/redfish/v1/Managers")
    assert raised.value.kind is FaultKind.DENIED
    assert step in raised.value.next_step
    assert "secret" not in str(raised.value)


def test_a_certificate_that_nobody_vouches_for_gets_no_password(bmc: FakeBmc, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = Authority(tmp_path / "b", "other")
    with pytest.raises(CardError, match=r"127\.0\.0\.1: ") as raised:
        Redfish("127.0.0.1", ROOT, port=bmc.port, ca=other.path).get("/redfish/v1/Managers")
    assert raised.value.kind is FaultKind.DENIED
    assert "--bmc-ca" in raised.value.next_step
    assert bmc.passwords == []


def test_a_fingerprint_stands_for_an_authority(bmc: FakeBmc, pair: Pair) -> None:
    der = ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())
    fingerprint = hashlib.sha256(der).hexdigest()
    written = ":".join(fingerprint[i : i + 2] for i in range(0, 64, 2)).upper()
    assert Redfish("localhost", ROOT, port=bmc.port, fingerprint=written).get("/redfish/v1/Managers").status == 200
    asked = len(bmc.passwords)
    with pytest.raises(CardError, match=f"has the fingerprint {fingerprint}, not 00") as raised:
        Redfish("localhost", ROOT, port=bmc.port, fingerprint="00" * 32).get("/redfish/v1/Managers")
    assert raised.value.kind is FaultKind.DENIED
    assert len(bmc.passwords) == asked


def test_nobody_there(ca: Authority) -> None:
    with pytest.raises(CardError, match="Connection refused") as raised:
        Redfish("127.0.0.1", ROOT, port=1, ca=ca.path).get("/redfish/v1/Managers")
    assert raised.value.kind is FaultKind.UNREACHABLE


@pytest.mark.parametrize(("mode", "told"), [("DpuMode", "DPU mode"), ("NicMode", "NIC mode"), (None, "")])
def test_what_it_knows_of_the_card(redfish: Redfish, bmc: FakeBmc, rshim: Mounted, mode: str, told: str) -> None:
    bmc.mode = mode
    card = BmcCard(redfish, FakeHost([rshim]))
    facts = card.facts()
    assert (facts.chip_family, facts.mode, facts.part_number) == ("BlueField-3", told, "900-9D3B6-00CV-AA0")
    assert facts.isolation is None, "the host cannot be looked at"
    assert not [entry for entry in bmc.seen if entry[0] != "GET"], "looking changes nothing"


def test_a_whole_flash(
    redfish: Redfish, rshim: Mounted, stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"POLL_S": 0.1, "PROBE_S": 0.1, "RETRY_S": 0.1}.items():
        monkeypatch.setattr(f"meshfusion.dpu.image.flash.{name}", seconds)
    monkeypatch.setattr("meshfusion.dpu.image.edge.bmc_card._POLL_S", 0.1)
    card = BmcCard(redfish, FakeHost([rshim]), folder=str(rshim.folder))
    journal = JournalFile(tmp_path / "journal", "card")
    around = Surroundings(drain=lambda _: "", stop=threading.Event(), told=lambda _: None)
    outcome = run_flash(Flash(deadlines=Deadlines(), drain_within_s=None), card, stream, journal, "image", around)
    journal.close()
    card.close()
    assert (outcome.end, outcome.problem) == (Phase.DONE, ""), outcome
    assert outcome.standing is not None
    assert outcome.standing.unseen == ("tmfifo", "ssh", "host ports", "NIC firmware")
    assert (rshim.state["installed"], rshim.state["erased_pool_drives"]) == (1, 0)
