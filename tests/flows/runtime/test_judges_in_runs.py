"""Judges in whole runs without engines: outages and resumes, kills, replays with recorded scores and with others."""

import json
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from configs.errors import ConfigError
from flows import cli
from storage.store import open_store
from tasks.judging.stage import JudgesUnavailable
from tests.fixtures import rehearsal
from tests.fixtures.faults import happened
from tests.fixtures.judging import stand_in
from tests.fixtures.rehearsal import SMALL, rehearse, reported
from tests.fixtures.replays import ask, replay
from tests.fixtures.waiting import until

NUM_REPLIES = 60
BROKEN = (500, {}, "broken")
NUM_ROLLOUTS = SMALL["assignment"]["groups_per_step"] * SMALL["assignment"]["group_size"]


@pytest.fixture(autouse=True)
def replies(monkeypatch):
    """Every rollout has a reply of its own."""

    def sampled(tables, config, *, step, policy):
        made = rehearsal.sampled(tables, config, step=step, policy=policy)
        rows = [row | {"content": f"{row['trace_id']} {row['role']}"} for row in made["messages"].to_pylist()]
        return {**made, "messages": made["messages"].from_pylist(rows, made["messages"].schema)}

    rehearsal.play(monkeypatch, rollout=sampled)


def judge(url, **settings):
    plain = {"name": "kind", "url": url, "model": "grader", "version": "grader", "prompt": "{response}"}
    return plain | {"retries": 0, "rereads": 0} | settings


def entries(root, run):
    return {(entry.stage, entry.step): entry.key for entry in open_store(root).ledger.entries(run=run)}


def score_of(prompt):
    return f"Score: {(sum(prompt.encode()) % 5) / 4}"


@contextmanager
def half_broken():
    """A judge that fails for every second prompt until `mend` is called."""
    state = {"broken": True}
    behaviours = [[(200, {}, "answer")], [BROKEN]]
    with stand_in(behaviours, lambda prompt: state["broken"] and sum(prompt.encode()) % 2, score_of) as server:
        yield server, lambda: state.update(broken=False)


def test_a_run_ends_in_an_outage_and_asks_the_rest_when_it_is_resumed(tmp_path, capsys):
    root = tmp_path / "store"
    rehearse(root, "plain")
    with half_broken() as (server, mend):
        with pytest.raises(JudgesUnavailable, match=r"judge 'kind' gave no score for \d+ of 12 questions"):
            reported(root, "judged", judges=[judge(server.url)])
        mend()
        asked = dict(server.answered)
        steps = reported(root, "judged", judges=[judge(server.url)])
    assert len(steps) == 2 and set(server.answered.values()) == {1} and asked.items() <= server.answered.items()
    assert len(server.answered) == 2 * NUM_ROLLOUTS
    metrics = steps[0]["metrics"]
    assert metrics["judge/kind/calls"] == NUM_ROLLOUTS and metrics["judge/kind/unscored"] == 0
    assert metrics["judge/kind/input_tokens"] == 10 * NUM_ROLLOUTS and "rewards/all/kind/mean" in metrics
    # Without judges every key is as it was: what comes before the judging is shared.
    before, after = entries(root, "plain"), entries(root, "judged")
    assert before["rollout", 0] == after["rollout", 0] and before["filtering", 0] != after["filtering", 0]
    assert not any(stage == "judging" for stage, _ in before) and ("judging", 1) in after


def test_rollouts_without_a_score_are_an_outcome_and_in_no_baseline(tmp_path, capsys):
    root = tmp_path / "store"
    with half_broken() as (server, _):
        first, _ = reported(root, "judged", judges=[judge(server.url, max_unscored=1.0)])
    unscored = first["metrics"]["accounting/unscored"]
    assert 0 < unscored < NUM_ROLLOUTS and first["metrics"]["unscored/all"] == unscored / NUM_ROLLOUTS
    assert not first["metrics"]["batch/errored_ratio"] and not first["metrics"]["errored_rollout/all"]
    assert {"outcome": "unscored", "detail": "", "num_traces": int(unscored)} in first["outcomes"]
    cli.main(["traces", "judged", "--store", str(root), "--step", "0", "--json"])
    listed = json.loads(capsys.readouterr().out)["traces"]["rows"]
    lost = [row for row in listed if row["outcome"] == "unscored"]
    assert len(lost) == unscored and all(row["reward"] is None for row in lost)
    cli.main(["trace", lost[0]["trace_id"], "--run", "judged", "--store", str(root), "--json"])
    shown = json.loads(capsys.readouterr().out)["outcome"]
    assert shown["judgements"][0]["score"] is None and shown["outcome"] == "unscored"


