"""The engine answers with the experts that it chose: those of the model, 0 where no forward pass was made."""

import base64
import io

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.inference.engine.command import CPU_BLOCK_TOKENS
from tests.fixtures.engine_calls import answers_to, body, in_flight, paused
from tests.fixtures.family_models import tiny_family
from tests.fixtures.hosts import engine_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny_family(tmp_path_factory.mktemp("capture") / "model", "qwen3_moe")


@pytest.fixture(scope="module")
def capturing(place):
    with engine_of(place, place.parent / "report.json", returns_experts=True) as engine:
        engine.serve("first", place)
        yield engine


def experts_of(answer):
    """The array of an answer."""
    (choice,) = answer.content["choices"]
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


def chosen_by(directory, tokens):
    """What transformers chooses for tokens, (tokens, layers, k), sorted."""
    model, found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: found.append(given[1]))
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    return torch.stack(found, 1).sort(-1).values.numpy()


@pytest.mark.essential
def test_experts_are_those_of_the_model_also_after_a_pause(capturing, place):
    bodies = [body(number, max_tokens=60, ignore_eos=True) for number in range(4)]
    with in_flight(capturing, bodies) as answers, paused(capturing):  # states are computed again
        pass
    for asked, answer in zip(bodies, [each.result() for each in answers], strict=True):
        tokens, experts = [*asked["token_ids"], *answer.tokens], experts_of(answer)
        assert experts.dtype == np.uint8 and experts.shape == (len(tokens), 2, 2)
        assert (np.sort(experts[:-1]) == chosen_by(place, tokens)[:-1]).all()
        assert not experts[-1].any(), "the last token was sampled, and not computed"


def test_cached_tokens_have_none_and_a_start_leaves_those_before_out(capturing, place):
    (first,) = answers_to(capturing, [body(9, max_tokens=60, ignore_eos=True)])
    tokens = [*body(9)["token_ids"], *first.tokens, 7]
    longer = body(9) | {"token_ids": tokens}
    longer["sampling_params"] |= {"routed_experts_prompt_start": 10}
    (answer,) = answers_to(capturing, [longer])
    whole, experts = [*tokens, *answer.tokens], experts_of(answer)
    assert len(experts) == len(whole) - 10
    cached = len(tokens) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
    assert not experts[: cached - 10].any()
    assert (np.sort(experts[cached - 10 : -1]) == chosen_by(place, whole)[cached:-1]).all()
