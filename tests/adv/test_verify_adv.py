"""The acceptance test of an installation with several ranks."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from meshfusion.jbof.errors import MeshFusionError
from meshfusion.tools.engine_process import _cause
from meshfusion.tools.mfctl.verify_command import verify


def test_several_ranks_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = ["--model", str(tmp_path), "--engine-option", "tensor_parallel_size=2"]
    done = CliRunner().invoke(verify, arguments)
    assert isinstance(done.exception, MeshFusionError), done.exception
    assert "tensor_parallel_size" in str(done.exception)


def test_a_traceback_that_was_dealt_with_is_not_the_cause(tmp_path: Path) -> None:
    """As vLLM 0.32 logs it with skip_tokenizer_init."""
    mark = "(MainProcess pid=25357) WARNING 11-30 15:06:41 [base.py:380] "
    log = tmp_path / "log"
    log.write_text(
        f"{mark}Traceback (most recent call last):\n{mark}    raise ValueError('Tokenizer')\n"
        f"{mark}ValueError: Tokenizer not available when `skip_tokenizer_init=True`\n"
        "Traceback (most recent call last):\n  File \"/e.py\", line 198, in _pages\n    held = layers[name]\n"
        "KeyError: 'model.layers.0.self_attn.attn'\n"
    )
    assert "KeyError" in _cause(log)[0]
