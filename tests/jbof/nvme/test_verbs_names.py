"""pyverbs under its names of version 44 and of version 59, missing, or made for another Python."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshfusion.jbof.errors import UnsupportedError
from meshfusion.jbof.nvme.verbs_names import load_verbs

NAMES = {
    "44": ("enums", "cm_enums"),
    "50": ("enums", "cm_enums", "libibverbs_enums", "librdmacm_enums"),
    "59": ("libibverbs_enums", "librdmacm_enums"),
}
CLASSES = {
    "cmid": "AddrInfo CMEvent CMEventChannel CMID ConnParam",
    "cq": "CQ CQEX CqInitAttrEx PollCqAttr",
    "mr": "DmaBufMR MR MW MWBindInfo",
    "pd": "PD",
    "qp": "QP QPAttr QPCap QPInitAttr",
    "wr": "RecvWR SendWR SGE",
    "pyverbs_error": "PyverbsError",
}


@pytest.fixture(autouse=True)
def _without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None is imported yet, and none that is imported here stays."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "pyverbs"]

    kept = {name: sys.modules.pop(name) for name in ours()}
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "pyverbs").exists()])
    yield
    for name in ours():
        del sys.modules[name]
    sys.modules.update(kept)


def installed(folder: Path, version: str) -> Path:
    package = folder / "pyverbs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for module, names in CLASSES.items():
        (package / f"{module}.py").write_text("".join(f"class {name}(Exception): pass\n" for name in names.split()))
    (package / "cq.py").write_text(
        "import logging\nlogging.basicConfig(level=logging.DEBUG)\n"
        + "".join(f"class {name}: pass\n" for name in CLASSES["cq"].split())
    )
    for module in NAMES[version]:
        name = "RDMA_CM_EVENT_CONNECT_RESPONSE = 5\n" if "cm" in module else "IBV_QPS_RTS = 3\n"
        (package / f"{module}.py").write_text(name)
    (folder / "numpy_of_the_distribution.py").write_text("")
    return folder


@pytest.mark.parametrize("version", NAMES)
def test_both_sets_of_names(tmp_path: Path, version: str) -> None:
    verbs = load_verbs(installed(tmp_path, version))
    assert (verbs.IBV_QPS_RTS, verbs.RDMA_CM_EVENT_CONNECT_RESPONSE) == (3, 5)
    assert verbs.CMID.__name__ == "CMID"
    with pytest.raises(AttributeError, match="IBV_NO_SUCH"):
        _ = verbs.IBV_NO_SUCH


def test_nothing_else_of_the_distribution_comes_with_it(tmp_path: Path) -> None:
    path = list(sys.path)
    load_verbs(installed(tmp_path, "44"))
    assert sys.path == path


def test_logging_stays_as_it_was(tmp_path: Path) -> None:
    """pyverbs configures the root logger when it is imported, unless that has a handler."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for handler in handlers:
        root.removeHandler(handler)
    try:
        load_verbs(installed(tmp_path, "44"))
        assert (root.handlers, root.level) == ([], level)
    finally:
        for handler in handlers:
            root.addHandler(handler)


def test_the_package_is_named_when_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="apt install python3-pyverbs"):
        load_verbs(tmp_path)


def test_constants_that_are_nowhere(tmp_path: Path) -> None:
    folder = installed(tmp_path, "59")
    (folder / "pyverbs" / "librdmacm_enums.py").write_text("")
    with pytest.raises(UnsupportedError, match="RDMA_CM_EVENT_CONNECT_RESPONSE"):
        load_verbs(folder)
