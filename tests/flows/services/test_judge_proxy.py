"""Judges of environments: asked through the run's address, recorded, and asked the same only once."""

import asyncio
import json

import httpx
import pytest

from configs.checks.judges import judge_problems
from configs.judges import judges_inside
from configs.run import RunConfig, View
from flows.services.base import Supervisor
from flows.services.environments import GraderProcesses
from flows.services.judge_proxy import JudgeProxy
from storage.store import open_store
from tasks.inference.engine.client import ServedModel
from tasks.rollout.regrade import STAGE as REGRADE
from tasks.rollout.stage import STAGE as ROLLOUT
from tests.fixtures.judging import stand_in
from tests.fixtures.recorded import example_of, rows_of, scored, trace_of

REPLIES = ("<rev>cba</rev>", "<rev>cb</rev>", "<rev>cba</rev>")
YES, BROKEN = (200, {}, "answer"), (500, {}, "broken")


class Teachers:
    """Serves a judge by its chat API."""

    def serve(self, judge):
        return ServedModel(judge.chat.url, "", judge.chat.model, chat=judge.chat)


def config(url="http://localhost/v1", base_url="judge://grader", **judge):
    asked = {"id": "reference", "base_url": base_url, "answer_field": "text", "model": "of no consequence"}
    taskset = {"id": "sample_reverse_text", "num_examples": 4, "task": {"judges": [asked]}}
    plain = {"name": "grader", "url": url, "model": "small", "retries": 0, "inside": True, "prompt": "{response}"}
    environments = [{"name": "reverse", "taskset": taskset}]
    return RunConfig.model_validate(
        {"name": "judged", "seed": 7, "environments": environments, "judges": [plain | judge]}
        | {"replay": {"regrade": True}}
    )


@pytest.fixture
def proxies(tmp_path):
    """Return the proxy of a config; all are closed at the end."""
    opened = []

    def proxy(chosen):
        opened.append(JudgeProxy(chosen, open_store(tmp_path / "store").answers, Teachers()))
        return opened[-1]

    yield proxy
    for each in opened:
        each.close()


def base_url(proxy, chosen):
    routed = proxy.route(chosen.environments[0])
    return routed.taskset["task"]["judges"][0]["base_url"]


def ask(url, text="one"):
    """Ask as the judges of verifiers do; return the text of the answer."""
    from verifiers.v1.configs.judge import JudgeConfig
    from verifiers.v1.judge import Judge

    return asyncio.run(Judge(JudgeConfig(base_url=url)).complete(text)).text


def test_a_question_is_asked_once_over_runs_and_recorded(proxies, tmp_path):
    with stand_in([[YES]], answer=lambda prompt: f"Score: {len(prompt)}") as server:
        chosen = config(server.url)
        for _ in range(2):
            proxy = proxies(chosen)
            assert [ask(base_url(proxy, chosen)) for _ in range(2)] == ["Score: 3"] * 2
            proxy.close()
        assert server.requests == {"one": 1}
    spent = open_store(tmp_path / "store").answers.spent("judged")["grader"]
    assert (spent.calls, spent.tokens) == (1, 12)


def test_an_outage_is_an_error_that_the_client_does_not_send_again(proxies):
    from openai import APIStatusError

    with stand_in([[BROKEN]]) as server:
        chosen = config(server.url)
        with pytest.raises(APIStatusError, match=r"judge 'grader': .*broken") as caught:
            ask(base_url(proxies(chosen), chosen))
        assert caught.value.status_code == 424 and server.requests == {"one": 1}


def test_a_budget_holds_for_questions_of_environments_too(proxies):
    from openai import APIStatusError

    with stand_in([[YES]]) as server:
        chosen = config(server.url, budget={"max_calls": 1})
        url = base_url(proxies(chosen), chosen)
        ask(url)
        with pytest.raises(APIStatusError, match="the budget of judge 'grader' is spent"):
            ask(url, "two")
        assert server.requests == {"one": 1}


def test_who_does_not_know_the_address_is_not_served(proxies):
    chosen = config()
    host = base_url(proxies(chosen), chosen).split("/")[2]
    answer = httpx.post(f"http://{host}/guess/grader/v1/chat/completions", json={"messages": []}, trust_env=False)
    assert answer.status_code == 404


def test_an_environment_without_judges_of_the_run_starts_nothing(proxies):
    chosen = config(base_url="https://example.com/v1")
    proxy = proxies(chosen)
    assert proxy.route(chosen.environments[0]) is chosen.environments[0] and not judges_inside(chosen.environments[0])


@pytest.mark.parametrize("name", ["gradr", "grader"])
def test_a_judge_that_is_not_there_is_named_before_anything_starts(name):
    problem = "environments.0: there is no judge 'gradr' in the run; did you mean grader?"
    found = judge_problems(config(base_url=f"judge://{name}"))
    assert [line for line in found if "environments.0" in line] == ([problem] if name == "gradr" else [])


def test_the_judge_inside_is_in_the_keys_of_what_it_scores_and_no_other_key_changes():
    for stage in (ROLLOUT, REGRADE):
        one, other = (View(config(model=name), stage.sections, stage.name).content() for name in ("small", "large"))
        plain = View(config(base_url="https://example.com/v1"), stage.sections, stage.name).content()
        assert one != other and "environment_judges" not in plain


@pytest.mark.engine
def test_a_regrading_asks_judges_once_and_an_outage_is_no_zero(proxies, tmp_path):
    from sample_reverse_text.taskset import ReverseTextData, ReverseTextTask

    task = ReverseTextTask(ReverseTextData(prompt="Reverse inside <rev>: abc", text="abc"))
    made = {str(number): [scored(trace_of(task, [reply]), task)] for number, reply in enumerate(REPLIES)}
    rows = {"examples": example_of("reverse", "{}"), **rows_of(made, "reverse")}
    with stand_in(
        [[BROKEN, (200, {}, "yes")], [(200, {}, "no")]], lambda prompt: int("<rev>cb</rev>" not in prompt)
    ) as server:
        chosen = config(server.url)
        with Supervisor("judged", tmp_path / "logs") as supervisor:
            graders = GraderProcesses(supervisor, chosen, proxies(chosen))
            first, second = (graders.scores(**rows).to_pylist() for _ in range(2))
    assert [row["reward"] for row in first] == [1.0, None, 1.0]
    assert "judge 'grader': " in first[1]["error_message"]
    assert [json.loads(row["rewards"])["reference"]["score"] for row in second] == [0.0, 1.0, 0.0]
    assert sorted(server.requests.values()) == [1, 2], "equal replies share an answer, the lost one is repeated"
    assert len(json.loads(second[0]["info"])["judge_calls"]) == 1
