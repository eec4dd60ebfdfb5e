"""The errors a user can meet. Each names what is wrong and what to do next.

Assertions are for our own mistakes; these are for the world's.
"""

from __future__ import annotations


class MeshFusionError(Exception):
    """Something the user or the machine must change.

    ``next_step`` is one sentence that tells the reader what to do about it.
    """

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{super().__str__()}\n  next step: {self.next_step}"

    @property
    def message(self) -> str:
        """The message without the next step."""
        return str(self.args[0])


class MediaError(MeshFusionError):
    """The medium did not do what was asked: I/O error, short transfer, no space, read-only."""


class FormatError(MeshFusionError):
    """Bytes on the medium are not what this version writes: foreign, damaged or another version."""


class PoolBusyError(MeshFusionError):
    """Another process owns the pool (rule 2: one owner per drive)."""


class ConfigError(MeshFusionError):
    """A configuration value cannot be used. The message names field, value and fix."""


class FieldValueError(ValueError):
    """For validators of one field: what is wrong with its value, and what to write instead.

    ``field``: the field inside the validated mapping that is to blame, with a dot before each level below.
    ``subject``: what a message without a field's name begins with.
    """

    def __init__(self, problem: str, fix: str, *, field: str = "", subject: str = "") -> None:
        super().__init__(f"{subject} {problem}; {fix}".strip())
        self.problem = problem
        self.fix = fix
        self.field = field


class UnsupportedError(MeshFusionError):
    """Refusal to start (rule 6): something is not known to be right. The message names it."""


class ServiceError(MeshFusionError):
    """The chunk service refused a request or could not be reached."""


class ServiceUnavailableError(ServiceError):
    """The service cannot be reached or did not answer before the deadline."""


class ServiceDrainingError(ServiceUnavailableError):
    """The service is about to stop and takes nothing new. To be tried again when its next life answers."""


class StaleHolderError(ServiceError):
    """The holder or its epoch is no longer known to the service: attach again."""


class UnauthenticatedError(ServiceError):
    """The service does not know who calls: no certificate or token that it accepts."""


class PermissionDeniedError(ServiceError):
    """The service knows who calls, and that caller may not do this."""
