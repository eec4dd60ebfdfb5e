"""The distribution's pyverbs, found and imported: the only place that names its modules.

They are called ``enums`` and ``cm_enums`` up to version 44 of rdma-core, ``libibverbs_enums`` and ``librdmacm_enums``
since. pyverbs belongs to the rdma-core that is installed and to the distribution's Python, so it is taken from there,
also into a virtual environment of the same Python version.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from meshfusion.jbof.errors import UnsupportedError

PACKAGE: Final = "python3-pyverbs"
"""Debian's and Ubuntu's name."""

_DISTRIBUTION: Final = Path("/usr/lib/python3/dist-packages")
_CLASSES: Final = {
    "cmid": ("AddrInfo", "CMEvent", "CMEventChannel", "CMID", "ConnParam"),
    "cq": ("CQ", "CQEX", "CqInitAttrEx", "PollCqAttr"),
    "mr": ("DmaBufMR", "MR", "MW", "MWBindInfo"),
    "pd": ("PD",),
    "qp": ("QP", "QPAttr", "QPCap", "QPInitAttr"),
    "wr": ("RecvWR", "SendWR", "SGE"),
    "pyverbs_error": ("PyverbsError",),
}
_ENUM_MODULES: Final = (("libibverbs_enums", "enums"), ("librdmacm_enums", "cm_enums"))
_PROBES: Final = ("IBV_QPS_RTS", "RDMA_CM_EVENT_CONNECT_RESPONSE")


class Verbs:
    """pyverbs' classes and constants under one roof, by their own names: ``verbs.QP``, ``verbs.IBV_QPS_RTS``."""

    def __init__(self, modules: tuple[ModuleType, ...], classes: dict[str, Any]) -> None:
        self._modules = modules
        self.__dict__.update(classes)

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                value = getattr(module, name)
                self.__dict__[name] = value
                return value
        raise AttributeError(f"pyverbs has no {name}")


def load_verbs(distribution: Path = _DISTRIBUTION) -> Verbs:
    """Raises :class:`~meshfusion.jbof.errors.UnsupportedError` where pyverbs is missing, or made for another Python."""
    # Importing pyverbs calls logging.basicConfig, which does nothing while the root logger has a handler.
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        _find(distribution)
        classes = {
            name: getattr(importlib.import_module(f"pyverbs.{module}"), name)
            for module, names in _CLASSES.items()
            for name in names
        }
        modules = tuple(_enum_module(*pair) for pair in zip(_ENUM_MODULES, _PROBES, strict=True))
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"pyverbs, which NVMe/RDMA needs, cannot be used: {error}",
            next_step=f"Install it (apt install {PACKAGE}), and run a Python of the distribution's version.",
        ) from error
    finally:
        logging.getLogger().removeHandler(handler)
    return Verbs(modules, classes)


def _find(distribution: Path) -> None:
    """Make ``pyverbs`` importable, and nothing else of the distribution's modules with it."""
    package = distribution / "pyverbs" / "__init__.py"
    if "pyverbs" in sys.modules or importlib.util.find_spec("pyverbs") is not None or not package.exists():
        return
    spec = importlib.util.spec_from_file_location("pyverbs", package, submodule_search_locations=[str(package.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


def _enum_module(names: tuple[str, ...], probe: str) -> ModuleType:
    for name in names:
        try:
            module = importlib.import_module(f"pyverbs.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, probe):
            return module
    raise ImportError(f"pyverbs has none of the modules {', '.join(names)} with {probe}")
