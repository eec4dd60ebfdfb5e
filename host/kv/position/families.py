"""What a config does not say of the models whose keys can be turned, and why those of others cannot.

Read from vLLM 0.32 (model_executor/models) and transformers 5.19 (the same, by ``model_type``). A model is here only
when the tests compare its keys with those that its code there makes; of MLA, with what vLLM's rotary embedding makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshfusion.host.kv.position.form import PairStyle


@dataclass(frozen=True, slots=True)
class Family:
    """What is fixed in the code of one ``model_type``.

    ``extra_keys``: of the config, that say something of positions and that this family's reading takes into account.
    ``derives_head_dim``: without ``head_dim`` it is hidden_size / num_attention_heads (else a default of its own).
    ``fixed_base``: for families without ``rope_theta``.
    ``partial``: the part of a head that is turned, where the config does not say.
    ``is_latent``: keys are MLA latents, of which the last ``qk_rope_head_dim`` numbers are turned.
    """

    style: PairStyle
    extra_keys: frozenset[str] = frozenset()
    derives_head_dim: bool = False
    fixed_base: float | None = None
    partial: float = 1.0
    is_latent: bool = False


_NEOX_DERIVED = Family(PairStyle.NEOX, derives_head_dim=True)
_LATENT = Family(PairStyle.GPTJ, frozenset({"qk_rope_head_dim", "qk_nope_head_dim", "rope_interleave"}), is_latent=True)

ROTARY_FAMILIES = {
    "llama": _NEOX_DERIVED,
    "mistral": _NEOX_DERIVED,
    "qwen2": _NEOX_DERIVED,
    "qwen3": Family(PairStyle.NEOX),  # its norm of keys comes before the turn, as in gemma3
    "gemma2": Family(PairStyle.NEOX),
    "gemma3_text": Family(PairStyle.NEOX, frozenset({"rope_local_base_freq"})),
    "phi3": Family(PairStyle.NEOX, frozenset({"original_max_position_embeddings"}), derives_head_dim=True),
    "smollm3": Family(PairStyle.NEOX, frozenset({"no_rope_layers", "no_rope_layer_interval"}), derives_head_dim=True),
    "glm4": Family(PairStyle.GPTJ, partial=0.5),
    "cohere": Family(PairStyle.GPTJ, derives_head_dim=True),
    "gptj": Family(PairStyle.GPTJ, frozenset({"rotary_dim", "n_positions"}), fixed_base=10_000.0),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}

_LEARNED = "a vector for each position is added to the tokens' embeddings, so that the inputs of every layer differ"
_STATE = "a recurrent state holds all tokens before it at once, and no two positions have the same"
_THREE = (
    "each token has three positions (M-RoPE); only where all three move by the same could its keys be turned, "
    "and the config does not say that they do"
)

IMPOSSIBLE_MODELS = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "opt"), _LEARNED),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), _STATE),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text"), _THREE
    ),
    "hunyuan_v1_dense": "keys are weighted number by number (a norm) after they were turned, and turning does not "
    "commute with that unless both numbers of each pair weigh the same",
    "llama4_text": "its chunks of attention are cut at absolute positions, so what a layer saw differs",
}

IMPOSSIBLE_SCALINGS = {
    "dynamic": "frequencies follow the length of the request (dynamic NTK), so keys of one position differ",
    "longrope": "frequencies are other ones for long requests, so keys of one position differ",
    "su": "frequencies are other ones for long requests (longrope), so keys of one position differ",
    "mrope": _THREE,
}

IMPOSSIBLE_LAYERS = dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "conv"), _STATE) | {
    "chunked_attention": "chunks are cut at absolute positions, so what the layer saw differs",
}
