from __future__ import annotations

from meshfusion.dpu.api import limits
from meshfusion.tools import generate_docs


def test_documents_are_current() -> None:
    for name, text in generate_docs.generate().items():
        assert (generate_docs.DOCS / name).read_text() == text, f"docs/{name} is stale: run tools/generate_docs.py"


def test_every_limit_of_a_request_is_in_the_documents() -> None:
    """But for those of the numbers themselves."""
    bounds = {value for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert {most for _, most, _ in limits.LIMITS} == bounds - {limits.MAX_UINT32, limits.MAX_INT}
    document = generate_docs.generate()["mfctl.md"]
    assert "| chunks of a reservation | 4,096 | " in document
    assert "for: 65,536 divided by the count of KV groups" in document


def test_no_default_is_a_word_of_the_library() -> None:
    document = generate_docs.generate()["mfctl.md"]
    assert "| `--segment-size SIZE` | 64MiB, or 1/2048 of the size where that is more | " in document
    for word in ("Sentinel", "INTEGER", "FLOAT", "None |"):
        assert word not in document
