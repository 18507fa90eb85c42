"""The tables of other trainers: every key of theirs that is published is known, every setting of ours exists."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import load
from configs.trainers.prime_rl import TRAINER as PRIME_RL
from configs.trainers.translation import ForeignTrainer, config_of, flat, is_setting, matches, translate
from configs.trainers.trl import TRAINER as TRL

HERE = Path(__file__).parent
# Arguments of GRPOConfig, its bases and TRL's script (f2cd577); keys of prime-rl's published configs, 0.5 to 559b447.
PUBLISHED = {
    name: (trainer, (HERE / file).read_text(encoding="utf-8").split())
    for name, trainer, file in (("trl", TRL, "grpo_arguments.txt"), ("prime_rl", PRIME_RL, "prime_rl_keys.txt"))
}
trainers = pytest.mark.parametrize("trainer", [TRL, PRIME_RL], ids=lambda trainer: trainer.name)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5000),
    st.floats(0, 2),
    st.sampled_from(["linear", "cosine", "dapo", "steps", "adamw", "auto", "x y", "", "inf"]),
    st.just([]),
    st.just({}),
    st.just({"a": 1}),
    st.just(["q_proj"]),
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_key_is_mapped_or_has_no_counterpart(name: str) -> None:
    trainer, keys = PUBLISHED[name]
    assert len(keys) > 200
    assert [key for key in keys if not any(matches(key.replace("*", "0"), old) for old in trainer.known)] == []


@trainers
def test_every_setting_of_a_table_is_one_of_ours(trainer: ForeignTrainer) -> None:
    assert [row.new for row in trainer.rows if not is_setting(row.new)] == []
    assert max(Counter(row.new for row in trainer.rows).values()) == 1
    assert not is_setting("training.learning_rat") and not is_setting("training.loss.clip")


def test_no_argument_of_trl_is_both_mapped_and_missing() -> None:
    mapped = {old for row in TRL.rows for old in row.old}
    missing = Counter(old for entry in TRL.missing for old in entry.old)
    assert mapped & set(missing) == set() and max(missing.values()) == 1


@trainers
@settings(max_examples=20)
@given(data=st.data())
def test_whatever_is_given_what_comes_out_loads(trainer: ForeignTrainer, data: st.DataObject) -> None:
    _, published = next(each for each in PUBLISHED.values() if each[0] is trainer)
    keys = st.sampled_from([key.replace("*", "0") for key in published])
    found = translate(data.draw(st.dictionaries(keys, VALUES, max_size=8)), trainer)
    config = load(base=config_of(found.settings))
    assert config.environments and found.unknown == []


@trainers
def test_no_key_is_lost_in_silence(trainer: ForeignTrainer) -> None:
    _, published = next(each for each in PUBLISHED.values() if each[0] is trainer)
    for key in (each.replace("*", "0") for each in published):
        found = translate({key: 3}, trainer)
        places = [each.origin for each in (*found.carried, *found.renamed)] + [each.keys for each in found.missing]
        if ".taskset" in key or ".args" in key:  # whole tables, which a number is not
            continue
        assert any(key in place for place in [*places, *found.idle]) or _says_nothing(trainer, key), key


def _says_nothing(trainer: ForeignTrainer, key: str) -> bool:
    """Whether a row takes the key and has nothing to write for 3: another key decides, or the default is the same."""
    return any(matches(key, old) and row.value is not None for row in trainer.rows for old in row.old)


@trainers
def test_a_key_that_is_not_known_is_listed(trainer: ForeignTrainer) -> None:
    assert translate({"learning_rte": 1}, trainer).unknown == ["learning_rte"]


def test_flat_numbers_the_items_of_lists() -> None:
    tree: dict[str, Any] = {"a": {"b": 1}, "c": [{"d": 2}, {"d": [3]}], "e": {}}
    assert dict(flat(tree)) == {"a.b": 1, "c.0.d": 2, "c.1.d": [3], "e": {}}
