"""A policy that two real ranks saved is loaded by one, three and four, weights and optimizer state bit for bit."""

import pytest
from safetensors.numpy import load_file

from tasks.learner.digest import OPTIMIZER_FILE, weights_sha256
from tests.tasks.learner.resharding import through_ranks

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.fixture(scope="module")
def by_two(model_directory, tmp_path_factory):
    made = through_ranks(2, model_directory, tmp_path_factory.mktemp("resharding") / "two")
    assert weights_sha256(made) != weights_sha256(model_directory), "a step was made"
    return made


@pytest.mark.parametrize("number", [1, 3, 4])
def test_what_two_ranks_saved_is_loaded_by_others_bit_for_bit(number, by_two, tmp_path):
    again = through_ranks(number, by_two, tmp_path / "again")
    assert weights_sha256(again) == weights_sha256(by_two)
    before, after = (load_file(place / OPTIMIZER_FILE) for place in (by_two, again))
    assert before.keys() == after.keys() and len(before) > 40
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
