"""The SPDK client's stand-in, with the faults that a connection can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshfusion.dpu.export.errors import StepRefusedError, TargetUnreachableError
from tests.dpu.export.fake_spdk import FakeSpdk
from tests.dpu.export.fake_subsystem import Fault


class FakeRpc:
    """``interfere`` is asked about every call: "" lets it through, "refuse" makes SPDK refuse,
    "lose request" and "lose answer" break the connection before and after it was done, "restart" does so with SPDK.
    ``process`` is None while SPDK does not run.
    """

    def __init__(self) -> None:
        self.process: FakeSpdk | None = FakeSpdk()
        self.connections = 0
        self.interfere: Callable[[str], str] = lambda _method: ""
        self.watch: Callable[[], None] = lambda: None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._connected: FakeSpdk | None = None

    def connect(self, timeout_s: float, /) -> int:
        assert timeout_s > 0
        if self._connected is None:
            if self.process is None:
                raise unreachable()
            self._connected = self.process
            self.connections += 1
        return self.connections

    def call(self, method: str, timeout_s: float, /, **parameters: Any) -> Any:
        assert timeout_s > 0
        if self.process is None or self._connected is not self.process:  # as after a write to a closed socket
            self.close()
            raise unreachable()
        return self._carry(method, parameters, self.interfere(method))

    def _carry(self, method: str, parameters: dict[str, Any], fault: str) -> Any:
        if fault == "refuse":
            raise StepRefusedError(f"refused {method}", code=-32603, next_step="none")
        if fault in ("lose request", "restart"):
            self.close()
            if fault == "restart":
                self.process = FakeSpdk()
            raise unreachable()
        assert self.process is not None
        try:
            self.calls.append((method, parameters))
            result = self.process.call(method, parameters)
        except Fault as error:
            raise StepRefusedError(f"refused {method}: {error.message}", code=error.code, next_step="") from error
        except TimeoutError:
            self.close()
            raise unreachable() from None
        finally:
            self.watch()
        if fault == "lose answer":
            self.close()
            raise unreachable()
        return result

    def close(self) -> None:
        self._connected = None


def unreachable() -> TargetUnreachableError:
    return TargetUnreachableError("SPDK did not answer", next_step="wait")
