"""What the host of a card loses with it, from what Linux prints."""

from __future__ import annotations

import pytest

from meshfusion.dpu.image.edge.host_facts import SCRIPT, parse_facts
from meshfusion.dpu.image.edge.shell import LocalShell
from meshfusion.dpu.image.host_network import NetworkPort, isolation
from tests.dpu.image.fake_host import facts

CARD = "0000:83:00"


def test_a_host_is_read() -> None:
    host = parse_facts(facts(up_for_s=3))
    assert host.psid_of(CARD) == "MT_0000000884"
    assert host.firmware_of(CARD) == "32.41.1000"
    assert host.unbound_ports(CARD) == ("0000:83:00.0", "0000:83:00.1")
    assert parse_facts(facts(up_for_s=9)).unbound_ports(CARD) == ()
    assert host.unbound_ports("0000:99:00") == ("0000:99:00",), "none of its ports are there"
    assert (host.unbound_ports(""), host.psid_of("")) == (None, "")
    assert "tmfifo_net0" in host.carriers
    assert "192.168.100.1" in host.addresses


def test_a_bond_of_the_cards_ports_goes_with_it() -> None:
    lost = isolation(parse_facts(facts(up_for_s=9, default="bond0")).ports, CARD)
    assert (lost.default_routes, lost.is_total, lost.is_harmful) == (("bond0",), True, True)
    assert not isolation(parse_facts(facts(up_for_s=9, default="eno1")).ports, CARD).is_harmful


@pytest.mark.parametrize(("address", "operators"), [("10.9.0.5", ("bond0",)), ("10.0.0.5", ()), ("::1", ())])
def test_a_session_over_the_card_is_told(address: str, operators: tuple[str, ...]) -> None:
    host = parse_facts(facts(up_for_s=9, session=f"10.9.0.77 51000 {address} 22"))
    assert isolation(host.ports, CARD).operators == operators
    here = parse_facts(facts(up_for_s=9), session=f"10.9.0.77 51000 {address} 22")
    assert isolation(here.ports, CARD).operators == operators


ON_CARD = NetworkPort("p0", f"{CARD}.0")
ELSEWHERE = NetworkPort("eno1", "0000:00:1f.6")


@pytest.mark.parametrize(
    ("ports", "is_total"),
    [
        ((NetworkPort("p0", f"{CARD}.0", has_default_route=True), ELSEWHERE), True),
        ((NetworkPort("p0", f"{CARD}.0", has_default_route=True),
          NetworkPort("eno1", "0000:00:1f.6", has_default_route=True)), False),
        ((ON_CARD, ELSEWHERE,
          NetworkPort("bond0", is_virtual=True, lower=("p0", "eno1"), has_default_route=True)), False),
        ((ON_CARD, NetworkPort("vlan", is_virtual=True, lower=("p0",), has_default_route=True)), True),
        ((NetworkPort("p0", f"{CARD}.0", has_default_route=True),
          NetworkPort("tun0", is_virtual=True, has_default_route=True)), True),
        ((ON_CARD, ELSEWHERE), False),
        ((NetworkPort("a", is_virtual=True, lower=("b",), has_default_route=True),
          NetworkPort("b", is_virtual=True, lower=("a",))), False),
    ],
)  # fmt: skip
def test_ways_out_that_are_left(ports: tuple[NetworkPort, ...], is_total: bool) -> None:
    assert isolation(ports, CARD).is_total is is_total


def test_the_script_runs_here_and_tells_of_this_machine() -> None:
    host = parse_facts(LocalShell().run(SCRIPT, about="facts").decode())
    assert "lo" in {port.name for port in host.ports}
