"""Auxiliary losses of routers are those of transformers, of the tokens that count, and gone where they are off."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.learner.model import run_row
from tasks.learner.protocol import LearnerError
from tasks.learner.router_losses import FIGURES
from tests.fixtures.family_models import FAMILIES, tiny_family
from tests.fixtures.learner_steps import loaded_trainer, train_step
from tests.fixtures.packed import batches, padding, row_of, sample
from tests.fixtures.policies import CPU, policy_of

pytestmark = pytest.mark.engine

COEFS = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
BASE = {"device": "cpu", "learning_rate": 1e-3}
ALIKE = [sample("a", 47, 3), sample("b", 23, 9)]
ALIKE[1].token_ids[:12] = ALIKE[0].token_ids[:12]
"""Samples that begin alike."""


def by_transformers(model, samples):
    """Both losses, in float64 but for transformers' own sums, of the tokens that predict one with weight."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    routed = []
    for each in samples:
        said = model(input_ids=torch.tensor([each.token_ids]), output_router_logits=True).router_logits
        routed.append(torch.stack(said)[:, max(1, len(each.token_ids) // 2) - 1 : -1])
    layers = torch.cat(routed, 1)
    load = torch.stack([load_balancing_loss_func((layer,), layer.shape[-1], 2) for layer in layers]).mean()
    return load, layers.logsumexp(-1).square().mean()


@pytest.mark.essential
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_next"])
def test_losses_and_gradients_are_those_of_transformers(world, family, tmp_path):
    directory = tiny_family(tmp_path, family)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **eager)
    expected = by_transformers(model, ALIKE)
    (0.5 * expected[0] + 0.1 * expected[1]).backward()
    policy = policy_of(directory, **COEFS, gradient_checkpointing=True)
    row = row_of(ALIKE)
    policy.router_losses.total = len(row.weighted)
    run_row(policy, row, CPU)
    loss, found = policy.router_losses.share(len(row.weighted), None)
    loss.backward()
    assert [float(each) for each in found.values()] == pytest.approx([float(each) for each in expected], rel=1e-5)
    gradients = dict(policy.causal.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            torch.testing.assert_close(gradients[name].grad.double(), parameter.grad, rtol=1e-3, atol=1e-5)


def test_only_tokens_with_weight_count_however_rows_are_computed(world, tmp_path):
    directory, digests = tiny_family(tmp_path / "model", "qwen3_moe"), []

    def figures(settings, *rows):
        trainer, place = loaded_trainer(world, directory, **BASE | settings), tmp_path / str(len(digests))
        (update,), _ = train_step(trainer, 0, place, batches(rows))
        digests.append(update["weights_sha256"])
        return [value for name, value in update["metrics"].items() if name in FIGURES]

    load, size = figures(COEFS, ALIKE)
    assert figures(COEFS | {"shared_prefixes": False}, ALIKE) == pytest.approx([load, size], rel=1e-5)
    recomputed = COEFS | {"gradient_checkpointing": "selective"}
    assert figures(recomputed, ALIKE, [padding(9)]) == pytest.approx([load, size], rel=1e-5)
    assert figures({}, ALIKE) == []
    # Experts are balanced within a row, while the other loss is one of tokens.
    apart = figures(COEFS, ALIKE[:1], ALIKE[1:])
    assert apart[1] == pytest.approx(size, rel=1e-5) and apart[0] > load * 1.001
    assert digests[3] not in digests[:3]


def test_a_family_without_such_a_loss_is_refused(world, tmp_path):
    with pytest.raises(LearnerError, match=r"transformers has no such loss of Glm4MoeForCausalLM.*Leave both 0"):
        policy_of(tiny_family(tmp_path, "glm4_moe"), **COEFS)


def test_a_family_whose_routers_say_their_choice_otherwise_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "granitemoe", FAMILIES["mixtral"])
    directory = tiny_family(tmp_path, "granitemoe")
    with pytest.raises(LearnerError, match=r"GraniteMoeTopKRouter cannot be seen.*Leave both 0"):
        policy_of(directory, **COEFS)
