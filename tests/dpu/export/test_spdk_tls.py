"""TLS on NVMe/TCP: what holds for a fake and for a real nvmf_tgt alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshfusion.dpu.export.desired import Address, Export, Host, Listener
from meshfusion.dpu.export.fence import Confirmed
from meshfusion.dpu.export.layout import Tenant, one_subsystem_per_tenant
from meshfusion.dpu.export.spdk.calls import plain_listeners
from meshfusion.dpu.export.spdk.start import Timeouts
from meshfusion.dpu.export.spdk.target import SpdkSettings, SpdkTarget
from meshfusion.jbof.errors import ConfigError
from tests.dpu.export.cases import PORT, PREFIX, TCP, A, chap_text, export, host_nqn, key_file, nqn_of, psk_text, tenant
from tests.dpu.export.conftest import Spdk
from tests.dpu.export.test_spdk_target import SETTINGS_SIZE, attach, hosts_of, reports

ONE, TWO = host_nqn("a-1"), host_nqn("a-2")


@pytest.fixture
def target(spdk: Spdk) -> SpdkTarget:
    timeouts = Timeouts(read_s=60.0, change_s=60.0, start_s=60.0)
    return SpdkTarget(spdk.rpc, SpdkSettings(SETTINGS_SIZE, frozenset({"tcp"}), attach, timeouts), Export(PREFIX))


class Keys:
    """Of hosts: that of DH-HMAC-CHAP and that of TLS, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def host(self, nqn: str, number: int, *, psk: int | None = None) -> Host:
        chap = key_file(self.chap(nqn), chap_text(number))
        return Host(nqn, chap, key_file(self.psk(nqn), psk_text(number if psk is None else psk)))

    def chap(self, nqn: str) -> Path:
        return self.folder / f"{nqn[-3:]}.key"

    def psk(self, nqn: str) -> Path:
        return self.folder / f"{nqn[-3:]}.psk"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def secure(*hosts: Host) -> Export:
    tenants = [Tenant("a", A.namespaces, frozenset(hosts))]
    return one_subsystem_per_tenant(PREFIX, tenants, frozenset({TCP}), is_secure=True)


def key_names(spdk: Spdk) -> dict[str, str]:
    """Of the only host, as SPDK says."""
    config = spdk.rpc.call("framework_get_config", 60.0, name="nvmf")
    (host,) = (entry["params"] for entry in config if entry["method"] == "nvmf_subsystem_add_host")
    return {name: host[name] for name in ("dhchap_key", "psk")}


def test_only_a_host_with_its_keys_reads_and_only_over_tls(spdk: Spdk, target: SpdkTarget, keys: Keys) -> None:
    assert target.desire(secure(keys.host(ONE, 1), keys.host(TWO, 2))).converged
    nqn, chap, psk = nqn_of("a"), keys.chap(ONE), keys.psk(ONE)
    assert spdk.can_read(nqn, ONE, key=chap, psk=psk)
    assert not spdk.can_read(nqn, ONE, key=chap), "without TLS"
    assert not spdk.can_read(nqn, ONE, key=chap, psk=keys.psk(TWO)), "with another host's key"
    assert not spdk.can_read(nqn, host_nqn("a-3"), key=chap, psk=psk), "as another host"
    assert not spdk.can_read(nqn, ONE, key=keys.chap(TWO), psk=psk), "TLS is not all"
    assert target.reconcile().applied == 0


def test_keys_go_with_their_host(spdk: Spdk, target: SpdkTarget, keys: Keys) -> None:
    assert target.desire(secure(keys.host(ONE, 1), keys.host(TWO, 2))).converged
    spdk.connect_host(nqn_of("a"), ONE, key=keys.chap(ONE), psk=keys.psk(ONE))
    assert target.fence(ONE) == Confirmed()
    assert hosts_of(spdk, "a") == {TWO}
    assert not spdk.can_read(nqn_of("a"), ONE, key=keys.chap(ONE), psk=keys.psk(ONE))
    names = {entry["name"] for entry in spdk.rpc.call("keyring_get_keys", 60.0) if not entry["removed"]}
    assert names == set(key_names(spdk).values())


