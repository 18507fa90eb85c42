"""Recorded experts are chosen, with the router's gradient; tokens without a record are routed by the learner."""

import numpy as np
import pytest
import torch

from tasks.learner.model import row_loss, run_row
from tasks.learner.protocol import LearnerError
from tests.fixtures.family_models import ROUTED, tiny_family
from tests.fixtures.learner_steps import loaded_trainer, train_step
from tests.fixtures.packed import batches, expert_rows, row_of, sample
from tests.fixtures.policies import CPU, policy_of

pytestmark = pytest.mark.engine

REPLAY = {"device": "cpu", "router_replay": "rollout"}
SAMPLES = [sample(str(length), length, length) for length in (40, 7, 23)]
ALIKE = [sample(name, 40, 5) for name in "ab"]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return tiny_family(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe")


def chosen(policy, experts=None, samples=SAMPLES):
    """The experts of the tokens of a row, (tokens, layers, k), where some are recorded, and the log-probs."""
    found = [[]] * len(policy.layers())
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, given, index=index: found.__setitem__(index, given[1]))
        for index, layer in enumerate(policy.layers())
        if hasattr(layer.mlp, "experts")
    ]
    logprobs, _ = run_row(policy, row_of(samples, experts), CPU)
    for hook in hooks:
        hook.remove()
    routed = [each if len(each) else torch.zeros_like(found[-1]) for each in found]
    return torch.stack(routed, 1).numpy().astype(np.uint8), logprobs


@pytest.mark.essential
@pytest.mark.parametrize("family", ROUTED)
def test_the_recorded_experts_are_chosen_and_routers_have_a_gradient(world, tmp_path, family):
    directory = tiny_family(tmp_path, family)
    policy = policy_of(directory, **REPLAY, gradient_checkpointing=True)
    own, expected = chosen(policy_of(directory))
    layers = own.any((0, 2))
    policy.replay.counts.zero_()  # of the check of the family
    again, logprobs = chosen(policy, own)
    assert (again == own).all() and policy.replay.counts[2] == 0
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    others = np.where(layers[:, None], (own + 3) % 8, 0).astype(np.uint8)
    others[::2] = 0
    forced, _ = chosen(policy, others)
    assert (forced[1::2] == others[1::2]).all(), "as recorded"
    assert (forced[::2, layers.argmax()] == own[::2, layers.argmax()]).all(), "in the first layer as without any record"
    total, *_ = row_loss(policy, row_of(SAMPLES, others), CPU, lambda values, _: values.sum())
    total.backward()
    routers = [p.grad for name, p in policy.named_parameters() if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == layers.sum() and all(grad.abs().max() > 0 for grad in routers)


def test_a_step_counts_choices_and_the_same_records_give_the_same_weights(world, moe, tmp_path):
    rng = np.random.default_rng(0)
    experts = [np.argsort(rng.random((n, 2, 8)))[..., :2].astype(np.uint16) for n in (47, 23)]
    experts[0][:10] = 0
    updates = {}
    for name, settings, given in [
        ("a", REPLAY, 1),
        ("b", REPLAY | {"gradient_checkpointing": True}, 1),
        ("none", REPLAY, 0),
        ("off", {"device": "cpu"}, 1),
    ]:
        trainer = loaded_trainer(world, moe, learning_rate=1e-3, **settings)
        rows, table = expert_rows(experts) if given else None, batches([SAMPLES[:2], SAMPLES[2:]])
        (updates[name],), _ = train_step(trainer, 0, tmp_path / name, table, experts=rows)
    digests = {name: update["weights_sha256"] for name, update in updates.items()}
    assert digests["a"] == digests["b"] != digests["none"] == digests["off"]
    assert updates["a"]["metrics"]["router_absent_fraction"] == pytest.approx(10 / 70)
    shares = [{name: value for name, value in updates[run]["metrics"].items() if "router" in name} for run in "ab"]
    assert shares[0] == shares[1], "recomputed layers are counted once"
    assert 0.5 < updates["a"]["metrics"]["router_differing_fraction"] <= 1.0
    assert updates["none"]["metrics"]["router_absent_fraction"] == 1.0
    assert "router_absent_fraction" not in updates["off"]["metrics"]


def test_prefixes_that_samples_share_are_routed_once(world, moe):
    policy = policy_of(moe, **REPLAY)
    own, expected = chosen(policy_of(moe, shared_prefixes=False), samples=ALIKE)
    again, logprobs = chosen(policy, own, ALIKE)
    assert len(again) < len(own)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_experts_of_other_tokens_and_models_without_experts_are_refused(world, moe, model_directory, tmp_path):
    trainer = loaded_trainer(world, moe, **REPLAY)
    with pytest.raises(LearnerError, match=r"batches row 0: 4 experts, which are not of shape \(70, 1, 2\)"):
        train_step(trainer, 0, tmp_path, batches([SAMPLES]), experts=expert_rows([np.zeros((2, 1, 2), np.uint8)]))
    with pytest.raises(LearnerError, match="the model has no experts"):
        policy_of(model_directory, **REPLAY)


def test_a_router_that_chooses_otherwise_is_refused(world, moe):
    policy = policy_of(moe, **REPLAY)
    own, _ = chosen(policy_of(moe))
    with pytest.raises(LearnerError, match=r"chose 0 times by torch.topk, not once.*Set it to off"):
        run_row(policy, row_of(SAMPLES, own[..., :1]), CPU)
