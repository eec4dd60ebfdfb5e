"""Faults of the engine that are in a test's way, put right in the child that runs it. None is one of ours.

``MESHFUSION_TEST_ENGINE_FIXES`` names those to apply, separated by commas.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

VARIABLE = "MESHFUSION_TEST_ENGINE_FIXES"


def apply_engine_fixes() -> None:
    """Before the first engine of the process; any number of times. Raises KeyError for a name that is none."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        _FIXES[name]()


def _mamba2() -> None:
    """vLLM 0.32 on CPU: let no Mamba2 layer ask for a checkpoint of its state inside a prefill.

    ``MambaMixer2`` then asks the scan for the states between its chunks, and takes ``states[last_chunk_indices]`` as
    the final ones. The scan for CPUs ignores ``return_intermediate_states`` and returns the final states alone, one a
    request, so that the index is out of range or, worse, in it. Without such checkpoints the scheduler ends a step at
    the boundary instead, and the state there is the one that the step ends with.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    get_spec = MambaMixer2.get_kv_cache_spec
    if getattr(get_spec, "without_checkpoints", False):
        return

    def without_checkpoints(self: Any, vllm_config: Any) -> Any:
        spec = get_spec(self, vllm_config)
        if not hasattr(spec, "num_prefill_checkpoint_blocks"):  # not in every version
            return spec
        return dataclasses.replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    without_checkpoints.without_checkpoints = True  # type: ignore[attr-defined]
    MambaMixer2.get_kv_cache_spec = without_checkpoints


def _block_outermost() -> None:
    """vLLM 0.30 to 0.32 on CPU: let its attention take blocks outermost, too.

    It declares layers outermost alone, although its kernels go by the strides of what they are given and only need a
    page whose heads are outermost. No machine without a GPU has another way to see an engine's attention that way.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheLayout

    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)


_FIXES = {"mamba2": _mamba2, "block_outermost": _block_outermost}
