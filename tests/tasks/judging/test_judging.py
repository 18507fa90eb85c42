"""Judging over HTTP: outages are unscored and never 0, and no question that was answered is asked again."""

import json

import pytest

from storage.store import open_store
from tasks.judging.client import JudgeBudgetSpent
from tasks.judging.questions import NotJudgeable
from tasks.judging.stage import JudgesUnavailable, JudgingInputs
from tasks.runtime.services import Answer
from tests.fixtures.builders import example, table
from tests.fixtures.faults import happened
from tests.fixtures.hosts import KEY as ENGINE_KEY
from tests.fixtures.judging import GOOD, KEY, inputs_of, judge_at, judged, rollouts, stand_in

BUSY, BROKEN, SILENT = (429, {"Retry-After": "0.01"}, "slow down"), (500, {}, "broken"), (200, {"seconds": 0.6}, None)
NONSENSE, VAGUE, HIGH = (200, {}, "raw <html>"), (200, {}, "Lovely."), (200, {}, "I give 7.")
REFUSED = (401, {}, f"no such key: {KEY}")


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


FAILURES = {"busy": BUSY, "broken": BROKEN, "silent": SILENT, "nonsense": NONSENSE, "vague": VAGUE, "high": HIGH}


@pytest.mark.fault("services", "a judge is away, or says nonsense", "rollouts are unscored, never 0, and asked again")
def test_an_outage_is_unscored_and_only_the_rest_is_asked_again(store):
    # Each prompt names its behaviour: it fails until it was asked as often as one judging asks, then it answers.
    names = [*FAILURES, *(f"good {number}" for number in range(6))]
    lists = {name: [failure] * 2 + [GOOD] for name, failure in FAILURES.items()}
    traces, messages = rollouts(names, errors=2)
    with stand_in({**lists, "good": [GOOD]}, lambda prompt: prompt.split()[0]) as server:
        judge = judge_at(server.url)
        with pytest.raises(JudgesUnavailable, match=r"no score for 6 of 12 questions.*resume the run") as caught:
            judged(inputs_of(store, traces, messages), judge)
        assert KEY not in str(caught.value)
        happened(caught.value)
        before = dict(server.answered)
        # Allowed: those are left out, without a reward.
        lenient = judge_at(server.url, max_unscored=1.0, retries=0, rereads=0)
        with stand_in([[REFUSED]]) as down:
            rows, said = judged(inputs_of(store, traces, messages), lenient.model_copy(update={"url": down.url}))
        assert not set(down.requests) & {name for name in names if name.startswith("good")}
        for number, name in enumerate(names):
            row, told = rows[f"t{number}"], said[f"t{number}"]
            if name in FAILURES:
                assert (row["reward"], row["error_class"], told["score"]) == (None, "unscored", None)
                assert json.loads(row["rewards"])["kind"] is None and KEY not in told["error_message"]
            else:
                assert (row["reward"], row["error_class"], told["score"]) == (1.5, None, 0.5)
        assert rows["f0"]["error_class"] == "timeout" and "f0" not in said
        # Resumed, with the judge back.
        rows, said = judged(inputs_of(store, traces, messages), judge)
        assert all(rows[f"t{number}"]["reward"] == 1.5 for number in range(12))
        assert set(server.answered.values()) <= {0, 1} and all(server.answered[name] == 1 for name in names)
        assert {name: before[name] for name in before if before[name]} == {name: 1 for name in names[6:]}
        assert server.keys == {f"Bearer {KEY}"}
        # The same question of another run is answered by the store.
        count = sum(server.requests.values())
        rows, said = judged(inputs_of(store, traces, messages, run="other", step=4), judge)
        assert sum(server.requests.values()) == count and not any(row["asked"] for row in said.values())
        assert rows["t0"]["reward"] == 1.5


def test_equal_replies_are_one_question_and_its_cost_counts_once(store):
    traces, messages = rollouts(["same"] * 5 + ["other"])
    with stand_in() as server:
        judge = judge_at(server.url, input_price=1e6, output_price=2e6)
        _, said = judged(inputs_of(store, traces, messages), judge)
        _, again = judged(inputs_of(store, traces, messages), judge)  # as after a kill before the ledger's row
    assert server.answered == {"same": 1, "other": 1} and again == said
    assert sum(row["cost"] for row in said.values() if row["asked"]) == 2 * (10 + 4)
    assert store.answers.spent("r")["kind"].calls == 2 and not store.answers.spent("x")


def test_a_held_out_judge_is_scored_and_in_no_reward(store):
    traces, messages = rollouts(["a", "b"])
    with stand_in([[GOOD], [BROKEN]], lambda prompt: prompt == "b") as server:
        judge = judge_at(server.url, name="held", weight=0.0, max_unscored=1.0, retries=0)
        rows, said = judged(inputs_of(store, traces, messages), judge, judge_at(server.url, environments=["x"]))
    assert [rows[name]["reward"] for name in ("t0", "t1")] == [1.0, 1.0] and len(said) == 2
    assert json.loads(rows["t0"]["rewards"])["held"] == {"score": 0.5, "weight": 0.0}
    assert json.loads(rows["t1"]["rewards"])["held"] is None and rows["t1"]["error_class"] is None


