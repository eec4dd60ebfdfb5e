"""Runs in the guest, as ``python guest_auth.py CASE``: DH-HMAC-CHAP between our initiator and the kernel's target.

Prints what it saw as one JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from meshfusion.jbof.nvme.auth import NvmeAuthenticationError
from meshfusion.jbof.nvme.auth_keys import AuthHash, Secret, format_secret, new_secret
from meshfusion.jbof.nvme.controller_effects import ConnectionLost, ControllerState, RetryScheduled
from meshfusion.tools.lab.guest_setup.nvmet import NVMET
from tests.lab.guest_initiator import HOST_NQN, LBA_BYTES, MIB, NQN, RNG, exported, join, take_down, told, until

HOST_FOLDER = NVMET / "hosts" / HOST_NQN
PORT_LINK = NVMET / "ports" / "1" / "subsystems" / NQN
KEY, OTHER_KEY, CONTROLLER_KEY = (new_secret() for _ in range(3))


def set_keys(host_key: Secret, controller_key: Secret | None = None, hash_name: str = "sha256") -> None:
    """They hold for connections that are made from now on. A controller key stays: Linux does not take it away."""
    HOST_FOLDER.joinpath("dhchap_key").write_text(format_secret(host_key))
    if controller_key is not None:
        HOST_FOLDER.joinpath("dhchap_ctrl_key").write_text(format_secret(controller_key))
    HOST_FOLDER.joinpath("dhchap_hash").write_text(f"hmac({hash_name})")
    HOST_FOLDER.joinpath("dhchap_dhgroup").write_text("null")


@contextmanager
def guarded(host_key: Secret, controller_key: Secret | None = None) -> Iterator[str]:
    """A target for this host alone, with keys; its address."""
    with exported(hosts=(HOST_NQN,)) as address:
        set_keys(host_key, controller_key)
        yield address


def move_data(address: str, **settings: Any) -> dict[str, object]:
    """As many transfers at a time as use all queues: the target refuses commands on one that is not authenticated."""
    began = time.monotonic()
    initiator, _ = join(address, **settings)
    connect_s = time.monotonic() - began
    info = initiator.info
    assert info is not None
    data = RNG.integers(0, 256, MIB, dtype=np.uint8)
    source, sink = data.copy(), np.zeros_like(data)
    written, read = initiator.register(source), initiator.register(sink)
    size = MIB // 32
    starts = range(0, MIB, size)
    for transfer in [initiator.begin_write(1, at // LBA_BYTES, [written.part(at, size)]) for at in starts]:
        transfer.wait()
    for transfer in [initiator.begin_read(1, at // LBA_BYTES, [read.part(at, size)]) for at in starts]:
        transfer.wait()
    initiator.close()
    return {
        "same": bool((sink == data).all()),
        "queues": info.io_queue_count,
        "authentication": info.authentication.value,
        "connect_s": round(connect_s, 3),
    }


def right_keys() -> dict[str, object]:
    """Every hash of the exchange with every transform of the key, one way and both ways."""
    rows = []
    with guarded(KEY) as address:
        for hash_ in AuthHash:
            for transform in (None, *AuthHash):
                length_bytes = (transform or hash_).digest_bytes
                key, controller_key = (new_secret(length_bytes, transform) for _ in range(2))
                set_keys(key, controller_key, hash_.name.lower())
                rows.append(move_data(address, host_key=key))
                rows.append(move_data(address, host_key=key, controller_key=controller_key))
    return {"rows": rows, "left": take_down()}


def refusals() -> dict[str, object]:
    """What either side may not accept."""
    with guarded(KEY) as address:
        said = {"no controller key": told(lambda: join(address, host_key=KEY, controller_key=CONTROLLER_KEY))}
        set_keys(KEY, CONTROLLER_KEY)
        said |= {
            "no key": told(lambda: join(address)),
            "wrong key": told(lambda: join(address, host_key=OTHER_KEY)),
            "wrong controller key": told(lambda: join(address, host_key=KEY, controller_key=OTHER_KEY)),
            "right after all": told(lambda: join(address, host_key=KEY, controller_key=CONTROLLER_KEY)[0].close()),
        }
        HOST_FOLDER.joinpath("dhchap_dhgroup").write_text("ffdhe2048")
        said["group"] = told(lambda: join(address, host_key=KEY))
    return {"said": said, "left": take_down()}


def idle_key() -> dict[str, object]:
    """The target knows no key: with one of ours it connects and says so once; it cannot prove itself."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshfusion").addHandler(handler)
    logging.getLogger("meshfusion").setLevel(logging.INFO)
    with exported(hosts=(HOST_NQN,)) as address:
        moved = move_data(address, host_key=KEY)
        refused = told(lambda: join(address, host_key=KEY, controller_key=CONTROLLER_KEY))
    return {"moved": moved, "lines": lines, "refused": refused, "left": take_down()}


