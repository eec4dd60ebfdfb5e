"""KV memory in a tensor of torch, on any device, for engines and judges that know only arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from tests.host.support.kv_memory import U8, KvMemory


class TensorBytes:
    """As an array of uint8, as far as the small engine goes. ``tensor``: uint8[bytes]."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def size(self) -> int:
        return int(self.tensor.numel())

    def __getitem__(self, places: Any) -> U8:
        found: U8 = self.tensor[self._places(places)].cpu().numpy()
        return found

    def __setitem__(self, places: Any, data: U8) -> None:
        self.tensor[self._places(places)] = torch.from_numpy(np.array(data)).to(self.tensor.device)

    def _places(self, places: Any) -> Any:
        return torch.from_numpy(places).to(self.tensor.device) if isinstance(places, np.ndarray) else places


def torch_kv(kv: KvMemory, tensor: torch.Tensor) -> KvMemory:
    """The same layout in ``tensor``."""
    return replace(kv, memory=cast(U8, TensorBytes(tensor)))
