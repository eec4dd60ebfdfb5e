"""What a user states of workload and hardware, or leaves to a default that is shown.

Options of a command are made of these: nothing is imported for defaults that are other modules', which a test compares.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

from meshfusion.tools.plan.formula import Unit


class Kind(enum.Enum):
    """How it is written on the command line."""

    COUNT = "N"
    SIZE = "SIZE"
    GIGABYTES_PER_S = "GB/S"
    GIGABITS_PER_S = "GBIT/S"
    SHARE = "SHARE"
    PART = "SHARE, half at most"
    AMOUNT = "AMOUNT"
    POSITIVE = "NUMBER"
    FACTOR = "FACTOR"


@dataclass(frozen=True, slots=True)
class Given:
    """``option``: of `mfctl plan`. ``default`` None: what needs it is not computed unless it is given."""

    name: str
    option: str
    title: str
    unit: Unit
    kind: Kind
    default: Any = None
    why_default: str = ""


GIVEN: Final = (
    Given("engines", "--engines", "engines", Unit.COUNT, Kind.COUNT, 1),
    Given("requests_per_s", "--requests", "requests a second, of all engines together", Unit.PER_S, Kind.POSITIVE),
    Given("prompt_tokens", "--prompt-tokens", "mean tokens of a prompt", Unit.TOKENS, Kind.POSITIVE),
    Given(
        "output_tokens",
        "--output-tokens",
        "mean tokens of an answer, which are saved likewise",
        Unit.TOKENS,
        Kind.AMOUNT,
        0.0,
        "so that answers are not counted",
    ),
    Given(
        "hit_ratio",
        "--hit-ratio",
        "share of prompt tokens that come from the pool, beyond what the engine's own cache has",
        Unit.SHARE,
        Kind.SHARE,
    ),
    Given(
        "written_share",
        "--written-share",
        "share of the computed KV that the pool's policy writes",
        Unit.SHARE,
        Kind.SHARE,
        1.0,
        "all of it, the most that there can be (medium.policy: everything)",
    ),
    Given(
        "rewrite_share",
        "--rewrite-share",
        "share of what was saved that reclaim writes again",
        Unit.SHARE,
        Kind.SHARE,
        0.1,
        "the most that the service allows itself (dpu/store/tidying.py)",
    ),
    Given(
        "working_set_hours",
        "--working-set",
        "how long KV is to be kept for it to be hit so often",
        Unit.HOURS,
        Kind.POSITIVE,
    ),
    Given(
        "prefill_tokens_per_s",
        "--prefill-rate",
        "tokens that one engine computes in a second of prefill",
        Unit.TOKENS_PER_S,
        Kind.POSITIVE,
    ),
    Given(
        "queue_s",
        "--queue-time",
        "mean time that a request waits between its lookup and its load",
        Unit.SECONDS,
        Kind.AMOUNT,
        0.0,
        "requests are admitted at once",
    ),
    Given("drives", "--drives", "drives", Unit.COUNT, Kind.COUNT),
    Given("drive_bytes", "--drive-size", "size of a drive", Unit.BYTES, Kind.SIZE),
    Given(
        "segment_bytes",
        "--segment-size",
        "size of a segment",
        Unit.BYTES,
        Kind.SIZE,
        None,
        "as a new pool has it on such drives",
    ),
    Given(
        "drive_read_rate", "--drive-read-rate", "what a drive reads in a second", Unit.BYTES_PER_S, Kind.GIGABYTES_PER_S
    ),
    Given(
        "drive_write_rate",
        "--drive-write-rate",
        "what a drive writes in a second, steadily",
        Unit.BYTES_PER_S,
        Kind.GIGABYTES_PER_S,
    ),
    Given(
        "rated_drive_writes_per_day",
        "--drive-dwpd",
        "drive writes a day that the drives are rated for",
        Unit.PER_DAY,
        Kind.POSITIVE,
    ),
    Given(
        "rated_years",
        "--drive-years",
        "years that the rating is for",
        Unit.YEARS,
        Kind.POSITIVE,
        5.0,
        "the usual warranty of enterprise drives",
    ),
    Given(
        "device_write_amplification",
        "--device-waf",
        "what the flash writes for each byte that hosts write",
        Unit.COUNT,
        Kind.FACTOR,
        1.0,
        "segments are deallocated whole: 1.000 to 1.015 in a model of a drive (docs/device-waf.md)",
    ),
    Given(
        "free_fraction",
        "--free-fraction",
        "share of the segments that is kept free",
        Unit.SHARE,
        Kind.PART,
        0.05,
        "medium.free_fraction of the service's configuration",
    ),
    Given("nics", "--nics", "ports of the DPU or storage server that carry data", Unit.COUNT, Kind.COUNT, 1),
    Given("nic_rate", "--nic-rate", "what a port carries in a second, each way", Unit.BYTES_PER_S, Kind.GIGABITS_PER_S),
    Given(
        "engine_nic_rate",
        "--engine-nic-rate",
        "what one engine's ports carry in a second",
        Unit.BYTES_PER_S,
        Kind.GIGABITS_PER_S,
        float("inf"),
        "as if they were no narrower than the DPU's",
    ),
    Given("dpu_memory", "--dpu-memory", "memory of the DPU or storage server", Unit.BYTES, Kind.SIZE),
    Given(
        "target_memory",
        "--target-memory",
        "what nvmf_tgt gets (exports.spdk.memory)",
        Unit.BYTES,
        Kind.SIZE,
        8 << 30,
        "the example of the service's configuration",
    ),
    Given(
        "target_cores",
        "--target-cores",
        "cores of nvmf_tgt",
        Unit.COUNT,
        Kind.COUNT,
        1,
        "exports.spdk.cores of the service's configuration",
    ),
    Given(
        "queues_per_path",
        "--queues-per-path",
        "I/O queues of one rank over one port",
        Unit.COUNT,
        Kind.COUNT,
        4,
        "what the initiator asks for (jbof/nvme/settings.py)",
    ),
    Given(
        "utilisation_max",
        "--utilisation",
        "most of a rate that is planned to be used",
        Unit.SHARE,
        Kind.SHARE,
        0.7,
        "a convention, not a measurement: what is busier makes requests wait for each other",
    ),
)
BY_NAME: Final = {entry.name: entry for entry in GIVEN}
