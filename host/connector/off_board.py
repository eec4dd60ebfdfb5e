"""An engine that serves without its cache says so in the run directory. What is wrong there costs the note alone."""

from __future__ import annotations

import logging
import os
import time

from meshfusion.host.connector.off_note import OffNote, WhyOff, encode_note, note_name
from meshfusion.host.path.flexpath.run_dir import make_run_dir, replace_file, run_dir
from meshfusion.jbof.errors import MeshFusionError

logger = logging.getLogger("meshfusion.scheduler")


def show_off(why: WhyOff, error: MeshFusionError) -> None:
    """Of this process, until :func:`unshow_off`. Raises nothing."""
    note = OffNote(os.getpid(), time.time(), why, error.message, error.next_step)
    try:
        folder = run_dir(os.environ, os.getuid())
        make_run_dir(folder, os.getuid())
        replace_file(folder / note_name(note.pid), encode_note(note))
    except (OSError, MeshFusionError) as trouble:
        logger.warning("`mfctl doctor` does not see that this engine runs without its cache: %s", trouble)


def unshow_off() -> None:
    """The engine ends in order, or was one of this number that left its note. Raises nothing."""
    try:
        (run_dir(os.environ, os.getuid()) / note_name(os.getpid())).unlink(missing_ok=True)
    except OSError as trouble:
        logger.warning("a note that an engine ran without its cache stays behind: %s", trouble)
