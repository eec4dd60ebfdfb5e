"""The part of the ``initiator_cost`` benchmark that runs in the guest. Prints [beside what, engine, gaps] as JSON."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

from meshfusion.tools.bench.engine_gaps import ENGINES, gaps_of
from meshfusion.tools.bench.rdma_guest import INITIATORS, exported_target

SIZE_BYTES = 128 << 10
DEPTH = 32
LOADS = {"loads by ours": "ours", "loads by the kernel": "kernel"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    address = exported_target()
    rows = []
    for _ in range(arguments.rounds):
        for engine in ENGINES:
            rows.append(("no load", engine, gaps_of(engine, arguments.seconds)))
        for beside, name in LOADS.items():
            with INITIATORS[name](address) as read_for, ThreadPoolExecutor(1) as loader:
                for engine in ENGINES:
                    load = loader.submit(read_for, SIZE_BYTES, DEPTH, arguments.seconds)
                    rows.append((beside, engine, gaps_of(engine, arguments.seconds * 0.9)))
                    load.result()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
