"""What ``docs/mfctl.md`` says of the report of ``mfctl verify``."""

from __future__ import annotations

_WORDS = (
    (
        "`tolerance`",
        "four times the largest OWN DIFF., and at least 8 rounding steps of the dtype: 0.00000095 in float32, 0.0078 "
        "in float16, 0.063 in bfloat16",
    ),
    (
        "`LOADED`",
        "of a KV group: blocks that the second engine loaded, over all prompts; of a prompt: tokens that it did not "
        "compute",
    ),
    ("`BLOCKS`", "blocks loaded for this prompt, of all KV groups"),
    (
        "`COMPARED`",
        "those of them that the first engine still had in its cache when it had computed all prompts: each was "
        "compared with what is there",
    ),
    ("`DIFFERENT`", "those of them that hold other bytes; one is a failure"),
    ("`SAME TOKENS`", "are they those of one of the first engine's three answers? If not, it is a failure"),
    (
        "`OWN DIFF.`",
        "the largest difference of a log-probability among the first engine's three answers, up to the first token "
        "that is another",
    ),
    (
        "`DIFFERENCE`",
        "likewise of the second engine's answer from the nearest of the three; more than the tolerance is a failure",
    ),
    ("`TTFT COLD`, `TTFT LOADED`", "time to the first token, of one answer each: an order of magnitude"),
)

_BEFORE = """### The report of verify

The first engine answers each prompt three times: computed from nothing, from its own prefix cache, and from that beside
all others. Batches of other shapes round differently, and what these answers differ by is what the engine itself varies
by. The second engine's answer, with KV from the pool, is held against the nearest of them.

| word | meaning |
|---|---|
"""

_AFTER = """
- **Blocks that are not compared.** The first engine frees blocks behind a sliding window, and reuses those of older
  prompts when its KV memory is full: of sliding groups few are left in the end. Such a block was proven by its digest
  when it was loaded, and cannot be compared once more. A KV group that is needed and of which nothing could be compared
  is a failure; one of which fewer than half could be is named in a notice. More KV memory leaves more to compare (on
  CPUs `VLLM_CPU_KVCACHE_SPACE=4`, in GiB).
- **Notices** tell how much less than all was proven; they fail nothing (`notices` in JSON). Where the tolerance is
  above 0.1, log-probabilities prove little: the blocks' bytes alone prove that what was loaded is what was computed.
- **Two chunks load one** in models with windows, local attention or states: they do not resume at the end of their
  tokens, since the last one is computed once more, and what it needs is not there any more.
- **One rank.** Verify reads the engine's KV memory in its own process, and so takes no tensor-parallel engines.
- **After a failure** logs and report stay in a temporary folder, which is named at the end; with `--keep-pool` the pool
  does too.
"""

VERIFY_REPORT = _BEFORE + "".join(f"| {word} | {meaning} |\n" for word, meaning in _WORDS) + _AFTER
