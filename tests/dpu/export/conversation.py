"""What is said to nvmf_tgt to learn how it answers, and a way to write its answers down:

    python -m tests.dpu.export.conversation SOCKET recordings/FILE.json

with a fresh ``nvmf_tgt --no-huge -s 512 -m 0x1 --no-pci --wait-for-rpc`` at the socket.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.spdk.client import SpdkClient
from meshfusion.dpu.export.spdk.rpc import SpdkRpc
from tests.dpu.export.cases import chap_text, key_file, psk_text

S1, NONE = "nqn.2026-11.io.meshfusion:rec:s1", "nqn.2026-11.io.meshfusion:rec:none"
A, B, K = (f"nqn.2026-11.io.meshfusion:rec:host-{name}" for name in "abk")
ADDRESS = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "4431"}
ELSEWHERE = {**ADDRESS, "trsvcid": "4439"}
NS = {"nsid": 1, "bdev_name": "m0", "uuid": "0a0b0c0d-0000-4000-8000-000000000001", "nguid": "ab" * 16, "anagrpid": 1}
SECURE, TLS = {**ADDRESS, "trsvcid": "4433"}, {"secure_channel": True}
CHAP_FILE, PSK_FILE = "chap", "psk"  # in place of their paths
CREATE = {
    "nqn": S1,
    "serial_number": "MF01",
    "model_number": "MeshFusion",
    "allow_any_host": False,
    "ana_reporting": True,
    "max_namespaces": 3,
}

CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nvmf_get_subsystems", {}),
    ("no_such_method", {}),
    ("iobuf_set_options", {"small_pool_count": 4096, "large_pool_count": 512, "large_bufsize": 135168}),
    ("framework_start_init", {}),
    ("framework_wait_init", {}),
    ("iobuf_set_options", {"small_pool_count": 4096}),
    ("framework_start_init", {}),
    ("nvmf_get_subsystems", {}),
    ("nvmf_get_transports", {}),
    ("nvmf_create_transport", {"trtype": "TCP", "max_io_size": 1000000}),
    ("nvmf_create_transport", {"trtype": "TCP", "max_io_size": 1048576, "max_queue_depth": 128}),
    ("nvmf_create_transport", {"trtype": "TCP"}),
    ("bdev_malloc_create", {"name": "m0", "num_blocks": 2048, "block_size": 4096}),
    ("bdev_malloc_create", {"name": "m1", "num_blocks": 2048, "block_size": 4096}),
    ("bdev_malloc_create", {"name": "m1", "num_blocks": 2048, "block_size": 4096}),
    ("nvmf_subsystem_get_qpairs", {"nqn": NONE}),
    ("nvmf_subsystem_get_listeners", {"nqn": NONE}),
    ("nvmf_delete_subsystem", {"nqn": NONE}),
    ("nvmf_create_subsystem", CREATE),
    ("nvmf_create_subsystem", CREATE),
    ("nvmf_subsystem_add_ns", {"nqn": S1, "namespace": NS}),
    ("nvmf_subsystem_add_ns", {"nqn": S1, "namespace": {**NS, "bdev_name": "m1"}}),
    ("nvmf_subsystem_add_ns", {"nqn": S1, "namespace": {**NS, "nsid": 2}}),
    ("nvmf_subsystem_add_ns", {"nqn": S1, "namespace": {**NS, "nsid": 2, "bdev_name": "none"}}),
    ("nvmf_subsystem_add_ns", {"nqn": S1, "namespace": {**NS, "nsid": 4, "bdev_name": "m1"}}),
    ("nvmf_subsystem_add_host", {"nqn": S1, "host": A}),
    ("nvmf_subsystem_add_host", {"nqn": S1, "host": A}),
    ("nvmf_subsystem_add_host", {"nqn": S1, "host": B}),
    ("nvmf_subsystem_add_host", {"nqn": S1, "host": K, "dhchap_key": "none"}),
    ("keyring_file_add_key", {"name": "k", "path": "not/absolute"}),
    ("keyring_file_remove_key", {"name": "k"}),
    ("keyring_file_add_key", {"name": "k1", "path": CHAP_FILE}),
    ("keyring_file_add_key", {"name": "k1", "path": CHAP_FILE}),
    ("keyring_file_add_key", {"name": "k2", "path": CHAP_FILE}),
    ("keyring_file_add_key", {"name": "p", "path": PSK_FILE}),
    ("nvmf_subsystem_set_keys", {"nqn": S1, "host": K, "dhchap_key": "k1"}),
    ("nvmf_subsystem_set_keys", {"nqn": S1, "host": A, "dhchap_key": "none"}),
    ("nvmf_subsystem_set_keys", {"nqn": S1, "host": A, "dhchap_key": "k1"}),
    ("nvmf_subsystem_set_keys", {"nqn": S1, "host": A, "dhchap_key": "k2"}),
    ("keyring_file_remove_key", {"name": "k1"}),
    ("nvmf_subsystem_add_host", {"nqn": S1, "host": K, "psk": "none"}),
    ("nvmf_subsystem_add_host", {"nqn": S1, "host": K, "dhchap_key": "k2", "psk": "p"}),
    ("nvmf_subsystem_add_listener", {"nqn": S1, "listen_address": SECURE, "ana_state": "optimized", **TLS}),
    ("framework_get_config", {"name": "nvmf"}),
    ("nvmf_subsystem_remove_listener", {"nqn": S1, "listen_address": SECURE}),
    ("nvmf_subsystem_remove_host", {"nqn": S1, "host": K}),
    ("nvmf_subsystem_add_listener", {"nqn": S1, "listen_address": ADDRESS, "ana_state": "inaccessible"}),
    ("nvmf_subsystem_add_listener", {"nqn": S1, "listen_address": ADDRESS, "ana_state": "inaccessible"}),
    ("nvmf_subsystem_get_listeners", {"nqn": S1}),
    ("nvmf_subsystem_listener_set_ana_state", {"nqn": S1, "listen_address": ADDRESS, "ana_state": "non_optimized"}),
    ("nvmf_subsystem_listener_set_ana_state", {"nqn": S1, "listen_address": ELSEWHERE, "ana_state": "optimized"}),
    ("nvmf_subsystem_get_listeners", {"nqn": S1}),
    ("nvmf_get_subsystems", {}),
    ("nvmf_subsystem_get_qpairs", {"nqn": S1}),
    ("nvmf_subsystem_allow_any_host", {"nqn": S1, "allow_any_host": True}),
    ("nvmf_subsystem_allow_any_host", {"nqn": S1, "allow_any_host": False}),
    ("nvmf_subsystem_remove_host", {"nqn": S1, "host": A}),
    ("nvmf_subsystem_remove_host", {"nqn": S1, "host": A}),
    ("nvmf_subsystem_remove_listener", {"nqn": S1, "listen_address": ELSEWHERE}),
    ("nvmf_subsystem_remove_listener", {"nqn": S1, "listen_address": ADDRESS}),
    ("nvmf_subsystem_remove_ns", {"nqn": S1, "nsid": 3}),
    ("nvmf_subsystem_remove_ns", {"nqn": S1, "nsid": 1}),
    ("nvmf_get_subsystems", {}),
    ("nvmf_delete_subsystem", {"nqn": S1}),
    ("nvmf_delete_subsystem", {"nqn": S1}),
)


def hold(rpc: SpdkRpc, folder: Path) -> list[dict[str, Any]]:
    """Every answer: ``result``, or ``code``; SPDK's error texts are no interface. ``folder``: for files of keys."""
    key_file(folder / CHAP_FILE, chap_text(1))
    key_file(folder / PSK_FILE, psk_text(1))
    answers: list[dict[str, Any]] = []
    for method, asked in CALLS:
        is_file = asked.get("path") in (CHAP_FILE, PSK_FILE)
        parameters = {**asked, "path": str(folder / asked["path"])} if is_file else asked
        try:
            answers.append({"method": method, "result": _used(method, rpc.call(method, 60.0, **parameters))})
        except StepRefusedError as error:
            answers.append({"method": method, "code": error.code})
    return answers


def _used(method: str, result: Any) -> Any:
    """Of the configuration, what is read of it: the rest is SPDK's affair."""
    if method != "framework_get_config":
        return result
    names = {
        "nvmf_subsystem_add_host": ("nqn", "host", "dhchap_key", "psk"),
        "nvmf_subsystem_add_listener": ("nqn", "listen_address", "secure_channel"),
    }
    return [
        {
            "method": entry["method"],
            "params": {name: entry["params"][name] for name in names[entry["method"]] if name in entry["params"]},
        }
        for entry in result
        if entry["method"] in names
    ]


if __name__ == "__main__":
    client = SpdkClient(Path(sys.argv[1]))
    client.connect(60.0)
    record = {
        "spdk": client.call("spdk_get_version", 60.0)["version"],
        "answers": hold(client, Path(tempfile.mkdtemp())),
    }
    lines = ",\n".join(json.dumps(answer, sort_keys=True) for answer in record["answers"])
    Path(sys.argv[2]).write_text(f'{{"spdk": {json.dumps(record["spdk"])}, "answers": [\n{lines}\n]}}\n')