def reconnection() -> dict[str, object]:
    """After a loss it authenticates again; while the target has another key it waits longer and longer."""
    with guarded(KEY, CONTROLLER_KEY) as address:
        initiator, events = join(
            address, host_key=KEY, controller_key=CONTROLLER_KEY, backoff_first_s=0.2, backoff_max_s=2.0
        )
        region = initiator.register(np.ones(MIB, np.uint8))
        initiator.write(1, 0, [region.all()])
        PORT_LINK.unlink()
        until(lambda: any(isinstance(event, ConnectionLost) for event in events))
        set_keys(OTHER_KEY, CONTROLLER_KEY)
        PORT_LINK.symlink_to(NVMET / "subsystems" / NQN)
        time.sleep(3.0)
        kinds = [type(event.error).__name__ for event in events if isinstance(event, RetryScheduled)]
        set_keys(KEY, CONTROLLER_KEY)
        back_s = until(lambda: initiator.state is ControllerState.LIVE)
        initiator.write(1, 0, [region.all()])
        initiator.close()
    return {
        "refused": kinds.count(NvmeAuthenticationError.__name__),
        "retries": len(kinds),
        "back_s": round(back_s, 2),
        "left": take_down(),
    }


def new_key() -> dict[str, object]:
    """The target asks for another key while a connection lives: that stays, the former key opens nothing any more, and
    the host comes back with the new one as soon as it has it."""
    with guarded(KEY) as address:
        initiator, events = join(address, host_key=KEY, backoff_first_s=0.2, backoff_max_s=60.0, loss_timeout_s=600.0)
        region = initiator.register(np.ones(MIB, np.uint8))
        initiator.write(1, 0, [region.all()])
        set_keys(OTHER_KEY)
        for _ in range(5):
            time.sleep(0.2)
            initiator.write(1, 0, [region.all()])
        said = {
            "former key": told(lambda: join(address, host_key=KEY)),
            "new key": told(lambda: join(address, host_key=OTHER_KEY)[0].close()),
        }
        lost = sum(isinstance(event, ConnectionLost) for event in events)
        PORT_LINK.unlink()
        until(lambda: any(isinstance(event, ConnectionLost) for event in events))
        PORT_LINK.symlink_to(NVMET / "subsystems" / NQN)
        until(lambda: any(is_refusal(event) for event in events))
        time.sleep(2.0)
        refused_state = initiator.state.value
        initiator.use_key(OTHER_KEY)
        back_s = until(lambda: initiator.state is ControllerState.LIVE)
        initiator.write(1, 0, [region.all()])
        initiator.close()
    return {"lost": lost, "said": said, "refused_state": refused_state, "back_s": round(back_s, 2), "left": take_down()}


def is_refusal(event: object) -> bool:
    return isinstance(event, RetryScheduled) and isinstance(event.error, NvmeAuthenticationError)


CASES = (right_keys, refusals, idle_key, reconnection, new_key)

if __name__ == "__main__":
    print(json.dumps({case.__name__: case for case in CASES}[sys.argv[1]]()))
