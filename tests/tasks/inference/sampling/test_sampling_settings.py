"""Settings of sampling of a real engine: the recorded log-probs are those of the distribution that was sampled.

They are computed again by transformers, from its logits of the recorded tokens and with its own processors.
"""

from itertools import chain

import pyarrow as pa
import pytest

from configs.environments import EnvironmentConfig
from configs.run import View
from tasks.runtime.torchvision_operators import declare_torchvision_operators
from tests.fixtures.flagged import flagged
from tests.fixtures.hosts import SECTIONS, assigned, config_of, examples_of, served
from tests.fixtures.sampled import failures, own, rows_of, sample

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TASKSET = {"id": "sample_alphabet_sort", "num_examples": 16, "min_turns": 2, "max_turns": 2}
TEMPERATURE, MAX_TOKENS = 0.7, 12
STOPS = ("a", "e", "o", "n", "t", "1", "S")
SETTINGS = {
    "plain": {},
    "top_p": {"top_p": 0.05},
    "top_k": {"top_k": 9},
    "min_p": {"min_p": 0.5},
    "repetition": {"repetition_penalty": 1.8},
    "all": {"top_p": 0.6, "top_k": 40, "min_p": 0.3, "repetition_penalty": 1.3},
    "stop": {"stop": STOPS},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def rollouts(small_engine, models, tmp_path_factory):
    """The messages of each rollout, by environment."""
    environments = [EnvironmentConfig(name=name, taskset=TASKSET, **own) for name, own in SETTINGS.items()]
    examples = examples_of(environments[0])
    ids = examples["example_id"].to_pylist()
    assignments = pa.concat_tables(assigned(name, ids[at::8], 3) for at, name in enumerate(SETTINGS))
    every = [examples.set_column(0, "environment", pa.array([name] * len(examples))) for name in SETTINGS]
    rollout = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "timeout_seconds": 240.0}
    view = View(config_of(models["a"], *environments, **rollout), SECTIONS, "rollout")
    small_engine.serve("policy", models["a"])
    with served(environments[0], tmp_path_factory.mktemp("sort")) as told:
        groups = sample(small_engine.url, told["address"], view, assignments, pa.concat_tables(every))
    traces, messages = rows_of(groups, "traces"), rows_of(groups, "messages")
    assert not failures(traces)
    return {name: [own(row, messages) for row in traces if row["environment"] == name] for name in SETTINGS}


@pytest.fixture(scope="module")
def model(models):
    declare_torchvision_operators()
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(models["a"], dtype=torch.float32).eval()


def replies(messages):
    """Each reply of a conversation, which may have branches: the tokens before, its own, and their log-probs."""
    paths = {None: []}
    for row in messages:
        before = paths[row["parent"]]
        paths[row["message"]] = before + row["token_ids"]
        tokens, logprobs = (flagged(row[column], row["mask"]) for column in ("token_ids", "logprobs"))
        if tokens:
            yield before + row["token_ids"][: row["mask"].index(True)], tokens, logprobs


def reference(model, before, tokens, temperature, top_p=1.0, top_k=512, min_p=0.0, repetition_penalty=1.0):
    """The log-prob of each token of a reply under the distribution that these settings make."""
    import torch
    from transformers.generation import logits_process as process

    processors = [
        process.RepetitionPenaltyLogitsProcessor(repetition_penalty),
        process.TemperatureLogitsWarper(temperature or 1.0),
        process.MinPLogitsWarper(min_p),
        process.TopKLogitsWarper(top_k),
        process.TopPLogitsWarper(top_p),
    ]
    ids = torch.tensor([before + tokens])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    values = []
    for place in range(len(before), ids.shape[1]):
        scores = process.LogitsProcessorList(processors)(ids[:, :place], logits[place - 1 : place].clone())
        values.append(float(torch.log_softmax(scores, -1)[0, ids[0, place]]))
    return values


@pytest.mark.essential
@pytest.mark.parametrize("name", SETTINGS)
def test_recorded_log_probs_are_of_the_distribution_that_was_sampled(rollouts, model, name):
    settings = {"temperature": TEMPERATURE, **SETTINGS[name]}
    settings.pop("stop", None)
    ratios = []
    for before, tokens, logprobs in chain.from_iterable(map(replies, rollouts[name])):
        assert logprobs == pytest.approx(reference(model, before, tokens, **settings), abs=2e-4)
        whole = reference(model, before, tokens, settings["temperature"])
        ratios += [value - recorded for value, recorded in zip(whole, logprobs, strict=True)]
    assert len(ratios) > 20
    # That of the learner, which knows the temperature alone, to the engine: of cut tokens the share that is left.
    assert (max(ratios) < -0.1) == (not {"top_p", "top_k", "min_p"}.isdisjoint(settings))
    assert (max(map(abs, ratios)) > 1e-3) == (settings.keys() != {"temperature"})


def test_a_text_that_ends_a_reply_stays_in_its_text_and_tokens(rollouts, models):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["a"])
    num_stopped = 0
    for messages in rollouts["stop"]:
        texts = [row["content"] for row in messages if row["sampled"]]
        for content, (_, tokens, _) in zip(texts, replies(messages), strict=True):
            text, before = tokenizer.decode(tokens), tokenizer.decode(tokens[:-1])
            assert content == text.strip()
            if len(tokens) < MAX_TOKENS:
                num_stopped += 1
                assert any(stop in text for stop in STOPS) and not any(stop in before for stop in STOPS)
    assert num_stopped > 3
