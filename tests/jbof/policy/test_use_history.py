"""The table of uses against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshfusion.jbof.policy.chain import Keys
from meshfusion.jbof.policy.use_history import MAX_USES, WAYS, UseHistory


def keys_of(*values: int) -> Keys:
    return np.array([value * 0x9E3779B97F4A7C15 % 2**64 for value in values], np.uint64)


def use(history: UseHistory, keys: Keys, now_s: float, class_id: int = 7) -> None:
    slots, known = history.find(keys)
    slots[~known] = history.places(keys[~known], slots[known])
    found = history.entries(slots, known)
    uses = np.where(known, found.uses + 1, 1)
    history.put(keys, found, now_s, uses, np.full(len(keys), 4.5), np.full(len(keys), class_id, np.uint8))


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=20, unique=True), max_size=12))
def test_like_a_dictionary_while_there_is_room(prompts: list[list[int]]) -> None:
    history = UseHistory(4096)
    model: dict[int, tuple[int, float]] = {}
    for number, prompt in enumerate(prompts):
        now_s = number * 1.5
        use(history, keys_of(*prompt), now_s)
        for key in prompt:
            model[key] = (model.get(key, (0, 0.0))[0] + 1, now_s)
    keys = keys_of(*range(1, 61))
    slots, known = history.find(keys)
    found = history.entries(slots, known)
    assert [key for key, is_known in zip(range(1, 61), known, strict=True) if is_known] == sorted(model)
    for key, (uses, last_s) in model.items():
        assert found.uses[key - 1] == uses
        assert abs(found.last_use_s[key - 1] - last_s) < 1e-6
        assert found.pace[key - 1] == 4.5
        assert found.classes[key - 1] == 7


def test_the_longest_unused_entry_makes_room() -> None:
    history = UseHistory(WAYS)  # one bucket
    for second in range(WAYS):
        use(history, keys_of(second + 1), float(second))
    use(history, keys_of(1), 10.0)
    use(history, keys_of(99), 11.0)
    assert history.find(keys_of(1, 2, 3, 4, 99))[1].tolist() == [True, False, True, True, True]


def test_keys_of_one_prompt_do_not_displace_each_other() -> None:
    history = UseHistory(WAYS)
    use(history, keys_of(1, 2), 0.0)
    use(history, keys_of(1, 2, 3, 4), 1.0)
    assert history.find(keys_of(1, 2, 3, 4))[1].all()


def test_residence_outlives_uses_and_ends_with_a_new_key() -> None:
    history = UseHistory(WAYS)
    use(history, keys_of(1, 2), 0.0)
    history.set_resident(keys_of(1, 5), resident=True)  # 5 is not known: passed over
    use(history, keys_of(1), 1.0)
    assert sorted(history.sample(len(history))[2].tolist()) == [False, True]
    use(history, keys_of(6, 7, 8, 9), 2.0)
    assert not history.sample(len(history))[2].any()


def test_what_is_held_is_forgotten_last() -> None:
    history = UseHistory(WAYS)
    use(history, keys_of(1, 2, 3, 4), 0.0)
    history.set_resident(keys_of(1, 2), resident=True)
    use(history, keys_of(3, 4), 1.0)
    use(history, keys_of(5), 2.0)
    assert history.find(keys_of(1, 2, 5))[1].all()
    use(history, keys_of(6, 7, 8), 3.0)
    assert history.find(keys_of(1, 2, 6, 7, 8))[1].tolist().count(True) >= 3
    assert not history.find(keys_of(3, 4, 5))[1].any()


def test_dropping_ends_residence() -> None:
    history = UseHistory(64)
    use(history, keys_of(1), 0.0)
    history.set_resident(keys_of(1), resident=True)
    history.set_resident(keys_of(1), resident=False)
    assert not history.sample(len(history))[2].any()


def test_counts_of_uses_have_a_bound() -> None:
    history = UseHistory(64)
    for second in range(MAX_USES + 50):
        use(history, keys_of(1), float(second))
    slots, known = history.find(keys_of(1))
    assert history.entries(slots, known).uses.tolist() == [MAX_USES]
