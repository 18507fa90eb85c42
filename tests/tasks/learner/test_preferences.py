"""The gradient of the preference losses is that of plain PyTorch, wherever the sequences of a pair lie."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from configs.losses import DpoLoss, KtoLoss
from tasks.learner.distributed import ALONE
from tasks.learner.loop import accumulate_gradients
from tasks.learner.loss import Objective
from tasks.learner.preferences import weigh_samples
from tests.fixtures.learner_steps import load_first, new_trainer
from tests.fixtures.packed import batch_of, batches, padding, sample, stored_batch
from tests.fixtures.policies import CPU, assert_near, flat_gradient

LABELS = {
    **{"a/0": ("one", 1.0), "b/0": ("one", -1.0), "c/0": ("two", -1.0), "c/1": ("two", -1.0), "d/0": ("two", 1.0)},
    **{"e/0": ("three", 1.0), "f/0": ("three", -1.0)},
}
"""Three pairs; the rejected trace of the second has two branches."""
SAMPLES = [sample(name, 5 + 3 * number, number + 1) for number, name in enumerate(LABELS)]
ROWS = [[SAMPLES[0], SAMPLES[3]], [padding(2)], [SAMPLES[5]], [SAMPLES[4], SAMPLES[1], SAMPLES[6]], [SAMPLES[2]]]
LOSSES = [
    *(DpoLoss(beta=0.3), DpoLoss(beta=2.0, label_smoothing=0.2)),
    *(KtoLoss(beta=0.3), KtoLoss(beta=1.5, desirable_weight=1.3, undesirable_weight=0.7)),
]


@pytest.fixture(scope="module")
def plain(model_directory):
    """The model as transformers computes it, in float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float64, attn_implementation="eager")


def plain_sums(model, samples):
    """Return S of each trace: log pi - log pi_ref over its weighted tokens, by group and label, from whole logits."""
    sums = {}
    for each in samples:
        ids = torch.tensor([each.token_ids])
        logits = model(input_ids=ids, use_cache=False).logits
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        streams = {name: torch.tensor(values, dtype=torch.float64)[1:] for name, values in each.streams.items()}
        ratio = (streams["rl_weights"] * (logprobs - streams["logprobs"] - streams["advantages"])).sum()
        label = LABELS[each.sample_id]
        sums[label] = sums.get(label, 0.0) + ratio
    return sums


def plain_loss(sums, loss):
    chosen, rejected = (torch.stack([sums[group, sign] for group in ("one", "two", "three")]) for sign in (1.0, -1.0))
    if isinstance(loss, DpoLoss):
        logits, smooth = loss.beta * (chosen - rejected), loss.label_smoothing
        return (-logsigmoid(logits) * (1 - smooth) - logsigmoid(-logits) * smooth).mean()
    baseline = torch.cat([chosen, rejected]).mean().clamp(min=0).detach()
    desirable = loss.desirable_weight * (1 - torch.sigmoid(loss.beta * (chosen - baseline)))
    undesirable = loss.undesirable_weight * (1 - torch.sigmoid(loss.beta * (baseline - rejected)))
    return torch.cat([desirable, undesirable]).mean()


def near_reference(model, samples, shift=0.05):
    """Return the samples with a reference near the policy, so that no sigmoid is saturated."""
    found = []
    for number, each in enumerate(samples):
        weights = np.array(each.streams["rl_weights"], np.float32)
        zeroed = replace(each, streams=each.streams | {"logprobs": 0 * weights, "advantages": 0 * weights})
        with torch.no_grad():
            (total,) = plain_sums(model, [zeroed]).values()
        reference = (total.item() + (number - 2) * shift) / weights.sum() * weights
        streams = {"logprobs": (reference - weights).tolist(), "advantages": weights.tolist()}
        found.append(replace(each, streams=each.streams | streams))
    return found


