"""Read from a model's ``config.json`` how the keys of a layer carry their position; what is not known is refused.

Of a plain checkpoint: weights that a converter permuted, as GGUF does for llama, may pair other numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from meshfusion.host.kv.position.families import (
    IMPOSSIBLE_LAYERS,
    IMPOSSIBLE_MODELS,
    IMPOSSIBLE_SCALINGS,
    ROTARY_FAMILIES,
    Family,
)
from meshfusion.host.kv.position.form import (
    KeyPosition,
    Linear,
    Llama3,
    PairStyle,
    PositionFree,
    RotaryForm,
    Scaling,
    Unscaled,
    Yarn,
)
from meshfusion.jbof.errors import UnsupportedError

_NEXT_STEP = "recompute the keys at the other position"
_SPEAKS_OF_POSITIONS = re.compile("rope|rotary|alibi|position|dual_chunk")
_COMMON_KEYS = frozenset(
    {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings"}
)
_ALIBI_MODEL = "bloom"
_LAYER_TYPES = ("full_attention", "sliding_attention")
_LARGEST = 2**63
_EVERY_SCALING = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_REQUIRED = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
_OPTIONAL = {"yarn": frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"})}


def rotary_form_of(config: Mapping[str, Any], layer: int) -> KeyPosition:
    """How keys of ``layer`` (from 0) carry their position in vLLM.

    Args:
        config: of a text model, as in ``config.json``; of a multimodal one, its ``text_config``.

    Raises:
        UnsupportedError: keys of this model or layer cannot be turned, something in the config is not known, or the
            model has no such layer.
    """
    model_type = config.get("model_type")
    if model_type == _ALIBI_MODEL:
        _check_keys(config, frozenset())
        _layer_type(config, layer)
        return PositionFree(_whole(config, "hidden_size") // _whole(config, "n_head"))
    family = ROTARY_FAMILIES.get(str(model_type))
    if family is None:
        if isinstance(config.get("text_config"), Mapping) and str(model_type) not in IMPOSSIBLE_MODELS:
            _refuse(f"model_type {model_type!r} is of more than text", next_step="give the config's text_config")
        known = IMPOSSIBLE_MODELS.get(str(model_type), "how its keys carry their position is not known here")
        _refuse(f"model_type {model_type!r}: {known}")
    _check_keys(config, family.extra_keys)
    layer_type = _layer_type(config, layer)
    head_dim = _head_dim(config, family)
    if _has_no_position(config, layer):
        return PositionFree(head_dim)
    parameters = _rope_parameters(config, family, layer_type)
    scaling = _scaling(parameters, family)
    base = _number(parameters, "rope_theta", family.fixed_base)
    if base <= 1:
        _refuse(f"rope_theta is {base!r}")
    if family.is_latent:
        return _latent_form(config, base, scaling)
    rotary_dim = _rotary_dim(config, parameters, family, head_dim)
    return RotaryForm(head_dim, rotary_dim, base, family.style, scaling)


def _latent_form(config: Mapping[str, Any], base: float, scaling: Scaling) -> RotaryForm:
    """Of what MLA stores, ``kv_lora_rank`` numbers without position and then the turned ones, one head."""
    if config.get("rope_interleave", True) is not True:
        _refuse("rope_interleave is not true; the engine turns as if it were")
    rank, rotary_dim = _whole(config, "kv_lora_rank"), _even(config, "qk_rope_head_dim")
    return RotaryForm(rank + rotary_dim, rotary_dim, base, PairStyle.GPTJ, scaling, first_dim=rank)


def _check_keys(config: Mapping[str, Any], extra: frozenset[str]) -> None:
    for key, value in config.items():
        known = key in _COMMON_KEYS or key in extra
        if _SPEAKS_OF_POSITIONS.search(key) and not known and value not in (None, False):
            _refuse(f"config key {key!r} seems to say something of positions and is not known here")


def _layer_type(config: Mapping[str, Any], layer: int) -> str | None:
    count = _whole(config, "n_layer" if "n_layer" in config else "num_hidden_layers")
    if not 0 <= layer < count:
        _refuse(f"the model has no layer {layer}", next_step=f"give one of its {count} layers, from 0 on")
    if config.get("layer_types") is None:
        return None
    layer_type = str(_of_layer(config, "layer_types", layer, count))
    if layer_type not in _LAYER_TYPES:
        _refuse(f"layer {layer} is of type {layer_type!r}: {IMPOSSIBLE_LAYERS.get(layer_type, 'not known here')}")
    return layer_type


def _has_no_position(config: Mapping[str, Any], layer: int) -> bool:
    """By ``no_rope_layers``, whose entry is 1 for a layer that turns its keys."""
    if config.get("no_rope_layers") is None:
        if config.get("no_rope_layer_interval") is not None:
            _refuse("no_rope_layer_interval without no_rope_layers, which lists the layers")
        return False
    flag = _of_layer(config, "no_rope_layers", layer, _whole(config, "num_hidden_layers"))
    if flag not in (0, 1):
        _refuse(f"no_rope_layers has {flag!r} for layer {layer}, not 0 or 1")
    return bool(flag == 0)


def _head_dim(config: Mapping[str, Any], family: Family) -> int:
    if config.get("head_dim") is not None:
        return _whole(config, "head_dim")
    if config.get("n_embd") is not None:
        return _whole(config, "n_embd") // _whole(config, "n_head")
    if family.derives_head_dim or family.is_latent:
        return _whole(config, "hidden_size") // _whole(config, "num_attention_heads")
    _refuse("the config has no head_dim, and this model has a default of its own")


def _rope_parameters(config: Mapping[str, Any], family: Family, layer_type: str | None) -> Mapping[str, Any]:
    """The layer's parameters in today's form: one mapping that holds ``rope_theta`` too."""
    if config.get("rope_parameters") is None:
        return _older_parameters(config, family, layer_type)
    if config.get("rope_scaling") is not None:
        _refuse("the config has both rope_scaling and rope_parameters")
    new = _mapping(config, "rope_parameters")
    if layer_type is not None and layer_type in new:
        new = _mapping(new, layer_type)
    elif "rope_local_base_freq" in family.extra_keys or any(isinstance(value, Mapping) for value in new.values()):
        _refuse(f"rope_parameters has nothing for layers of type {layer_type!r}")
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None and config[key] != new.get(key):
            _refuse(f"{key} is {config[key]!r} in the config and {new.get(key)!r} in rope_parameters")
    if "rope_local_base_freq" in config:
        _refuse("the config has both rope_local_base_freq and rope_parameters")
    return new


def _older_parameters(config: Mapping[str, Any], family: Family, layer_type: str | None) -> Mapping[str, Any]:
    shared = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    scaling = _mapping(config, "rope_scaling") if config.get("rope_scaling") is not None else {}
    for key in shared.keys() & scaling.keys():
        if shared[key] != scaling[key]:
            _refuse(f"{key} is {shared[key]!r} in the config and {scaling[key]!r} in rope_scaling")
    if "rope_local_base_freq" not in family.extra_keys:
        return {**shared, **scaling}
    # Gemma 3: layers that slide have a base of their own, and rope_scaling is not for them.
    if layer_type is None:
        _refuse("the config has no layer_types, by which this model chooses its base")
    if "partial_rotary_factor" in shared:
        _refuse("partial_rotary_factor does not say for which of this model's two kinds of layers it is")
    if layer_type == "sliding_attention":
        return {"rope_theta": config.get("rope_local_base_freq")}
    return {**shared, **scaling}


def _scaling(parameters: Mapping[str, Any], family: Family) -> Scaling:
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("type", rope_type) != rope_type:
        _refuse(f"rope_type is {rope_type!r} and type is {parameters['type']!r}")
    if not isinstance(rope_type, str) or rope_type not in _REQUIRED:
        _refuse(f"rope_type {rope_type!r}: {IMPOSSIBLE_SCALINGS.get(str(rope_type), 'not known here')}")
    if "mrope_section" in parameters:
        _refuse(f"mrope_section: {IMPOSSIBLE_SCALINGS['mrope']}")
    required = _REQUIRED[rope_type]
    for key in sorted(required - parameters.keys()):
        _refuse(f"rope_type {rope_type!r} without {key!r}")
    for key in sorted(parameters.keys() - required - _OPTIONAL.get(rope_type, frozenset()) - _EVERY_SCALING):
        _refuse(f"rope_type {rope_type!r} with {key!r}, which is not known here")
    match rope_type:
        case "linear":
            return Linear(_number(parameters, "factor"))
        case "llama3":
            return _llama3(parameters)
        case "yarn":
            return _yarn(parameters, family)
        case _:
            return Unscaled()


def _llama3(parameters: Mapping[str, Any]) -> Llama3:
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if low > high:
        _refuse(f"low_freq_factor {low} is above high_freq_factor {high}")
    return Llama3(_number(parameters, "factor"), low, high, _whole(parameters, "original_max_position_embeddings"))


def _yarn(parameters: Mapping[str, Any], family: Family) -> Yarn:
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        _refuse(f"truncate is {truncate!r}")
    factor = _number(parameters, "factor")
    return Yarn(
        factor=factor,
        original_max_positions=_whole(parameters, "original_max_position_embeddings"),
        beta_fast=_number(parameters, "beta_fast", 32.0),
        beta_slow=_number(parameters, "beta_slow", 1.0),
        magnitude=_latent_magnitude(parameters, factor) if family.is_latent else _magnitude(parameters, factor),
        truncate=truncate,
    )


def _magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """vLLM's yarn_scaling_rope.py: both of mscale and mscale_all_dim count, or neither."""
    if "attention_factor" in parameters:
        return _number(parameters, "attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        numerator = _mscale(factor, _number(parameters, "mscale"))
        return numerator / _mscale(factor, _number(parameters, "mscale_all_dim"))
    return _mscale(factor, 1.0)


def _latent_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """vLLM's deepseek_scaling_rope.py, which MLA uses: each has a default."""
    for key in ("attention_factor", "truncate"):
        if key in parameters:
            _refuse(f"{key!r} for MLA, where the engine has other meanings for it")
    all_dim = _number(parameters, "mscale_all_dim") if parameters.get("mscale_all_dim") else 0.0
    return _mscale(factor, _number(parameters, "mscale", 1.0)) / _mscale(factor, all_dim)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rotary_dim(config: Mapping[str, Any], parameters: Mapping[str, Any], family: Family, head_dim: int) -> int:
    if "rotary_dim" in family.extra_keys:
        rotary_dim = _even(config, "rotary_dim")
    else:
        rotary_dim = int(head_dim * _number(parameters, "partial_rotary_factor", family.partial))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        _refuse(f"{rotary_dim} of the {head_dim} numbers of a head are turned: it must be an even number of them")
    return rotary_dim


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive number. Without ``default`` it must be there: engines differ in what they assume."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        _refuse(f"{key} is {value!r}, not a positive number" if key in values else f"{key} is missing")
    return float(value)


def _whole(values: Mapping[str, Any], key: str) -> int:
    number = _number(values, key)
    if number != int(number):
        _refuse(f"{key} is {number!r}, not a whole number")
    return int(number)


def _even(values: Mapping[str, Any], key: str) -> int:
    number = _whole(values, key)
    if number % 2:
        _refuse(f"{key} is {number}, not an even number")
    return number


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values[key]
    if not isinstance(value, Mapping):
        _refuse(f"{key} is {value!r}, not a mapping")
    return value


def _of_layer(config: Mapping[str, Any], key: str, layer: int, layers: int) -> object:
    """The entry for ``layer`` of a list that has one for each."""
    entries = config[key]
    if not isinstance(entries, list | tuple) or len(entries) != layers:
        _refuse(f"{key} is not a list of {layers} entries, one a layer")
    entry: object = entries[layer]
    return entry


def _refuse(reason: str, *, next_step: str = _NEXT_STEP) -> NoReturn:
    raise UnsupportedError(f"keys cannot be turned: {reason}", next_step=next_step)
