"""A lookup of a whole prompt, with its lease: our service against Mooncake's master, both over their own RPC.

``pip install mooncake-transfer-engine-non-cuda`` in an environment of its own, and name its interpreter. On both sides
a server process and client processes in Python on the same machine, over TCP on loopback, in turns. Ours is ``Match``
of 400 chunks at random out of ``--chunks`` (the pool of :mod:`meshfusion.tools.bench.index_scale`). Mooncake's
equivalent is ``BatchGetReplicaList`` of 400 keys (``batch_get_replica_desc``): it, too, says where each object lies and
grants a lease on each. ``BatchExistKey`` (``batch_is_exist``) grants leases and tells no place; it is measured, too,
and so is our ``Heartbeat``, which does next to nothing: what any call costs.

*Per core*: requests for each second of processor time of the server. Where clients share the machine's few processors
with it, requests a second say little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from meshfusion.jbof.errors import MediaError
from meshfusion.tools.bench.index_fill import PROMPT_CHUNKS, Filled, fill_pool
from meshfusion.tools.bench.index_scale import served, wait_for_adoption, wait_for_scan
from meshfusion.tools.bench.lookup_parties import FILL_S, START_S, Client, free_port, mooncake_master, our_client
from meshfusion.tools.bench.processes import cpu_s, memory_of
from meshfusion.tools.bench.report import Progress, Report, bench_options, run_bench

_FILL_STEP: Final = 1_000_000


class Party(NamedTuple):
    """``call``: what its clients are told to ask. ``pid``: of the server. ``found_each``: chunks by each call."""

    name: str
    call: str
    pid: int
    clients: Sequence[Client]
    found_each: int = PROMPT_CHUNKS


class Sample(NamedTuple):
    p50_ms: float
    p99_ms: float
    per_s: float
    per_cpu_s: float


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@bench_options(rounds=5)
@click.option("--chunks", default=10_000_000, show_default=True, type=click.IntRange(min=PROMPT_CHUNKS))
@click.option("--objects", type=click.IntRange(min=PROMPT_CHUNKS), help="In Mooncake.  [default: --chunks]")
@click.option("--clients", default=3, show_default=True, type=click.IntRange(min=2), help="At once, besides one alone.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each measurement.")
@click.option("--pool", type=click.Path(path_type=Path), help="One that is there already is not filled.")
@click.option(
    "--mooncake-python", type=click.Path(path_type=Path, exists=True), help="Without it, ours alone is measured."
)
def main(
    rounds: int,
    output_format: str,
    work: Path,
    chunks: int,
    objects: int | None,
    clients: int,
    seconds: float,
    pool: Path | None,
    mooncake_python: Path | None,
) -> None:
    """p50, p99 and rate for each core of a lookup of 400 chunks, ours and Mooncake's."""

    def measure(report: Report, directory: Path, progress: Progress) -> None:
        path = (pool or directory / "pool").absolute()
        filled = Filled(path, chunks) if path.exists() else fill_pool(path, chunks, progress)
        with ExitStack() as stack:
            parties = []
            if mooncake_python is not None:
                parties += _mooncake(stack, mooncake_python, objects or chunks, clients, directory, report, progress)
            parties = [*_ours(stack, filled, clients, directory, progress), *parties]
            _measure(report, parties, rounds, clients, seconds, progress)

    told: dict[str, Any] = {"rounds": rounds, "chunks": chunks, "objects": objects or chunks}
    run_bench("lookup_peer", work, output_format, {**told, "clients": clients, "seconds": seconds}, measure)


