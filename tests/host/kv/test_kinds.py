"""The table against the engine's own classes: this is how we notice that the engine has a new one."""

from __future__ import annotations

import dataclasses
import inspect

from meshfusion.host.kv.kinds import BASE_CLASSES, CONTAINER_CLASS, KIND_BY_CLASS, KINDS, REPLICA, Need
from tests.host.kv.spec_classes import source_class_names, spec_classes

NOT_OF_A_LAYER = {*BASE_CLASSES, CONTAINER_CLASS}
GONE_SINCE_0_32 = {"vllm.v1.kv_cache_interface.KpoolTailSpec"}


def test_every_spec_class_of_the_engine_has_a_kind() -> None:
    unclassified = sorted(set(spec_classes()) - set(KIND_BY_CLASS) - NOT_OF_A_LAYER)
    assert not unclassified, f"give these a kind in host/kv/kinds.py: {unclassified}"


def test_every_class_in_the_table_is_one_of_the_engine() -> None:
    assert {*KIND_BY_CLASS, *NOT_OF_A_LAYER} - set(spec_classes()) <= GONE_SINCE_0_32


def test_what_the_source_names_is_what_was_imported() -> None:
    """A class within a function, or behind an import that fails, would be in the source alone."""
    assert {cls.__name__ for cls in spec_classes().values()} == source_class_names()


def test_a_class_that_is_only_derived_from_makes_no_kv() -> None:
    for name in BASE_CLASSES:
        cls = spec_classes()[name]
        assert "max_memory_usage_bytes" not in vars(cls) or "NotImplementedError" in inspect.getsource(
            cls.max_memory_usage_bytes
        )


def test_no_class_has_two_kinds() -> None:
    listed = [name for kind in KINDS for name in kind.classes]
    assert len(listed) == len(set(listed))


def test_twelve_kinds_and_one_of_copies() -> None:
    assert len({kind.name for kind in KINDS}) == 13
    assert REPLICA in KINDS


def test_every_row_says_everything() -> None:
    for kind in KINDS:
        empty = [f.name for f in dataclasses.fields(kind) if f.name != "unserved" and not getattr(kind, f.name)]
        assert set(empty) <= {"is_reusable"}, (kind.name, empty)


def test_what_needs_what_as_the_mission_has_it() -> None:
    needs = {kind.name: kind.need for kind in KINDS}
    assert {name for name, need in needs.items() if need is Need.NOTHING} == {
        "cross_attention", "encoder_only", "scratch_ring", "hidden_state", "replica",
    }  # fmt: skip
    assert {kind.name for kind in KINDS if kind.is_served} == {
        "full_attention", "mla", "sliding_window", "chunked_local", "recurrent_state",
    }  # fmt: skip
