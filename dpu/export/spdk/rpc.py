"""What is asked of an SPDK process, without the ``spdk`` package, which only those who have an SPDK install."""

from __future__ import annotations

from typing import Any, Protocol


class SpdkRpc(Protocol):
    """An SPDK process, and after a connection was lost perhaps another."""

    def connect(self, timeout_s: float, /) -> int:
        """The number of the connection, a new one if there was none. Raises ``TargetUnreachableError``."""

    def call(self, method: str, timeout_s: float, /, **params: object) -> Any:
        """The result. ``StepRefusedError`` for an error response; ``TargetUnreachableError`` when there is no answer
        that can be trusted, after which it is unknown whether the method ran, and there is no connection.
        """

    def close(self) -> None: ...
