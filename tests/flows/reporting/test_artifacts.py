"""What a run shows in Prefect, from plain data."""

import math
import re
import threading
import weakref
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

from hypothesis import given
from hypothesis import strategies as st

from flows.reporting import artifacts, bookkeeping
from tests.fixtures.waiting import PATIENCE


def step(number, **changes):
    values = {"step": number, "reward": number / 10, "reward_std": 0.1, "tokens": 12_345, "computed": True}
    values |= {"update": {"entropy": 0.51234, "mismatch_kl": 1.5e-06, "grad_norm": None}}
    return values | {"seconds": {"rollout": 1.25, "training": 0.5}} | changes


def test_the_curve_goes_up_in_blocks_over_an_axis_from_0_to_1():
    heading, *lines = artifacts.reward_curve([step(number, reward=number / 2) for number in range(3)]).splitlines()
    assert heading == "reward 1.000, from 0 to 1" and len(lines) == artifacts.CURVE_ROWS
    heights = [sum(line.ljust(artifacts.CURVE_WIDTH)[column] != " " for line in lines) for column in (0, 30, 71)]
    assert heights == [1, 5, 8]


def test_a_curve_of_nothing_and_of_what_is_not_finite_says_so():
    for rewards in ([], [None], [math.nan, math.inf]):
        steps = [step(number, reward=reward) for number, reward in enumerate(rewards)]
        assert artifacts.reward_curve(steps) == "no scored step yet"


def test_a_run_without_rewards_shows_its_losses():
    steps = [step(number, reward=None, update={"loss": 2.0 - number}) for number in range(3)]
    assert artifacts.reward_curve(steps).startswith("loss 0.000, from 0 to 2\n█")


def test_the_report_has_the_curve_inline_the_last_steps_and_the_store():
    page = artifacts.report("my_run", "/data/store", [step(k) for k in range(12)])
    assert "\n```\nreward 1.100, from 0 to 1.1\n" in page
    rows = [row for row in page.splitlines() if re.match(r"\| \d", row)]
    assert len(rows) == artifacts.SHOWN_STEPS
    assert rows[-1] == "| 11 | 1.1 | 0.1 | 0.512 | 1.5e-06 | - | 1.75 | 12,345 |"
    for part in ("Tables: /data/store", r"stagecoach show my\_run", r"stagecoach view --run my\_run", r"# my\_run"):
        assert part in page


def test_a_step_without_reward_is_not_a_step_of_zero():
    page = artifacts.report("my run", "/s", [step(0, reward=None, update=None), step(1)])
    assert "| 0 | - | 0.1 | - | - | - | 1.75 | 12,345 |" in page


def test_text_is_escaped():
    assert artifacts.escape("a|b `c` <img> [x](y)\n# h") == r"a\|b \`c\` &lt;img&gt; \[x\]\(y\) \# h"
    assert artifacts.escape("https://a/) [x](javascript:1)") == r"https:/\/a/\) \[x\]\(javascript:1\)"


@given(st.text(max_size=40))
def test_keys_are_as_prefect_wants_them(name):
    assert re.fullmatch(r"run(-[a-z0-9]+)*", artifacts.artifact_key("run", name))


def test_artifacts_of_quick_steps_are_renewed_once_in_a_while_and_at_the_end(monkeypatch):
    published, now = [], 0.0
    watch = artifacts.RunArtifacts("run", "/s", 9, clock=lambda: now)
    monkeypatch.setattr(watch, "_publish", lambda: published.append(len(watch._steps)))
    watch("prefect", {})
    for number in range(9):
        watch("step", step(number))
        now += 2.0
    watch("end", {"ending": "finished"})
    assert published == [1, 4, 7, 9]


def test_of_a_step_only_what_the_page_shows_is_held():
    watch, steps = artifacts.RunArtifacts("run", "/s", 9), [step(number) for number in range(3)]
    samples = Mock()
    held = weakref.ref(samples)
    for one in steps:
        watch("step", {**one, "samples": samples, "metrics": {"a": 1.0}, "values": {("", "a"): 1.0}})
    del samples
    assert held() is None and not {"samples", "metrics", "values"} & watch._steps[0].keys()
    assert artifacts.report("run", "/s", watch._steps) == artifacts.report("run", "/s", steps)


def test_what_a_busy_api_has_not_shown_by_the_end_is_waited_for(monkeypatch):
    watch, published, busy = artifacts.RunArtifacts("run", "/s", 2), [], threading.Event()
    monkeypatch.setattr(bookkeeping, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(bookkeeping, "LAST_SECONDS", PATIENCE)

    def publish():
        assert busy.wait(PATIENCE)
        published.append(len(watch._steps))
        return True

    monkeypatch.setattr(watch, "_publish", publish)
    watch("prefect", {})
    for number in range(2):
        watch("step", step(number))
    watch("end", {"ending": "cancelled"})
    assert published == []  # a run that was ended from outside has no time to wait
    threading.Timer(0.2, busy.set).start()
    watch("end", {"ending": "finished"})
    assert published == [2, 2]


def test_an_api_that_fails_is_told_of_once_and_asked_again_at_the_next_renewal_and_the_end(monkeypatch, caplog):
    now = 0.0
    watch = artifacts.RunArtifacts("run", "/s", 3, clock=lambda: now)
    show = Mock(side_effect=[ConnectionError("connection refused")] * 2 + [None] * 2)
    monkeypatch.setattr(watch, "_show", show)
    watch("prefect", {})
    for number in range(2):
        watch("step", step(number))
        watch("stage", {})
        now += 10.0
    assert show.call_count == 2
    watch("end", {"ending": "finished"})
    assert show.call_count == 4  # both artifacts
    assert caplog.messages == ["artifacts are not shown in Prefect for now, the run goes on: connection refused"]


def test_a_retry_renews_the_card_of_its_flow_run(monkeypatch):
    from prefect import artifacts as made
    from prefect.client import orchestration
    from prefect.runtime import flow_run

    client, create = MagicMock(), Mock(return_value="new")
    client.__enter__.return_value = client
    monkeypatch.setattr(orchestration, "get_client", lambda **settings: client)
    monkeypatch.setattr(made, "create_progress_artifact", create)
    monkeypatch.setitem(vars(flow_run), "id", "6a1e7d5e-0000-4000-8000-000000000000")  # not one of its own
    client.read_artifacts.side_effect = [[], [SimpleNamespace(id="old")]]
    for known in ("new", "old"):
        watch = artifacts.RunArtifacts("run", "/s", 3)
        for percent in (10.0, 20.0):
            watch._show("progress", "progress-run", percent)
        assert client.update_artifact.call_args.args[0] == known
    asked = client.read_artifacts.call_args.kwargs["artifact_filter"]
    assert asked.key.any_ == ["progress-run"] and str(asked.flow_run_id.any_[0]).startswith("6a1e7d5e")
    assert create.call_count == 1, "only where the flow run had none"