def _ours(stack: ExitStack, filled: Filled, clients: int, directory: Path, progress: Progress) -> list[Party]:
    """Settled: what a service does once after its start would count against each lookup."""
    address = f"127.0.0.1:{free_port()}"
    service = stack.enter_context(served(directory, filled, address=address))
    progress("waiting until the service has settled")
    wait_for_scan(service)
    wait_for_adoption(service)
    log, prompts = directory / "clients.log", filled.prompt_count
    found = [our_client(service.address, prompts, seed, log) for seed in range(clients)]
    for client in found:
        stack.callback(client.close)
    pid = service.process.pid
    return [
        Party("MeshFusion Match", "match", pid, found),
        Party("MeshFusion Heartbeat", "heartbeat", pid, found, found_each=0),
    ]


def _mooncake(
    stack: ExitStack, python: Path, objects: int, clients: int, directory: Path, report: Report, progress: Progress
) -> list[Party]:
    log, prompts = directory / "mooncake.log", objects // PROMPT_CHUNKS
    master = stack.enter_context(mooncake_master(python, log))
    filler = master.client(prompts, 0, is_filler=True)
    stack.callback(filler.close)
    empty = memory_of(master.pid)
    for first in range(0, objects, _FILL_STEP):
        end = min(first + _FILL_STEP, objects)
        filler.tell(**{"do": "fill", "from": first, "to": end})
        took_s = filler.answer(FILL_S)["seconds"]
        progress(f"{end} objects in Mooncake, the last of them {(end - first) / took_s:.0f} a second")
    full = memory_of(master.pid)
    report.details.append(
        {
            "mooncake_rss_bytes": full.rss_bytes,
            "mooncake_bytes_per_object": (full.rss_bytes - empty.rss_bytes) / objects,
        }
    )
    found = [master.client(prompts, seed) for seed in range(clients)]
    for client in found:
        stack.callback(client.close)
    return [
        Party("Mooncake BatchGetReplicaList", "replicas", master.pid, found),
        Party("Mooncake BatchExistKey", "exist", master.pid, found),
    ]


def _measure(
    report: Report, parties: Sequence[Party], rounds: int, clients: int, seconds: float, progress: Progress
) -> None:
    samples: dict[tuple[str, int], list[Sample]] = {}
    for party in parties:
        _run(party, clients, min(seconds, 2.0))  # connections, caches
    for index in range(rounds):
        for count in (1, clients):
            for party in parties:
                sample = _run(party, count, seconds)
                samples.setdefault((party.name, count), []).append(sample)
                progress(f"round {index + 1} of {rounds}: {party.name} by {count}: {sample}")
    kinds: list[tuple[str, str, Callable[[Sample], float]]] = [
        ("p50", "ms", lambda s: s.p50_ms),
        ("p99", "ms", lambda s: s.p99_ms),
        ("requests", "1/s", lambda s: s.per_s),
        ("requests per core", "1/s", lambda s: s.per_cpu_s),
    ]
    for kind, unit, value in kinds:
        for count in (1, clients):
            added = [
                report.add(
                    f"{kind}, {party.name}, {count} client(s)", unit, list(map(value, samples[party.name, count]))
                )
                for party in parties
            ]
            for other in added[1:]:
                report.compare(added[0], other)


def _run(party: Party, count: int, seconds: float) -> Sample:
    before_s = cpu_s(party.pid)
    for client in party.clients[:count]:
        client.tell(do="run", call=party.call, seconds=seconds)
    answers = [client.answer(seconds + START_S) for client in party.clients[:count]]
    used_s = cpu_s(party.pid) - before_s
    latencies_s = [latency for answer in answers for latency in answer["latencies_s"]]
    found = sum(answer["found"] for answer in answers)
    wanted = party.found_each * len(latencies_s)
    if found != wanted:
        raise MediaError(f"{party.name} found {found} of {wanted} chunks", next_step="fill it whole")
    cuts_s = statistics.quantiles(latencies_s, n=100, method="inclusive")
    per_s = sum(len(answer["latencies_s"]) / answer["seconds"] for answer in answers)
    return Sample(1e3 * cuts_s[49], 1e3 * cuts_s[98], per_s, len(latencies_s) / used_s)


if __name__ == "__main__":
    main()
