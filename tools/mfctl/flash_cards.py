"""Cards and what is pushed into them, as the options of ``mfctl dpu`` name them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from meshfusion.jbof.config_problems import ConfigProblem
from meshfusion.jbof.errors import ConfigError, FieldValueError

if TYPE_CHECKING:
    from meshfusion.dpu.image.bfb import BfbSummary
    from meshfusion.dpu.image.bundle import Bundle
    from meshfusion.dpu.image.edge.card import Card
    from meshfusion.dpu.image.edge.redfish import Credentials
    from meshfusion.dpu.image.stream import Stream
    from meshfusion.tools.mfctl.flash_targets import Target

_BASH_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class BmcAccess:
    """``ssh``: where the log of the BMC's rshim is read, "" for root at the BMC."""

    credentials: Path | None = None
    ca: Path | None = None
    fingerprint: str = ""
    ssh: str = ""
    serve_at: str = ""
    ask: Callable[[str], Credentials] | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """``digest``: of all that is pushed, which tells one image from another."""

    bundle: Bundle
    bfb: BfbSummary
    stream: Stream

    @property
    def digest(self) -> str:
        return f"{self.bundle.digest}:{self.bfb.sha256}"


def read_image(bundle_folder: Path, bfb_path: Path, key: Path | None, told: Callable[[int, int], None]) -> Image:
    """Checked whole. ``told``: bytes of the BFB that were read, and all of them.

    Raises FlashRefusedError with everything that speaks against it, BfbError, BundleError, and OSError.
    """
    from meshfusion.dpu.image.bf_cfg import bf_cfg_problems
    from meshfusion.dpu.image.bfb import scan_bfb
    from meshfusion.dpu.image.bundle import read_bundle
    from meshfusion.dpu.image.errors import FlashRefusedError
    from meshfusion.dpu.image.preflight import image_problems
    from meshfusion.dpu.image.stream import Stream

    bundle = read_bundle(bundle_folder, None if key is None else key.read_bytes())
    size_bytes = bfb_path.stat().st_size
    with bfb_path.open("rb") as file:
        bfb = scan_bfb(file, lambda done_bytes: told(done_bytes, size_bytes))
    problems = [*image_problems(bundle, bfb), *bf_cfg_problems(bundle.bf_cfg), *_syntax_problems(bundle.bf_cfg)]
    if problems:
        step = "Correct the bundle, or take another one; nothing was done."
        raise FlashRefusedError("this image is not flashed", tuple(problems), next_step=step)
    return Image(bundle, bfb, Stream(lambda: bfb_path.open("rb"), bfb.size_bytes, bundle.bf_cfg))


def _syntax_problems(bf_cfg: bytes) -> list[ConfigProblem]:
    """The installer passes over a script that bash cannot parse, without a word that counts as a failure."""
    bash = shutil.which("bash")
    if bash is None:
        return [ConfigProblem("bf.cfg", "cannot be checked without bash", "install bash on this machine")]
    checked = subprocess.run(
        (bash, "-n"), input=bf_cfg, capture_output=True, timeout=_BASH_S, check=False, env={"LC_ALL": "C"}
    )
    if checked.returncode == 0:
        return []
    said = checked.stderr.decode(errors="replace").strip().splitlines() or ["bash cannot parse it"]
    return [ConfigProblem("bf.cfg", said[0].removeprefix(f"{bash}: "), "correct the script")]


def open_card(target: Target, bmc: BmcAccess) -> Card:
    """Raises ConfigError for a BMC's credentials that cannot be used. Nothing is asked of the card yet."""
    from meshfusion.dpu.image.edge.card import TMFIFO_ADDRESS, HostCard
    from meshfusion.dpu.image.edge.rshim import LocalRshim, SshRshim
    from meshfusion.dpu.image.edge.shell import LocalShell, SshShell

    place = target.place
    if place.is_bmc:
        return _bmc_card(target, bmc)
    address = target.address or TMFIFO_ADDRESS
    if not place.host:
        rshim = LocalRshim(Path(place.folder))
        return HostCard(LocalShell(), rshim, folder=place.folder, index=place.index, address=address)
    shell = SshShell(f"{place.user}@{place.host}" if place.user else place.host, place.port)
    return HostCard(shell, SshRshim(shell, place.folder), folder=place.folder, index=place.index, address=address)


def _bmc_card(target: Target, bmc: BmcAccess) -> Card:
    from meshfusion.dpu.image.edge.bmc_card import BmcCard
    from meshfusion.dpu.image.edge.redfish import Redfish
    from meshfusion.dpu.image.edge.shell import SshShell

    place = target.place
    redfish = Redfish(
        place.host, _credentials(bmc, place.host), port=place.port or 443, ca=bmc.ca, fingerprint=bmc.fingerprint
    )
    serve_at, _, port = bmc.serve_at.partition(":")
    return BmcCard(
        redfish, SshShell(bmc.ssh or f"root@{place.host}"), address=target.address, serve_at=serve_at,
        port=int(port or 0),
    )  # fmt: skip


def _credentials(bmc: BmcAccess, host: str) -> Credentials:
    from meshfusion.dpu.api.security.files import read_secret
    from meshfusion.dpu.image.edge.redfish import Credentials

    if bmc.credentials is None:
        if bmc.ask is None:
            raise ConfigError(
                f"BMC {host}: no credentials, and nobody to ask", next_step="Name a file with --bmc-credentials."
            )
        return bmc.ask(host)
    step = "Write one line into it: USER:PASSWORD, and see that only you can read it."
    try:
        text = read_secret(bmc.credentials, "--bmc-credentials").data.decode()
    except (FieldValueError, UnicodeDecodeError) as error:
        problem = f"{error.problem}; {error.fix}" if isinstance(error, FieldValueError) else "is not UTF-8"
        raise ConfigError(f"--bmc-credentials {bmc.credentials}: {problem}", next_step=step) from None
    user, colon, password = text.strip().partition(":")
    if not (user and colon and password) or "\n" in password:
        raise ConfigError(f"--bmc-credentials {bmc.credentials}: holds no USER:PASSWORD", next_step=step)
    return Credentials(user, password)


def refuse(problems: list[ConfigProblem]) -> None:
    """Raises FlashRefusedError unless there are none."""
    from meshfusion.dpu.image.errors import FlashRefusedError

    if problems:
        step = "Nothing was done to any card. Correct what is named, and run the same command again."
        raise FlashRefusedError("nothing is flashed", tuple(problems), next_step=step)
