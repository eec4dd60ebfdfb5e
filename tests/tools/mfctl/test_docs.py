from __future__ import annotations

from meshfusion.tools import generate_docs


def test_documents_are_current() -> None:
    for name, text in generate_docs.generate().items():
        assert (generate_docs.DOCS / name).read_text() == text, f"docs/{name} is stale: run tools/generate_docs.py"
