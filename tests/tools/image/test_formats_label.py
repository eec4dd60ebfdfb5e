"""An image tells the formats of the commit it was built from, or nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshfusion.dpu.formats import IMAGE_LABEL, parse_formats
from meshfusion.dpu.store.records import INDEX_VERSION
from meshfusion.jbof.format import FORMAT_VERSION
from meshfusion.tools.image.formats_label import formats_label
from meshfusion.tools.image.source import Source
from meshfusion.tools.image.tree import text_file

ROOT = Path(__file__).resolve().parents[3]
PATHS = ("dpu/formats.py", "dpu/api/types.py", "dpu/store/records.py", "jbof/format.py")


def test_the_label_is_that_of_the_same_code_only() -> None:
    same = Source("0" * 40, 0, {path: text_file(path, (ROOT / path).read_text()) for path in PATHS})
    told = parse_formats(formats_label(same, "1.2+g0")[IMAGE_LABEL])
    assert told is not None
    assert (told.version, told.medium, told.index) == ("1.2+g0", FORMAT_VERSION, INDEX_VERSION)
    for path in PATHS:
        other = same.files | {path: text_file(path, (ROOT / path).read_text() + "# otherwise\n")}
        assert formats_label(replace(same, files=other), "1.2+g0") == {}
        assert formats_label(replace(same, files={p: e for p, e in same.files.items() if p != path}), "1") == {}
