"""What an image must hold: the roots of its Debian packages, and the wheels that the project asks for."""

from __future__ import annotations

from typing import Any, Final

from meshfusion.tools.image.architecture import PYTHON
from meshfusion.tools.image.errors import BuildError
from meshfusion.tools.image.lock import REMAKE, Lock, Target

# libstdc++6: of wheels with C++; cryptsetup-bin: of encrypted pools.
_SERVICE: Final = ("cryptsetup-bin", "libstdc++6", f"python{PYTHON}")
# What SPDK's nvmf_tgt is usually linked with.
_SPDK: Final = (
    "ibverbs-providers", "libaio1", "libfuse3-3", "libibverbs1", "libjson-c5", "libkeyutils1", "libnuma1", "librdmacm1",
    "libssl3", "liburing2", "libuuid1",
)  # fmt: skip
DEBIAN_ROOTS: Final[dict[Target, tuple[str, ...]]] = {"nvmet": _SERVICE, "spdk": (*_SERVICE, *_SPDK)}
_EXTRA: Final[dict[Target, str | None]] = {"nvmet": None, "spdk": "dpu"}


def requirements(project: dict[str, Any], target: Target) -> list[str]:
    """Of pyproject.toml's ``project``: what the service of ``target`` needs."""
    extra = _EXTRA[target]
    return [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else [])]


def check_requirements(lock: Lock, project: dict[str, Any], target: Target) -> None:
    """Raises BuildError where ``lock`` was made for others than the project asks for."""
    wanted, locked = set(requirements(project, target)), set(lock.requires.get(target, []))
    if wanted != locked:
        differing = ", ".join(sorted(wanted ^ locked))
        raise BuildError(
            f"the lock for {lock.architecture} was made for other requirements than pyproject.toml has: {differing}",
            next_step=REMAKE.format(architecture=lock.architecture),
        )
