"""A negative control: an engine of the acceptance test whose blocks are changed after their digests were compared.

Of the first load one bit, which no answer shows; of every later one a whole block. For tests only.
"""

from __future__ import annotations

from meshfusion.host.connector.vllm.worker import WorkerSide
from meshfusion.host.memory.host_memory import HostKvMemory
from meshfusion.tools.verify.engine import main

_finished_loads = WorkerSide.finished_loads
_scrambled: list[str] = []


def _scrambling(self: WorkerSide) -> set[str]:
    orders = {request_id: order for request_id, (order, _) in self.parts.loads._jobs.items()}
    finished = _finished_loads(self)
    for request_id in finished:
        assert isinstance(self.parts.memory, HostKvMemory)
        memory, layout = self.parts.memory.array, self.parts.auditor._layouts[0]
        for start in layout.run_offsets(orders[request_id].block_ids[0]):
            if _scrambled:
                memory[start : start + layout.run_bytes] = memory[start : start + layout.run_bytes][::-1].copy()
            else:
                memory[start] ^= 1
                break
        _scrambled.append(request_id)
    return finished


if __name__ == "__main__":
    WorkerSide.finished_loads = _scrambling  # type: ignore[method-assign]
    main()
