"""What is said to nvmf_tgt to learn how it answers, and a way to write its answers down:

    python -m tests.dpu.export.conversation SOCKET recordings/FILE.json

with a fresh ``nvmf_tgt --no-huge -s 512 -m 0x1 --no-pci --wait-for-rpc`` at the socket.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from meshfusion.dpu.export.errors import StepRefusedError
from meshfusion.dpu.export.spdk.client import SpdkClient
from meshfusion.dpu.export.spdk.rpc import SpdkRpc

S1, NONE = "nqn.2026-11.io.meshfusion:rec:s1", "nqn.2026-11.io.meshfusion:rec:none"
A, B, K = (f"nqn.2026-11.io.meshfusion:rec:host-{name}" for name in "abk")
ADDRESS = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "4431"}
ELSEWHERE = {**ADDRESS, "trsvcid": "4439"}
NS = {"nsid": 1, "bdev_name": "m0", "uuid": "0a0b0c0d-0000-4000-8000-000000000001", "nguid": "ab" * 16, "anagrpid": 1}
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


def hold(rpc: SpdkRpc) -> list[dict[str, Any]]:
    """Every answer: ``result``, or ``code``; SPDK's error texts are no interface."""
    answers: list[dict[str, Any]] = []
    for method, parameters in CALLS:
        try:
            answers.append({"method": method, "result": rpc.call(method, 60.0, **parameters)})
        except StepRefusedError as error:
            answers.append({"method": method, "code": error.code})
    return answers


if __name__ == "__main__":
    client = SpdkClient(Path(sys.argv[1]))
    client.connect(60.0)
    record = {"spdk": client.call("spdk_get_version", 60.0)["version"], "answers": hold(client)}
    lines = ",\n".join(json.dumps(answer, sort_keys=True) for answer in record["answers"])
    Path(sys.argv[2]).write_text(f'{{"spdk": {json.dumps(record["spdk"])}, "answers": [\n{lines}\n]}}\n')
