"""Experts that are dealt to ranks: four real ones train, publish and keep what one rank does."""

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
    "two of four": ({"expert_parallel": 2}, {"optimizer": {"type": "muon"}}),
    "all four, recomputed, replayed": (
        {"expert_parallel": 4},
        LOSSES | {"router_replay": "rollout", "gradient_checkpointing": True},
    ),
    "in each of two copies": ({"expert_parallel": 2, "replicas": 2}, {"gradient_checkpointing": "selective"}),
    "below adapters": ({"expert_parallel": 2}, {"lora": {"rank": 2}}),
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_what_was_read(world, models, learner, dtype, tmp_path):
    settings = {"dtype": dtype, "policy_dtype": dtype, "learning_rate": 1e-30}
    alone, place = loaded_trainer(world, models["qwen3_moe"], **BASE | settings), tmp_path / "four"
    expected, *_ = step(alone, tmp_path / "one")
    found, *_ = step(dealt(learner, models["qwen3_moe"], {"expert_parallel": 2}, **settings), place)
    assert found["weights_sha256"] == expected["weights_sha256"] == weights_sha256(place / "p1")
    assert (place / "p1" / SUMS_FILE).read_bytes() == (tmp_path / "one" / "p1" / SUMS_FILE).read_bytes()


def test_other_ranks_go_on_and_kept_state_is_taken_up(world, models, learner, tmp_path):
    place, kept = tmp_path / "four", str(tmp_path)
    dealt(learner, models["qwen3_moe"], {"expert_parallel": 2})
    step(learner, place, save_optimizer=True)
    whole = [step(learner, place, number, state_directory=kept)[0] for number in (1, 2)]
    for state, number in (("", 1), (kept, 2)):
        resume(learner, place / f"p{number}", state_directory=state)
        again, *_ = step(learner, tmp_path / f"again{number}", number)
        assert again["weights_sha256"] == whole[number - 1]["weights_sha256"]
    alone = loaded_trainer(world, models["qwen3_moe"], **BASE)
    resume(alone, place / "p1")
    assert step(alone, tmp_path / "one", 1)[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-5)
