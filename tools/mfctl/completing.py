"""What a shell offers to complete: names of contexts and of their services."""

from __future__ import annotations

import os

import click

from meshfusion.tools.mfctl.context_types import Contexts


def context_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Nothing where the file cannot be read: a shell that completes shows no errors."""
    return [name for name in _contexts().by_name if name.startswith(incomplete)]


def service_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Of the context that is named on the line, or the current one."""
    contexts = _contexts()
    chosen = contexts.by_name.get(context.find_root().params.get("context_name") or contexts.current)
    names = [member.name for member in chosen.members] if chosen is not None and chosen.is_cluster else []
    return [name for name in names if name.startswith(incomplete)]


def _contexts() -> Contexts:
    from meshfusion.jbof.errors import MeshFusionError
    from meshfusion.tools.mfctl.context_file import contexts_path, read_contexts

    try:
        return read_contexts(contexts_path(os.environ))
    except (MeshFusionError, OSError):
        return Contexts()
