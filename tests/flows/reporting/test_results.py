"""What a run is said to have come to: lost rollouts and figures outside their range, the same in every place."""

import json
from itertools import count

import pytest

from flows import cli
from flows.queries.store_reader import StoreReader
from flows.reporting.artifacts import report
from flows.reporting.figures import step_figures
from flows.reporting.messages import losses_message, outcome_message, step_message
from tests.fixtures.rehearsal import play_stages, reported, sampled_with
from tests.flows.viewer.looking import values

FAILED = {"reward": None, "error_class": "timeout", "error_type": "TimeoutError", "stop_condition": None}
LOST = "1 of 12 rollouts errored (timeout 1), 2 truncated"
STEPS = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A store and the reported steps of a run that loses rollouts, and whose reward grows fourfold."""
    root, seen, steps = tmp_path_factory.mktemp("results") / "store", count(), []

    def changed(number, row):
        reward = (0.25 if next(seen) < 12 * 12 else 1.0) * (1 + number % 2) / 1.5
        return FAILED if number == 0 else {"reward": reward, "is_truncated": number in (1, 2)}

    with play_stages(rollout=sampled_with(changed)):
        reported(root, "base", lambda event, facts: steps.append(facts) if event == "step" else None, steps=STEPS)
    return root, steps


def lost(num_traces, num_truncated, **outcomes):
    """A step as far as its losses; outcomes are counts by detail."""
    shares = [
        {"outcome": outcome, "detail": detail, "num_traces": number}
        for outcome, details in outcomes.items()
        for detail, number in details.items()
    ]
    return {"num_traces": num_traces, "num_truncated": num_truncated, "outcomes": shares}


def test_losses_in_words():
    step = lost(
        16, 1, errored={"timeout": 2, "provider": 1, "sandbox": 1, "program": 1}, filtered={"zero_advantage": 3}
    )
    said = "errored (timeout 2, provider 1, sandbox 1, ...), 1 truncated, 3 dropped (zero_advantage 3)"
    assert losses_message([step]) == f"5 of 16 rollouts {said}"
    assert losses_message([step, step]).startswith("10 of 32 rollouts errored (timeout 4, ")
    assert losses_message([lost(16, 0, trained={"": 16})]) == ""
    assert losses_message([]) == losses_message([{"step": 0}]) == ""


def test_lost_rollouts_are_told_where_a_reward_is(run, capsys):
    root, steps = run
    total = "20 of 240 rollouts errored (timeout 20), 40 truncated"
    assert LOST in step_message(steps[0]) and total in outcome_message({"steps": steps})
    assert f"step 19: {LOST[:20]}" in report("base", str(root), steps)
    assert step_figures(steps[0]["values"])["accounting/errored/timeout"] == 1.0

    def printed(*command):
        assert cli.main([*command, "--store", str(root)]) == 0
        return capsys.readouterr().out

    watched = printed("watch", "base", "--plain")
    assert f"step  1/20  reward 0.258  {LOST}  " in watched
    assert watched.count(LOST) == STEPS and total in watched
    shown = printed("show", "base")
    assert total in shown and "step  reward  errored  truncated" in shown
    step = json.loads(printed("show", "base", "--json"))["steps"][0]
    assert (step["num_traces"], step["num_truncated"]) == (12, 2)
    assert {"outcome": "errored", "detail": "timeout", "num_traces": 1} in step["outcomes"]


def test_a_figure_outside_its_range_is_told_as_on_the_page(run, capsys):
    root, steps = run
    page = values(StoreReader.at(root), "/runs/base")["exits"]
    assert [(each["title"], each["description"]) for each in page] == [("Reward", "grew to 4 x since step 12")]
    said = "outside its usual range: Reward grew to 4 x since step 12"
    assert said in outcome_message({"steps": steps}) and said in report("base", str(root), steps)
    for command in (["watch", "base", "--plain"], ["show", "base"]):
        assert cli.main([*command, "--store", str(root)]) == 0
        assert said in capsys.readouterr().out, command
