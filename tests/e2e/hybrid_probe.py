"""What the engine makes of a model, and how much its answers owe to each KV group.

``python -m tests.e2e.hybrid_probe [NAME...]`` prints one line of JSON a model. As a child of
:class:`tests.e2e.harness.EngineProcess` it has some operations more than :mod:`tests.e2e.engine_child`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e.engine_child import Engine, main
from tests.e2e.harness import ROOT, EngineDied, EngineError, EngineProcess, make_prompt
from tests.e2e.hybrid_models import HYBRID_MODELS, PROMPT_TOKENS, HybridModel, make_hybrid_models
from tests.e2e.models import VOCABULARY


class ProbeEngine(Engine):
    """An engine that shows its KV groups."""

    def __init__(self) -> None:
        super().__init__()
        self._offers: list[tuple[str, int, int, int]] = []
        self._remembered: list[list[int]] = []
        self._replaced: list[tuple[Any, list[int], Any]] = []

    def start(self, *, options: dict[str, Any]) -> float:
        seconds = super().start(options=options)
        manager = self._scheduler.kv_cache_manager
        take = manager.take_boundary_state_offloads

        def recorded() -> Any:
            offers = take()
            self._offers += [(request, *offer) for request, all_of_it in offers.items() for offer in all_of_it]
            return offers

        manager.take_boundary_state_offloads = recorded
        return seconds

    def groups(self) -> list[dict[str, Any]]:
        """Of each KV group what :class:`tests.e2e.hybrid_models.ExpectedGroup` says."""
        groups = []
        for group in self._scheduler.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            spec = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
            groups.append(
                {
                    "spec": type(spec).__name__,
                    "block_tokens": spec.block_size,
                    "page_bytes": spec.page_size_bytes,
                    "content_bytes": spec.real_page_size_bytes,
                    "layers": len(group.layer_names),
                }
            )
        return groups

    def cache(self) -> dict[str, Any]:
        """How the engine's own prefix cache is set up."""
        config = self._llm.llm_engine.vllm_config.cache_config
        names = ("enable_prefix_caching", "block_size", "prefix_cache_retention_interval", "mamba_cache_mode")
        return {
            **{name: getattr(config, name) for name in names},
            **{name: getattr(config, name, None) for name in ("mamba_block_size", "cache_hit_alignment_tokens")},
        }

    def offers(self) -> list[tuple[str, int, int, int]]:
        """Request, group, block and tokens of the recurrent states that a connector would have been offered."""
        offers, self._offers = self._offers, []
        return offers

    def remember(self) -> None:
        """The blocks that are in the engine's prefix cache now are what others are replaced with."""
        groups = range(len(self._scheduler.kv_cache_config.kv_cache_groups))
        self._remembered = [self._cached_blocks(group) for group in groups]

    def replace(self, *, group: int) -> int:
        """What was cached since then gets the remembered bytes, in one KV group; the number of its blocks."""
        theirs = self._remembered[group]
        ours = [block for block in self._cached_blocks(group) if block not in theirs]
        self._replaced = []
        for pages in self._pages(group):
            self._replaced.append((pages, ours, pages[ours].clone()))
            pages[ours] = pages[[theirs[at % len(theirs)] for at in range(len(ours))]]
        return len(ours)

    def restore(self) -> None:
        """Undo the last replacement."""
        for pages, blocks, held in self._replaced:
            pages[blocks] = held

    def cached_bytes(self) -> list[dict[str, str]]:
        """For each KV group the digest of what every block in the engine's prefix cache holds, by the block's hash."""
        return [self._cached_bytes(group) for group in range(len(self._scheduler.kv_cache_config.kv_cache_groups))]

    def _cached_bytes(self, group: int) -> dict[str, str]:
        import torch
        from vllm.v1.core.kv_cache_utils import get_block_hash

        blocks, pages = self._scheduler.kv_cache_manager.block_pool.blocks, list(self._pages(group))
        found = {}
        for block_id in self._cached_blocks(group):
            digest = hashlib.sha256()
            for tensor in pages:
                digest.update(tensor[block_id].contiguous().view(torch.uint8).numpy().tobytes())
            found[bytes(get_block_hash(blocks[block_id].block_hash)).hex()] = digest.hexdigest()
        return found

    def _cached_blocks(self, group: int) -> list[int]:
        from vllm.v1.core.kv_cache_utils import get_group_id

        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        return [b.block_id for b in blocks if b.block_hash is not None and get_group_id(b.block_hash) == group]

    def _pages(self, group: int) -> Iterator[Any]:
        """Every tensor of a group, first by block."""
        layers = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        blocks = self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        for name in self._scheduler.kv_cache_config.kv_cache_groups[group].layer_names:
            held = layers[name].kv_cache
            for tensor in held if isinstance(held, tuple | list) else (held,):
                yield tensor.unflatten(0, (blocks, -1))  # the kernel's blocks may be smaller


def probe(model: HybridModel, folder: Path, log: Path, **options: Any) -> dict[str, Any]:
    """Start an engine and try it; ``"error"`` says what did not go."""
    process = EngineProcess(log, environment=dict(model.environment), module="tests.e2e.hybrid_probe")
    found: dict[str, Any] = {"name": model.name, "options": options}
    try:
        found["start_s"] = round(process.start(folder, None, **{**model.options, **options}), 1)
        found |= {"cache": process.call("cache"), "groups": process.call("groups")}
        found |= _answers(process, len(found["groups"]))
        process.close()
    except (EngineError, EngineDied) as error:
        found["error"] = str(error)[-1500:]
        process.kill()
    return found


def _answers(process: EngineProcess, groups: int) -> dict[str, Any]:
    prompt, other = make_prompt(11, PROMPT_TOKENS), make_prompt(12, PROMPT_TOKENS)
    process.answer(other)
    process.call("remember")
    process.call("offers")
    cold = process.answer(prompt)
    found: dict[str, Any] = {"tokens": cold.tokens, "cold_cached": cold.cached}
    found["offers"] = _boundaries(process.call("offers"))
    again = process.answer(prompt)
    found["again"] = {"cached": again.cached, "same": again.tokens == cold.tokens, "distance": again.distance(cold)}
    found["replaced"] = []
    for group in range(groups if again.cached else 0):
        blocks = process.call("replace", group=group)
        wrong = process.answer(prompt)
        process.call("restore")
        found["replaced"].append({"blocks": blocks, "cached": wrong.cached, "distance": wrong.distance(cold)})
    found["restored"] = process.answer(prompt).distance(cold)
    found["sibling_cached"] = process.answer(prompt[: PROMPT_TOKENS * 3 // 4] + other[: PROMPT_TOKENS // 4]).cached
    for name, at in (("early", 5), ("late", PROMPT_TOKENS - 30)):
        changed = list(prompt)
        changed[at] = (changed[at] + 1000) % VOCABULARY
        found[f"changed_{name}"] = process.answer(changed).distance(cold)
    return found


def _boundaries(offers: Iterable[tuple[str, int, int, int]]) -> dict[str, list[int]]:
    """By group, the boundaries of the offered states in the order of the offers."""
    found: dict[str, list[int]] = {}
    for _, group, _, tokens in offers:
        found.setdefault(str(group), []).append(tokens)
    return found


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].isdigit():
        main(int(sys.argv[1]), ProbeEngine())  # which ends the process
    folders = make_hybrid_models(ROOT / ".cache")
    for name in sys.argv[1:] or HYBRID_MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(probe(HYBRID_MODELS[name], folders[name], Path(scratch) / "log")), flush=True)
