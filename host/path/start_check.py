"""Is the path that is asked for by name impossible here, for a reason that stays? Then the engine is not to start.

A pool that is not there yet, or not in reach, is no such reason: its worker tries again, and says so meanwhile.
"""

from __future__ import annotations

from pathlib import Path

from meshfusion.dpu.api.types import Attachment
from meshfusion.host.path.block_layout import Runs, check_patience, check_runs, look_at_data
from meshfusion.host.path.path_kind import PathKind
from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.media.faults import DataFileError


def check_attached_path(wanted: PathKind | None, attachment: Attachment, runs: Runs) -> None:
    """``runs``: of the worker's KV memory. May wait for a drive to answer.

    Raises :class:`~meshfusion.jbof.errors.UnsupportedError`. What is asked for otherwise than by name (None) falls to
    what is possible; rdma shows only when connecting, and staged can do whatever opens.
    """
    if wanted is not PathKind.BLOCK:
        return
    for namespace in attachment.namespaces:
        _check(Path(namespace.path), runs)


def _check(path: Path, runs: Runs) -> None:
    try:
        data = look_at_data(path)
    except DataFileError:
        return
    try:
        check_runs(data, runs)
        check_patience(data)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"the block path is asked for and not possible: {error.message}", next_step=error.next_step
        ) from error
