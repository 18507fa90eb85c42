"""Experts that are dealt to ranks: four real ones train, publish and keep what one rank does."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tasks.learner.client import Learner
from tasks.learner.digest import OPTIMIZER_FILE, weights_sha256
from tasks.runtime.weights_sum import SUMS_FILE
from tests.fixtures.family_models import tiny_family
from tests.fixtures.learner_steps import configure, load_first, loaded_trainer, resume, train_step
from tests.fixtures.packed import batches, expert_rows, sample
from tests.tasks.learner.processes import process

pytestmark = pytest.mark.engine

BASE = {"device": "cpu", "learning_rate": 1e-3}
ROWS = batches([[sample(f"{row}{n}", 9 + 7 * row + n, 10 * row + n) for n in (0, 1)] for row in range(5)])
"""Rows of different lengths, whose number is no multiple of the ranks'."""
EXPERTS = [
    np.argsort(np.random.default_rng(0).random((int(borders[-1]), 2, 8)))[..., :2].astype(np.uint8)
    for borders in ROWS["cu_seqlens"].to_pylist()
]
LOSSES = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01}
VARIANTS = {
    "two of four": ({"expert_parallel": 2}, {}),
    "all four, recomputed, replayed": (
        {"expert_parallel": 4},
        LOSSES | {"router_replay": "rollout", "gradient_checkpointing": True},
    ),
    "in each of two copies": ({"expert_parallel": 2, "replicas": 2}, {"gradient_checkpointing": "selective"}),
    "of a shared row": ({"expert_parallel": 2, "context_parallel": 2}, LOSSES),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("experts")
    return {family: tiny_family(place / family, family) for family in ("qwen3_moe", "gpt_oss")}


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """A learner of four ranks."""
    with process(tmp_path_factory.mktemp("four"), 4) as (_, report):
        yield Learner(report["address"])


def dealt(learner, model, parallel, **settings):
    """Return the learner with a model as its policy."""
    configure(learner, 4, parallel=parallel, **BASE | settings)
    load_first(learner, model)
    return learner


def step(learner, directory, number=0, replayed=False, **options):
    """Train on the rows; return the update, log-probs, and moments by name, where they are saved."""
    experts = expert_rows(EXPERTS) if replayed else None
    (update,), statistics = train_step(learner, number, directory, ROWS, experts=experts, **options)
    saved = directory / f"p{number + 1}" / OPTIMIZER_FILE
    return update, np.concatenate(statistics["logprobs"].to_pylist()), load_file(saved) if saved.exists() else {}


@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_make_the_gradient_of_one(world, models, learner, name, tmp_path):
    parallel, settings = VARIANTS[name]
    model = models["gpt_oss" if name == "in each of two copies" else "qwen3_moe"]
    options = {"save_optimizer": True, "replayed": "router_replay" in settings}
    alone = loaded_trainer(world, model, **BASE | settings)
    expected, logprobs, of_one = step(alone, tmp_path / "one", **options)
    found, by_four, of_four = step(dealt(learner, model, parallel, **settings), tmp_path / "four", **options)
    np.testing.assert_allclose(by_four, logprobs, rtol=0, atol=1e-5)
    for figure in ("loss", "grad_norm", "entropy"):
        assert found[figure] == pytest.approx(expected[figure], rel=1e-5)
    assert of_four.keys() == of_one.keys()
    for name, moment in of_one.items():  # the first one is a tenth of the gradient
        assert np.abs(of_four[name] - moment).max() <= 1e-5 * max(np.abs(moment).max(), 1e-3), name
    # A rank without a row has two tokens without a record.
    names = [name for name in expected["metrics"] if "router" in name and "absent" not in name]
    assert len(names) == options["replayed"] + 2 * ("router_z_loss_coef" in settings)
    for figure in names:
        assert found["metrics"][figure] == pytest.approx(expected["metrics"][figure], rel=1e-5)
    # As one rank goes on from it, bit for bit.
    resume(alone, tmp_path / "four" / "p1")


@pytest.mark.parametrize(
    "precision", [{}, {"dtype": "bfloat16", "policy_dtype": "bfloat16"}], ids=["float32", "rounded"]
)
def test_what_is_published_is_what_was_read(world, models, learner, precision, tmp_path):
    settings = precision | {"learning_rate": 1e-30}
    alone, places = loaded_trainer(world, models["qwen3_moe"], **BASE | settings), (tmp_path / "one", tmp_path / "four")
    expected = step(alone, places[0])[0]
    found = step(dealt(learner, models["qwen3_moe"], {"expert_parallel": 2}, **settings), places[1])[0]
    assert found["weights_sha256"] == expected["weights_sha256"] == weights_sha256(places[1] / "p1")
    sums = [json.loads((place / "p1" / SUMS_FILE).read_text()) for place in places]
    assert sums[0] == sums[1]


def test_other_ranks_go_on_and_kept_state_is_taken_up(world, models, learner, tmp_path):
    two, place = {"expert_parallel": 2}, tmp_path / "four"
    dealt(learner, models["qwen3_moe"], two)
    step(learner, place, save_optimizer=True)
    (tmp_path / "kept").mkdir()
    whole = [step(learner, place, 1, state_directory=str(tmp_path / "kept"))[0], step(learner, place, 2)[0]]
    for name, state, number in (("saved", "", 1), ("kept", str(tmp_path / "kept"), 2)):
        resume(learner, place / f"p{number}", state_directory=state)
        assert step(learner, tmp_path / name, number)[0]["weights_sha256"] == whole[number - 1]["weights_sha256"]
    alone = loaded_trainer(world, models["qwen3_moe"], **BASE)
    resume(alone, place / "p1")
    found, expected = step(alone, tmp_path / "one", 1)[0], whole[0]
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