def test_a_replay_has_the_recorded_scores_or_others(tmp_path):
    root = tmp_path / "store"
    rehearse(root, "plain")
    with stand_in([[(200, {}, "answer")]], answer=score_of) as server:
        rehearse(root, "base", judges=[judge(server.url)])
        count = sum(server.requests.values())
        # From the filters on: the scores are those that were recorded.
        replay(root, from_stage="filtering", overrides=["algorithm.normalise_std=true"], name="same")
        assert entries(root, "same")["judging", 0] == entries(root, "base")["judging", 0]
        # Another rubric asks again, another parser or weight only reads again.
        weighed = ask(root, overrides=["judges.0.weight=0.0"])
        assert weighed.replay.from_stage == "judging"
        replay(root, overrides=["judges.0.weight=0.0"], name="held")
        assert sum(server.requests.values()) == count
        replay(root, overrides=["judges.0.rubric=Be kind.", "judges.0.prompt={response} {rubric}"], name="kinder")
        assert sum(server.requests.values()) == 2 * count
        # A run that had no judge gets one, and one that has it does without.
        added = f"judges=[{{name='late',url='{server.url}',model='grader',prompt='{{response}}'}}]"
        replay(root, run="plain", overrides=[added], name="late")
        replay(root, overrides=["judges=[]"], name="without")
        assert sum(server.requests.values()) == 2 * count
    kept, late, without = (entries(root, name) for name in ("held", "late", "without"))
    assert ("judging", 0) in kept and ("judging", 0) in late and ("judging", 0) not in without
    assert without["filtering", 0] == entries(root, "plain")["filtering", 0]
    with pytest.raises(ConfigError, match="--from judging: run 'plain' has no judges"):
        ask(root, run="plain", from_stage="judging")


@pytest.mark.parametrize("refill", [False, True])
def test_groups_that_are_sampled_in_place_of_others_are_judged_once_each(tmp_path, refill):
    root = tmp_path / "store"
    with stand_in([[(200, {}, "answer")]], answer=score_of) as server:
        changes = {"assignment": SMALL["assignment"] | {"refill": refill}, "judges": [judge(server.url)]}
        steps = reported(root, "judged", **changes)
    assert {*server.requests.values()} == {1} and len(steps) == 2


KILLED = """
import sys
from storage.store import open_store
from tests.fixtures.judging import inputs_of, judge_at, judged, rollouts
inputs = inputs_of(open_store(sys.argv[1]), *rollouts([f"reply {number}" for number in range(int(sys.argv[3]))]))
rows, _ = judged(inputs, judge_at(sys.argv[2], max_in_flight=4))
print({row["reward"] for row in rows.values()})
"""


@pytest.mark.engine
@pytest.mark.fault("processes", "a run is killed while it asks a judge", "answers are kept, and the rest is asked")
def test_a_run_that_is_killed_while_it_asks_keeps_the_answers(tmp_path):
    root, kept, process, lock = str(tmp_path / "store"), set(), None, threading.Lock()

    command = [sys.executable, "-c", KILLED, root]

    def answer(prompt):
        # All questions of a process wait until more answers are durable; then the process is killed.
        running = process
        if running and len(server.answered) >= len(kept) + 10:
            with lock:
                until(lambda: len(durable(root)) > len(kept), lambda: "no answer became durable")
                running.send_signal(signal.SIGKILL)
                running.wait()
        return "Score: 0.5"

    with stand_in([[(200, {}, "answer")]], answer=answer) as server:
        for _ in range(2):
            process = subprocess.Popen([*command, server.url, str(NUM_REPLIES)])
            assert process.wait() == -signal.SIGKILL
            kept, before, process = durable(root), dict(server.requests), None
            happened(f"killed after {len(server.answered)} answers, of which {len(kept)} were durable")
            assert kept and len(kept) < NUM_REPLIES
        ended = subprocess.run([*command, server.url, str(NUM_REPLIES)], capture_output=True, text=True)
    assert ended.stdout.strip() == "{1.5}" and len(durable(root)) == NUM_REPLIES
    assert all(server.requests[f"reply {reply}"] == before[f"reply {reply}"] for reply in kept)


def durable(root):
    """The numbers of the replies that the store has an answer about."""
    said = open_store(root).answers.table
    said.refresh()
    rows = said.dataset(said.active_files()).to_table(["response"])["response"].to_pylist()
    return {json.loads(row)["id"] for row in rows}