@pytest.mark.parametrize(
    ("parser", "text", "score"),
    [
        ({}, "7 reasons. **Score:** 0.25\n", 0.25),
        ({"maximum": 10}, "I say Score: 7/10", 7.0),
        ({}, "I give 0.75", 0.75),
        ({}, "nan", None),
        ({}, "Score: -1", None),
        ({"type": "choice"}, "No... yes: YES.", 1.0),
        ({"type": "choice"}, "nothing, eyes", None),
        ({"type": "json"}, 'So {"score": 0.1} or ```{"score": 0.5, "why": "x"}```', 0.5),
        ({"type": "json"}, '{"score": null}', None),
        ({"type": "json"}, "{broken}", None),
        ({"type": "pattern", "pattern": r"<g>(.*?)</g>"}, "<g>0.2</g> <g>0.3</g>", 0.3),
    ],
)
def test_scores_are_read_or_there_is_none(parser, text, score, store):
    traces, messages = rollouts(["a"])
    with stand_in([[(200, {}, text)]]) as server:
        judge = judge_at(server.url, parser=parser, max_unscored=1.0, rereads=0)
        _, said = judged(inputs_of(store, traces, messages), judge)
    assert said["t0"]["score"] == score and said["t0"]["answer"] == text


def test_a_prompt_shows_what_it_names_and_nothing_of_a_reply_is_a_name(store):
    traces, messages = rollouts(["{answer} {rubric}"])
    tasks = [example() | {"task": json.dumps({"answer": 4})}]
    prompt = 'Q {question} A {answer} R {response} T {transcript} {"score": 1} {rubric}'
    with stand_in() as server:
        judge = judge_at(server.url, prompt=prompt, rubric="Be kind.")
        inputs = inputs_of(store, traces, messages)
        with pytest.raises(NotJudgeable, match="no field 'answer'"):
            judged(inputs, judge)
        assert not server.requests
        told = JudgingInputs(**vars(inputs) | {"examples": table("examples", tasks)})
        judged(told, judge)
    reply = "{answer} {rubric}"
    shown = f'Q text A 4 R {reply} T user: text\n\nassistant: {reply} {{"score": 1}} Be kind.'
    assert [*server.requests] == [shown]


def test_a_budget_stops_or_asks_a_person_and_nothing_is_paid_twice(store):
    traces, messages = rollouts([f"reply {number}" for number in range(10)])
    asked = []

    def approve(question):
        asked.append(dict(question.figures))
        return Answer(len(asked) < 3, "Ada", "enough")

    with stand_in() as server:
        budget = {"max_calls": 3}
        judge = judge_at(server.url, budget=budget)
        with pytest.raises(JudgeBudgetSpent, match=r"'kind' is spent: 3 answers, 36 tokens"):
            judged(inputs_of(store, traces, messages), judge)
        assert len(server.answered) == 3
        pausing = judge_at(server.url, budget=budget | {"on_budget": "pause"})
        with pytest.raises(JudgeBudgetSpent, match="Ada refused"):
            judged(inputs_of(store, traces, messages, approve=approve), pausing)
        assert [figures["answers"] for figures in asked] == [3, 6, 9]
        rows, _ = judged(inputs_of(store, traces, messages), judge_at(server.url, budget={"max_tokens": 120}))
    assert len(rows) == 10 and set(server.answered.values()) == {1} and len(server.answered) == 10


def test_answers_beyond_a_budget_are_no_approval(store):
    traces, messages = rollouts([f"reply {number}" for number in range(6)])
    asked = []

    def refuse(question):
        asked.append(question.figures["tokens"])
        return Answer(len(asked) == 1, "Ada", "enough")

    with stand_in() as server:
        # An answer has 12 tokens: the third goes beyond the budget, and so does the fifth beyond two of them.
        pausing = judge_at(server.url, budget={"max_tokens": 30, "on_budget": "pause"}, max_in_flight=1)
        for _ in range(2):
            with pytest.raises(JudgeBudgetSpent, match="Ada refused"):
                judged(inputs_of(store, traces, messages, approve=refuse), pausing)
    assert asked == [36, 60, 60] and len(server.answered) == 5


@pytest.mark.parametrize("usage", [["x"], {"prompt_tokens": "many"}, None])
def test_an_answer_without_readable_counts_is_an_answer(usage, store):
    traces, messages = rollouts(["a reply"])
    choice = {"index": 0, "message": {"role": "assistant", "content": "Score: 0.5"}, "finish_reason": "stop"}
    with stand_in([[(200, {}, "raw " + json.dumps({"choices": [choice], "usage": usage}))]]) as server:
        _, said = judged(inputs_of(store, traces, messages), judge_at(server.url))
    assert (said["t0"]["score"], said["t0"]["input_tokens"]) == (0.5, 0)


@pytest.mark.engine
def test_an_engine_is_a_judge(store, small_engine, models):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["a"])
    (digit,) = tokenizer.encode("1")
    # A random model says nothing of itself: this token alone is likely.
    sampling = {"temperature": 0.0, "max_tokens": 1, "logit_bias": {str(digit): 100}}
    traces, messages = rollouts(["a", "b", "a"])
    judge = judge_at(f"{small_engine.url}/v1", model="policy", sampling=sampling, answer_seconds=120.0)
    rows, said = judged(inputs_of(store, traces, messages, key=ENGINE_KEY), judge)
    assert [row["reward"] for row in rows.values()] == [2.0] * 3 and said["t0"]["answer"] == "1"
    assert [row["asked"] for row in said.values()] == [True, True, False] and said["t0"]["input_tokens"] > 1