def test_a_new_key_leaves_tls_as_it_is(spdk: Spdk, target: SpdkTarget, keys: Keys) -> None:
    target.desire(secure(keys.host(ONE, 1)))
    spdk.connect_host(nqn_of("a"), ONE, key=keys.chap(ONE), psk=keys.psk(ONE))
    before = key_names(spdk)
    assert target.desire(secure(keys.host(ONE, 3, psk=1))).applied == 1
    there = key_names(spdk)
    assert there["psk"] == before["psk"]
    assert there["dhchap_key"] != before["dhchap_key"]
    assert spdk.can_read(nqn_of("a"), ONE, key=keys.chap(ONE), psk=keys.psk(ONE))


def test_going_over_to_tls_makes_the_subsystem_anew_and_back(spdk: Spdk, target: SpdkTarget, keys: Keys) -> None:
    assert target.desire(export(A)).converged
    assert spdk.can_read(nqn_of("a"), ONE)
    assert target.desire(secure(keys.host(ONE, 1))).converged
    assert not spdk.can_read(nqn_of("a"), ONE)
    assert spdk.can_read(nqn_of("a"), ONE, key=keys.chap(ONE), psk=keys.psk(ONE))
    assert target.desire(export(A)).converged
    assert spdk.can_read(nqn_of("a"), ONE)


def test_a_port_that_somebody_has_without_tls_is_not_taken_for_secure(
    spdk: Spdk, target: SpdkTarget, keys: Keys
) -> None:
    """SPDK says that all is well, and lets hosts in without TLS."""
    other = "nqn.2026-11.io.example:other"
    target.desire(Export(PREFIX))
    create = {"serial_number": "1", "model_number": "x", "ana_reporting": True, "max_namespaces": 2}
    spdk.rpc.call("nvmf_create_subsystem", 60.0, nqn=other, allow_any_host=False, **create)
    address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(PORT)}
    listening = {"listen_address": address, "ana_state": "optimized"}
    spdk.rpc.call("nvmf_subsystem_add_listener", 60.0, nqn=other, **listening)
    report = target.desire(secure(keys.host(ONE, 1)))
    assert not report.converged
    assert f"port {PORT} of 127.0.0.1 is not for TLS: {other} listens there without it" in report.reasons[0]
    assert reports(spdk)[nqn_of("a")]["listen_addresses"] == []
    spdk.rpc.call("nvmf_subsystem_remove_listener", 60.0, nqn=other, listen_address=address)
    assert target.reconcile().converged
    assert not spdk.can_read(nqn_of("a"), ONE, key=keys.chap(ONE))


# ---- what is desired -------------------------------------------------------------------------------------------------


def test_tls_is_for_tcp_and_for_hosts_that_have_a_key(keys: Keys) -> None:
    (right,) = secure(keys.host(ONE, 1)).subsystems
    with pytest.raises(ConfigError, match="TLS is for listeners of TCP"):
        replace(right, listeners=frozenset({Listener(Address("rdma", "10.0.0.1"))}))
    with pytest.raises(ConfigError, match=f"{ONE} has no key of TLS"):
        secure(Host(ONE))
    with pytest.raises(ConfigError, match=f"{ONE} has a key of TLS"):
        export(Tenant("a", A.namespaces, frozenset({keys.host(ONE, 1)})))
    (plain,) = export(tenant("a", "a0", "")).subsystems
    assert plain.serial != right.serial, "by which it is seen that TLS has come or gone"


def test_plain_listeners_are_those_at_the_address() -> None:
    def listener(nqn: str, port: str, **more: object) -> dict[str, object]:
        address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port}
        return {"method": "nvmf_subsystem_add_listener", "params": {"nqn": nqn, "listen_address": address, **more}}

    config = [
        {"method": "nvmf_create_transport", "params": {"trtype": "TCP"}},
        listener("plain", str(PORT), secure_channel=False),
        listener("silent", str(PORT)),
        listener("secure", str(PORT), secure_channel=True),
        listener("elsewhere", "1", secure_channel=False),
    ]
    assert plain_listeners(config, TCP.address) == ("plain", "silent")
