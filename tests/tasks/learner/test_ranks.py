"""One rank and two real ones make the same gradient of samples that are as uneven as can be, and the same steps of it.

Each component is divided by its tokens of the whole update, so a split changes nothing but the order of a sum. Dividing
by the tokens of a row, a micro-step or a rank instead would show here: no two of them have equally many.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from configs.training import TrainingConfig
from tasks.learner.context_parallel import ContextGroup
from tasks.learner.distributed import ALONE
from tasks.learner.model import load_policy
from tasks.learner.protocol import LearnerError
from tests.tasks.learner import ranks
from tests.tasks.learner.processes import run_ranks

pytestmark = pytest.mark.engine

EXACTNESS = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def figures(model_directory, seeing_model, tmp_path_factory):
    """A function that returns what so many ranks find together, of layers as they are written or `compiled`."""

    @cache
    def of_ranks(number, what="as written"):
        out = tmp_path_factory.mktemp("ranks") / "found.pt"
        run_ranks(number, "tests.tasks.learner.ranks", model_directory, seeing_model, out, what)
        return torch.load(out)

    return of_ranks


@pytest.fixture(scope="module", params=EXACTNESS, ids=str)
def one(request, world, model_directory):
    """The policy on one rank, and its figures with every sample in a row of its own."""
    policy = ranks.policy_in(model_directory, request.param)
    return policy, request.param, ranks.gradient(policy, ranks.APART, world)


def assert_same(found, expected, dtype):
    assert found.keys() == expected.keys()
    assert expected["gradient"].abs().max() > 1e-3
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1.0 if name != "gradient" else 0.0)
        torch.testing.assert_close(found[name] / scale, value / scale, rtol=0, atol=EXACTNESS[dtype], msg=name)


@pytest.mark.parametrize("split", ranks.SPLITS)
def test_two_ranks_make_the_gradient_of_one(one, figures, split):
    _, dtype, alone = one
    assert_same(figures(2)[f"{split} {dtype}"], alone, dtype)


def test_two_ranks_compare_sequences_of_one_and_of_the_other(figures, model_directory, world):
    expected = ranks.gradient(ranks.policy_in(model_directory, torch.float64), ranks.APART, world, "pairs")
    assert_same(figures(2)["pairs torch.float64"], expected, torch.float64)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [2, 4])
def test_compiled_layers_make_it_on_two_and_on_four_ranks(figures, number, model_directory, world):
    compiled = figures(number, "compiled")
    expected = ranks.gradient(ranks.policy_in(model_directory, torch.float32), ranks.APART, world)
    for split in ranks.SPLITS:
        assert_same(compiled[f"{split} compiled"], expected, torch.float32)
    # Of all layers one, of the last norm one, of losses, metrics and head four; these again where there is one token,
    # and metrics where there is one segment: 0 and 1 are no symbols.
    assert compiled["graphs"] == 1 + 1 + 4 + 4 + 1, "of all rows and splits"
    shared = ranks.gradient(ranks.policy_in(model_directory, torch.float32), ranks.ALL_IN_ONE, world)
    assert_same(compiled["shared and compiled"], shared, torch.float32)


def test_two_ranks_make_the_gradient_of_products_in_8_bits(figures, model_directory, world):
    """Scales are those of whole rows, whatever part of a matrix a rank holds."""
    expected = ranks.gradient(ranks.half_policy(model_directory, fp8=True), ranks.APART, world)
    plain = ranks.gradient(ranks.half_policy(model_directory), ranks.APART, world)
    assert (expected["gradient"] - plain["gradient"]).abs().max() > 1e-3
    assert_same(figures(2)["in 8 bits"], expected, torch.float32)


@pytest.mark.parametrize("name", ranks.OPTIMIZERS)
def test_two_ranks_make_the_steps_of_one(world, model_directory, figures, name):
    """Of the same gradients, bit for bit: Muon's matrices are made whole, so that the number of ranks does not round.

    Where AdamW is at work, torch rounds the last elements of a shard in another way than those before.
    """
    expected, two = ranks.three_steps(model_directory, name), figures(2)
    assert two[name].keys() == expected.keys()
    whole = {key.removeprefix("momentum_buffer.") for key in expected if key.startswith("momentum_buffer.")}
    assert any(key.endswith("proj.weight") for key in whole)
    for key, value in expected.items():
        if key.removeprefix("momentum_buffer.") in whole:
            assert torch.equal(two[name][key], value), key
        torch.testing.assert_close(two[name][key], value, rtol=1e-6, atol=1e-9)


def shared(found, model_directory, world, arrangements):
    """Compare ranks that share rows, and copies of the weights, with one rank."""
    policy = ranks.policy_in(model_directory, torch.float64)
    for loss in ranks.LOSSES:
        expected = ranks.gradient(policy, ranks.ALL_IN_ONE, world, loss)
        for arrangement in arrangements:
            assert_same(found[f"{arrangement} {loss}"], expected, torch.float64)


def test_two_ranks_at_one_row_and_two_copies_of_the_weights_make_it(figures, model_directory, world):
    shared(figures(2), model_directory, world, ["1 x 2", "2 x 1", "2 x 2"])


def test_two_ranks_make_the_gradient_of_rows_with_pictures(figures, seeing_model, world):
    """One of them has text alone, and its tower waits for that of the other."""
    expected = ranks.seen(seeing_model, world)
    assert expected["tower"].abs().max() > 1e-3
    assert_same(figures(2)["seen"], expected, torch.float32)


def test_what_one_rank_refuses_to_load_all_refuse(figures):
    assert "nowhere is not a model directory" in figures(2)["refused"]


@pytest.mark.nightly
def test_four_ranks_at_one_row_or_two_and_copies_of_the_weights_make_it(figures, model_directory, world):
    """Of two heads of keys and values, four ranks compute each twice."""
    shared(figures(4), model_directory, world, ["1 x 4", "1 x 2", "2 x 1", "4 x 1", "2 x 2"])


def test_heads_that_cannot_be_dealt_are_refused(model_directory):
    context = ContextGroup(None, 0, 3)
    with pytest.raises(LearnerError, match="the model has 4 attention heads and 2 of keys"):
        load_policy(model_directory, TrainingConfig(), ranks.CPU, world=replace(ALONE, context=context))
