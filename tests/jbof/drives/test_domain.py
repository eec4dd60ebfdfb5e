from __future__ import annotations

from typing import Any

import pytest
import yaml

from meshfusion.jbof.drives.domain import DomainMap, FailureDomain, Level, domain_map
from meshfusion.jbof.errors import ConfigError

FOUND = FailureDomain("S1", port="0000:00:03.0", dpu="node-a", enclosure="node-a")


def test_the_configuration_wins_and_the_serial_number_most() -> None:
    text = """
        all: {rack: r1, enclosure: shelf-0}
        slots: {7: {enclosure: shelf-2, dpu: dpu-1}}
        serials: {S1: {dpu: dpu-0}}
    """
    names = domain_map(yaml.safe_load(text))
    assert names.placed(FOUND, serial="S1", slot="7") == FailureDomain("S1", "0000:00:03.0", "dpu-0", "shelf-2", "r1")
    assert names.placed(FOUND, serial="S2", slot="8") == FailureDomain("S1", "0000:00:03.0", "node-a", "shelf-0", "r1")
    assert DomainMap().placed(FOUND, serial="S1", slot="7") is FOUND


def test_what_one_failure_takes() -> None:
    other = FailureDomain("S2", port="0000:00:04.0", dpu="node-a", enclosure="node-a", rack="r1")
    assert not FOUND.shares(other, Level.DRIVE)
    assert not FOUND.shares(other, Level.PORT)
    assert FOUND.shares(other, Level.DPU)
    assert FOUND.shares(other, Level.RACK)  # unknown is taken as shared
    assert str(other) == "r1/node-a/node-a/0000:00:04.0/S2"
    assert str(FailureDomain("S1")) == "S1"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "the file is no mapping"),
        ({"slot": {}}, "has slot"),
        ({"slots": []}, "slots is no mapping"),
        ({"slots": {"7": "r1"}}, "slots.7 is no mapping"),
        ({"all": {"drive": "x"}}, "all has drive"),
        ({"serials": {"S1": {"shelf": "x"}}}, "serials.S1 has shelf"),
        ({"all": {"rack": ""}}, "all.rack is ''"),
        ({"all": {"rack": ["r"]}}, "all.rack is"),
    ],
)
def test_what_is_wrong_is_named(document: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        domain_map(document)
    assert said in caught.value.message
