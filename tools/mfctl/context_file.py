"""The file of contexts: where it is, who may have written it, how it is read and changed."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from meshfusion.jbof.errors import ConfigError
from meshfusion.tools.mfctl.context_types import Access, Contexts, ServiceContext

VARIABLE: Final = "MFCTL_CONFIG"
_HEAD: Final = "# Contexts of mfctl. `mfctl context` writes this file anew: comments are not kept.\n"


def contexts_path(environment: Mapping[str, str]) -> Path:
    """``$MFCTL_CONFIG``, or as the XDG base directories have it: ``$XDG_CONFIG_HOME/mfctl/contexts.yaml``.

    Raises ConfigError of a variable that is no absolute path, and where there is no home.
    """
    named = environment.get(VARIABLE)
    if named:
        if not named.startswith("/"):
            raise ConfigError(f"{VARIABLE} = {named!r} is not an absolute path", next_step="Write the whole path.")
        return Path(named)
    # What is not absolute there is to be ignored, says the specification.
    base = environment.get("XDG_CONFIG_HOME", "")
    if base.startswith("/"):
        return Path(base) / "mfctl" / "contexts.yaml"
    home = environment.get("HOME", "")
    if not home.startswith("/"):
        raise ConfigError(
            "where contexts are kept is not known: neither HOME nor XDG_CONFIG_HOME is set",
            next_step=f"Set {VARIABLE} to the file's path.",
        )
    return Path(home) / ".config" / "mfctl" / "contexts.yaml"


def read_contexts(path: Path) -> Contexts:
    """Empty where there is no file. Raises ConfigError of one that others may change, or that is wrong anywhere."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", next_step=f"Check its permissions, or set {VARIABLE}.") from None
    _refuse_of_others(path, found)
    from meshfusion.dpu.config import read_config_file
    from meshfusion.tools.mfctl.context_model import contexts_of

    return contexts_of(read_config_file(path), str(path))


def _refuse_of_others(path: Path, found: os.stat_result) -> None:
    """Whoever writes it decides to whom this user's tokens are shown."""
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path}: belongs to another user (uid {found.st_uid}), who could have your token shown to another service",
            next_step=f"Take a file of your own: set {VARIABLE}, or chown it.",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"{path}: has mode {mode:04o}: others can change it, and have your token shown to another service",
            next_step=f"chmod go-w {path}",
        )


def change_contexts(path: Path, change: Callable[[Contexts], Contexts]) -> Contexts:
    """Reads, changes and writes the file, whole or not at all, and one at a time. Returns what it holds now.

    Raises what :func:`read_contexts` and ``change`` raise, and OSError; nothing has changed then.
    """
    target = Path(os.path.realpath(path))  # a link, as those who keep such files elsewhere have it, stays one
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        changed = change(read_contexts(path))
        text = _text_of(changed, str(path))
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
            os.fsync(folder)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
        return changed
    finally:
        os.close(folder)


def _text_of(contexts: Contexts, name: str) -> str:
    """Read again before it is written: what would be refused later is refused now, in the same words."""
    import yaml

    from meshfusion.dpu.yaml_document import parse_yaml
    from meshfusion.tools.mfctl.context_model import contexts_of

    text = _HEAD + yaml.safe_dump(contexts_document(contexts), sort_keys=False, allow_unicode=True)
    contexts_of(parse_yaml(text, name), name)
    return text


def contexts_document(contexts: Contexts) -> dict[str, Any]:
    """As the file has it."""
    return {
        "current": contexts.current,
        "contexts": {name: context_document(context) for name, context in contexts.by_name.items()},
    }


def context_document(context: ServiceContext) -> dict[str, Any]:
    """As the file has one."""
    if not context.is_cluster:
        (member,) = context.members
        return {"service": member.address, **_plain(member.access)}
    services = {
        member.name: {
            "address": member.address,
            **{key: value for key, value in _plain(member.access).items() if _plain(context.shared).get(key) != value},
        }
        for member in context.members
    }
    return {"services": services, **_plain(context.shared)}


def _plain(access: Access) -> dict[str, str]:
    return {name: str(value) for name, value in access.given().items()}
