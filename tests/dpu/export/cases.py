"""Exports that the tests use: tenants a and b, each with two namespaces and some worker incarnations."""

from __future__ import annotations

import base64
import uuid
import zlib
from pathlib import Path

from meshfusion.dpu.export.desired import Address, AnaState, Export, Host, HostKey, Listener, Namespace
from meshfusion.dpu.export.layout import Tenant, one_subsystem_per_tenant
from meshfusion.jbof.nvme.auth_keys import key_id

PREFIX = "nqn.2026-11.io.meshfusion:test"
PORT = 4427
TCP = Listener(Address("tcp", "127.0.0.1", PORT))
HIDDEN = Listener(TCP.address, AnaState.INACCESSIBLE)


def namespace(nsid: int, backing: str) -> Namespace:
    identity = uuid.uuid5(uuid.NAMESPACE_URL, backing)
    return Namespace(nsid, identity, identity.hex, backing)


def host_nqn(name: str) -> str:
    return f"nqn.2026-11.io.meshfusion:host:{name}"


def tenant(name: str, backings: str, hosts: str) -> Tenant:
    """``tenant("a", "a0 a1", "a-1 a-2")``"""
    return Tenant(
        name,
        frozenset(namespace(nsid, backing) for nsid, backing in enumerate(backings.split(), start=1)),
        frozenset(Host(host_nqn(host)) for host in hosts.split()),
    )


def chap_text(number: int) -> str:
    """A key of DH-HMAC-CHAP as files have it (NVMe Base Specification 2.0, 8.13.5.8): 32 bytes and their CRC-32."""
    secret = bytes([number]) * 32
    return f"DHHC-1:00:{base64.b64encode(secret + zlib.crc32(secret).to_bytes(4, 'little')).decode()}:"


def psk_text(number: int) -> str:
    """A key of TLS as files have it (NVMe/TCP Transport Specification 1.0, 3.6.1.5): 32 bytes and their CRC-32."""
    secret = bytes([number]) * 32
    return f"NVMeTLSkey-1:01:{base64.b64encode(secret + zlib.crc32(secret).to_bytes(4, 'little')).decode()}:"


def key_file(path: Path, text: str) -> HostKey:
    path.touch(mode=0o600)
    path.write_text(text)
    return HostKey(path, key_id(text))


def export(*tenants: Tenant, listener: Listener = TCP, fenced: str = "") -> Export:
    hosts = frozenset(host_nqn(host) for host in fenced.split())
    return one_subsystem_per_tenant(PREFIX, tenants, frozenset({listener}), hosts)


def nqn_of(name: str) -> str:
    """The NQN of a tenant's subsystem."""
    (subsystem,) = export(tenant(name, "x", "")).subsystems
    return subsystem.nqn


BACKINGS = ("a0", "a1", "b0", "b1")
A = tenant("a", "a0 a1", "a-1 a-2")
B = tenant("b", "b0 b1", "b-1")
