"""What the learner sees of packed rows: transformers' own positions and log-probs, and no sample sees another's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.learner.model import run_row
from tasks.learner.protocol import LearnerError
from tasks.learner.vision import RowImages, check_counts, grid_positions
from tests.fixtures.pictures import SEEN
from tests.fixtures.policies import CPU, logprobs_by_transformers, policy_of
from tests.fixtures.seen_rows import packed_row, shown

pytestmark = [pytest.mark.engine, pytest.mark.essential]

PAD = SEEN["image"]
SAMPLES = [shown([(1, 2)], 1), shown([], 2), shown([(2, 1), (1, 1)], 3)]


def logprobs(policy, samples):
    with torch.no_grad():
        return run_row(policy, packed_row(samples), CPU)[0].numpy()


@pytest.fixture(scope="module")
def reference(seeing_model):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(seeing_model).eval()


def of_transformers(model, sample):
    tokens, _, _, pixels, grids = sample
    seen = {}
    if pixels:
        seen = {"pixel_values": torch.tensor(np.concatenate(pixels)), "image_grid_thw": torch.tensor(grids)}
        seen["mm_token_type_ids"] = (torch.tensor([tokens]) == PAD).int()
    return logprobs_by_transformers(model, tokens, **seen).numpy()


def test_packed_samples_are_as_each_alone_and_as_transformers_has_them(world, seeing_model, reference):
    policy = policy_of(seeing_model)
    together = logprobs(policy, SAMPLES)
    alone = np.concatenate([logprobs(policy, [sample]) for sample in SAMPLES])
    expected = np.concatenate([of_transformers(reference, sample) for sample in SAMPLES])
    assert np.abs(together - alone).max() < 1e-5 and np.abs(together - expected).max() < 1e-5


def test_another_picture_moves_its_own_sample_alone(world, seeing_model):
    policy = policy_of(seeing_model)
    tokens, at, counts, pixels, grids = SAMPLES[0]
    other = [(tokens, at, counts, [-each for each in pixels], grids), *SAMPLES[1:]]
    moved = np.abs(logprobs(policy, SAMPLES) - logprobs(policy, other))
    size = len(tokens) - 1
    assert moved[:size].max() > 0.01 and moved[size:].max() < 1e-6


def test_a_token_that_stands_for_an_image_and_was_sampled_is_text(world, seeing_model):
    """The model's own rule, by the token's id, would want an image for it."""
    sample = shown([(1, 2)], 5)
    sample[0][-3] = PAD
    found = logprobs(policy_of(seeing_model), [sample])
    assert np.isfinite(found).all()


@given(st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=3), min_size=1, max_size=3))
@settings(max_examples=20)
def test_positions_are_those_of_transformers(reference, turns):
    samples = [shown(sizes, 0) for sizes in turns]
    row = packed_row(samples)
    if row.images is None:
        return
    ours = grid_positions(row.positions(), row.borders, row.images, 2)
    for sample, begin, end in zip(samples, row.borders, row.borders[1:], strict=False):
        ids = torch.tensor([sample[0]])
        grids = torch.tensor(sample[4]) if sample[4] else None
        theirs, _ = reference.model.get_rope_index(ids, (ids == PAD).int(), image_grid_thw=grids)
        assert (ours[:, begin:end] == theirs[:, 0].numpy()).all()


def test_the_tower_is_trained_where_that_is_asked_for(world, seeing_model):
    for setting, sees in (("frozen", False), ("trained", True)):
        policy = policy_of(seeing_model, vision=setting)
        for samples, of_image in ((SAMPLES, sees), (SAMPLES[1:2], False)):
            policy.zero_grad()
            run_row(policy, packed_row(samples), CPU)[0].sum().backward()
            tower = [p.grad for name, p in policy.named_parameters() if ".visual." in name]
            # Of a row of text too each has a gradient, of zeros: other ranks may have an image, and wait for it.
            assert all((grad is not None) == sees for grad in tower)
            assert any(grad is not None and grad.abs().sum() > 0 for grad in tower) == of_image


def test_what_does_not_fit_is_refused_before_anything_is_trained(world, seeing_model, models):
    policy, blind = policy_of(seeing_model).causal, policy_of(models["a"]).causal
    row = packed_row(SAMPLES[:1])
    check_counts("row", policy, row.images)
    wrong = RowImages(row.images.offsets, (3,), row.images.pixels, row.images.grids)
    with pytest.raises(LearnerError, match=r"\[3\] tokens stand for images of which the model makes \[2\] embeddings"):
        check_counts("row", policy, wrong)
    with pytest.raises(LearnerError, match="takes no images"):
        check_counts("row", blind, row.images)
