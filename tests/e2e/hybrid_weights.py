"""Weights that make the KV matter: ``python -m tests.e2e.hybrid_weights FOLDER NAME...`` makes one folder a model.

Numbers come from the seed and the parameter's name alone, so that they do not change with the order or the ways in
which a library initialises its modules. A folder is complete or absent.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.e2e.hybrid_models import HYBRID_MODELS, HybridModel

MATRIX_STD = 0.08
"""Four times the usual: with 0.02 the logits hardly depend on what was computed from earlier tokens."""
CONVOLUTION_STD = 0.5
"""Of the short convolutions over 3 or 4 tokens: there are only so many terms to a sum."""
SINK_STD = 1.0
DECAY_LOG_RANGE = (-5.0, -2.0)
"""``A_log`` of a recurrent layer. A usual state forgets within a few tokens; ours remembers hundreds, so that a wrong
one is seen at the end of a prompt."""
STEP_BIAS = -1.0
"""``dt_bias`` of a recurrent layer."""


def _draw(name: str, parameter: Any, seed: int) -> Any:
    """The new value, or None to leave what the model's own class gives: norms, and biases that are zero."""
    import torch

    generator = torch.Generator().manual_seed(random.Random(f"{seed} {name}").getrandbits(63))
    shape, last = tuple(parameter.shape), name.rsplit(".", 1)[-1]
    if last == "A_log":
        return torch.empty(shape).uniform_(*DECAY_LOG_RANGE, generator=generator)
    if last == "dt_bias":
        return torch.full(shape, STEP_BIAS)
    if last == "sinks":
        return torch.empty(shape).normal_(0.0, SINK_STD, generator=generator)
    if ".conv1d." in name or ".conv.conv." in name:
        std = CONVOLUTION_STD if len(shape) > 1 else MATRIX_STD
        return torch.empty(shape).normal_(0.0, std, generator=generator)
    if len(shape) > 1:
        return torch.empty(shape).normal_(0.0, MATRIX_STD, generator=generator)
    return None


def make_model(model: HybridModel, folder: Path) -> None:
    """``config.json`` and the weights, in ``folder``, which must not exist."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(model.seed)
    config = AutoConfig.for_model(model.model_type, **model.config)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            value = _draw(name, parameter, model.seed)
            if value is not None:
                parameter.copy_(value)
    building = folder.with_name(f"{folder.name}.{os.getpid()}")
    made.to(torch.bfloat16).save_pretrained(building)
    try:
        building.rename(folder)
    except OSError:  # another run made it meanwhile
        shutil.rmtree(building)


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        make_model(HYBRID_MODELS[chosen], Path(sys.argv[1]) / chosen)