@pytest.mark.engine
@pytest.mark.essential
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_gradient_is_that_of_plain_pytorch_in_any_rows(exact_policy, plain, loss):
    samples = near_reference(plain, SAMPLES)
    plain.zero_grad()
    sums = plain_sums(plain, samples)
    expected = plain_loss(sums, loss)
    expected.backward()
    gradient = flat_gradient(plain)
    assert gradient.abs().max() > 1e-3
    by_name = {each.sample_id: each for each in samples}
    packed = [[by_name.get(each.sample_id, each) for each in row] for row in ROWS]
    for rows in (packed, [[each] for each in samples], [samples]):
        exact_policy.zero_grad()
        totals = accumulate_gradients(exact_policy, batch_of(rows), Objective(loss), ALONE, CPU, labels=LABELS)
        assert_near(flat_gradient(exact_policy), gradient, 1e-6)
        assert totals.sums["rl_loss"] == pytest.approx(expected.item(), abs=1e-6)
    right = [bool(sums[group, 1.0] > sums[group, -1.0]) for group in ("one", "two", "three")]
    assert totals.sums["preference_accuracy"] == pytest.approx(sum(right) / 3)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_slopes_are_derivatives(loss):
    ratios = {name: 0.4 * (number - 2) for number, name in enumerate(LABELS)}
    tensors = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in ratios.items()}
    sums = {}
    for name, value in tensors.items():
        sums[LABELS[name]] = sums.get(LABELS[name], 0.0) + value
    expected = plain_loss(sums, loss)
    expected.backward()
    weighed = weigh_samples(ratios, LABELS, loss)
    assert weighed.figures["rl_loss"] == pytest.approx(expected.item(), rel=1e-12)
    for name, tensor in tensors.items():
        assert weighed.slopes[name] == pytest.approx(tensor.grad.item(), rel=1e-9)


def test_a_sequence_without_its_partner_weighs_nothing_in_dpo():
    weighed = weigh_samples({"a/0": 3.0, "c/0": 1.0, "d/0": 2.0}, LABELS, DpoLoss(beta=1.0))
    alone = weigh_samples({"c/0": 1.0, "d/0": 2.0}, LABELS, DpoLoss(beta=1.0))
    assert weighed.slopes == {"a/0": 0.0, **alone.slopes} and weighed.figures == alone.figures
    extreme = weigh_samples({"c/0": 1e4, "d/0": -1e4}, LABELS, DpoLoss(beta=1.0))
    assert extreme.figures["rl_loss"] == 2e4 and extreme.slopes == {"c/0": 1.0, "d/0": -1.0}


@pytest.mark.engine
def test_steps_on_a_pair_separate_it_and_say_so(world, model_directory, tmp_path):
    """The learner as its service calls it, with the labels as they come over the wire."""
    trainer = new_trainer(world, learning_rate=1e-3, warmup_steps=0, loss={"type": "dpo", "beta": 0.5})
    load_first(trainer, model_directory)
    rows = batches([[SAMPLES[0]], [SAMPLES[1]]], [0, 0])
    batch = stored_batch(tmp_path / "rows", rows).to_json()
    labels, measured = {name: [*LABELS[name]] for name in ("a/0", "b/0")}, []
    for step in range(3):
        keys = {"policy_key_in": f"p{step}", "policy_key_out": f"p{step + 1}"}
        place = {"directory_out": str(tmp_path / keys["policy_key_out"]), "save_optimizer": False}
        measured += trainer.train(batch=batch, step=step, labels=labels, **keys, **place)
    margins = [update["metrics"]["preference_margin"] for update in measured]
    assert margins == sorted(margins) and margins[-1] > margins[0] + 0.01
    losses = [-torch.tensor(margin).sigmoid().log().item() for margin in margins]
    assert [update["rl_loss"] for update in measured] == pytest.approx(losses, rel=1e-4)
    assert [update["loss"] for update in measured] == [update["rl_loss"] for update in measured]
