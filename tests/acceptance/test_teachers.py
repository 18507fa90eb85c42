"""Real runs with two engines: drawn to a teacher on the policy's own tokens, taught with the teacher's tokens, and
a replay that scores recorded rollouts by the policy shown a demonstration."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.cli.run import run_loop
from flows.replays.config import prepare_replay
from flows.replays.loop import plan_run
from flows.replays.request import ReplayRequest
from flows.runtime.preflight import preflight
from flows.runtime.resolve_run import resolve_run
from flows.runtime.session import open_session
from flows.services.base import Supervisor
from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.prefect_task import StageTask

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]

SETTINGS = ["demo", str(Path(__file__).with_name("small.toml")), str(Path(__file__).with_name("teachers.toml"))]
SIZES: dict[str, Any] = {"layers": 2, "intermediate": 96}
EXACT = 1e-3


@dataclass
class Lived:
    """What runs made of a store, and which services each call of them started."""

    directory: Path
    started: dict[str, list[str]] = field(default_factory=dict)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def store(self):
        return open_store(self.directory / "store")

    def model(self, name):
        return self.directory / name

    def train(self, name, call=""):
        """Do the run, or go on with it."""
        paths = [f"{where}.teacher.path={self.model('teacher')}" for where in ("algorithm", "environments.1.algorithm")]
        given = [*paths, f"model.path={self.model('policy')}"]
        config = resolve_run("train", SETTINGS, given, name=name, store=str(self.directory / "store"))
        self.live(config, call or name)

    def replay(self, name, of, until, overrides):
        asked = ReplayRequest(of, "advantage", until, "0:1", overrides, name, str(self.directory / "store"))
        self.live(prepare_replay(asked), name)

    def live(self, config, call):
        """Walk a run as its flow does, each stage called where a task would be; note what it started."""
        started = self.started[call] = list[str]()
        start = Supervisor.start

        def noting(supervisor, spec):
            started.append(spec.name.split()[0])
            return start(supervisor, spec)

        with pytest.MonkeyPatch.context() as patch, open_session(config) as session:
            patch.setattr(Supervisor, "start", noting)
            patch.setattr(StageTask, "__call__", lambda self, step, work, **shown: work())
            missing = [piece for piece in plan_run(session.context, session.source) if piece.computed]
            preflight(session, missing)
            session.begin(missing)
            self.outcomes[call] = run_loop(session)

    def rows(self, run, stage, table, step=0):
        """Return the rows that a stage of a run made."""
        (entry,) = (
            each for each in self.store.ledger.entries(run=run, stage=stage) if each.step == step and not each.part
        )
        return self.store.read(entry.slices(table)).to_pylist()

    def by_trace(self, run, stage, table, step=0):
        """Return the rows of a table that has one for each rollout, by trace id."""
        return {row["trace_id"]: row for row in self.rows(run, stage, table, step)}


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """A run of two steps with a teacher, and replays of its first step."""
    found = Lived(tmp_path_factory.mktemp("taught"))
    for seed, name in enumerate(("policy", "teacher")):
        tiny_qwen3(found.model(name), seed=seed, **SIZES)
    found.train("base")
    found.replay("rewarded", "base", "packing", ["algorithm.type=grpo"])
    found.replay("shown", "rewarded", "packing", ["algorithm.type=opsd", "algorithm.demonstration=text"])
    yield found


def given(model, before, tokens):
    """Log-prob of each of some tokens after others, under the weights in a directory, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = weights(input_ids=torch.tensor([[*before, *tokens]]), use_cache=False).logits[0, len(before) - 1 : -1]
    found = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return found


def exchanges(lived, environment, step=0):
    """Return trace, prompt and completion of each rollout of an environment, by trace id."""
    traces = [row for row in lived.rows("base", "rollout", "traces", step) if row["environment"] == environment]
    messages = lived.rows("base", "rollout", "messages", step)
    own = {row["trace_id"]: [m for m in messages if m["trace_id"] == row["trace_id"]] for row in traces}
    assert traces and all(row["error_class"] is None for row in traces)
    assert all([m["message"] for m in each] == [0, 1] for each in own.values())
    return {row["trace_id"]: (row, *own[row["trace_id"]]) for row in traces}


def sampled(message, column):
    return [value for value, mask in zip(message[column], message["mask"], strict=True) if mask]


def check_references(lived, run, teacher, before):
    """Compare what a run's reference scored with what the teacher's weights give the same tokens."""
    rows = lived.by_trace(run, "reference", "references")
    made = exchanges(lived, "own")
    assert set(rows) == set(made)
    for name, (_, prompt, completion) in made.items():
        fed = [*before.get(name, ()), *prompt["token_ids"]]
        expected = given(teacher, fed, completion["token_ids"])
        found = np.array(rows[name]["logprobs"])
        mask = np.array(completion["mask"])
        assert found[mask] == pytest.approx(np.array(expected)[mask], abs=EXACT)
        assert not found[~mask].any() and found[mask].min() < -1


def test_the_references_are_what_the_teachers_weights_give_the_policys_tokens(lived):
    check_references(lived, "base", lived.model("teacher"), {})
    assert sorted(lived.started["base"]) == ["engine", "environment", "environment", "learner", "teacher"]


def test_the_signal_is_the_reference_less_the_engine(lived):
    rows, credits = lived.by_trace("base", "reference", "references"), lived.by_trace("base", "advantage", "samples")
    for name, (_, prompt, completion) in exchanges(lived, "own").items():
        start = len(prompt["token_ids"])
        signal = np.float32(rows[name]["logprobs"]) - np.float32(completion["logprobs"])
        mask = np.array(completion["mask"])
        assert np.float32(credits[name]["advantages"][start:])[mask] == pytest.approx(signal[mask], abs=1e-6)
        assert credits[name]["ref_kl_weights"] == [0.0] * start + [float(each) for each in completion["mask"]]
        assert credits[name]["advantage"] is None and not any(credits[name]["rl_weights"])


def test_the_teacher_sampled_what_it_teaches(lived):
    credits = lived.by_trace("base", "advantage", "samples", 1)
    for name, (trace, prompt, completion) in exchanges(lived, "taught", 1).items():
        assert (trace["policy_key"], trace["policy_version"], trace["staleness"]) == ("", 1, 0)
        record = json.loads(trace["record"])["agent"]["config"]
        version = lived.store.ledger.entries(run="base", stage="rollout")[0].section["teachers"]["taught"]["version"]
        assert record["sampling"]["cache_salt"] == version
        expected = given(lived.model("teacher"), prompt["token_ids"], completion["token_ids"])
        assert completion["logprobs"] == pytest.approx(np.where(completion["mask"], expected, 0.0).tolist(), abs=EXACT)
        start = len(prompt["token_ids"])
        assert credits[name]["ce_weights"] == [0.0] * start + [float(each) for each in completion["mask"]]
        assert not any(credits[name]["ref_kl_weights"]) and not any(credits[name]["advantages"])


def test_both_components_move_the_weights(lived):
    updates = [lived.rows("base", "training", "updates", step)[0] for step in range(2)]
    digests = [updates[0]["weights_sha256_in"], *(each["weights_sha256"] for each in updates)]
    assert len(set(digests)) == 3
    for step, each in enumerate(updates):
        assert each["ref_kl_tokens"] > 0 and each["ce_tokens"] > 0 and each["rl_tokens"] == 0
        terms = pulled(lived, step)
        assert len(terms) == each["ref_kl_tokens"] and np.abs(terms).mean() > 0.01
        # Of tokens that were sampled at random, signals of both signs may cancel out.
        assert each["ce_loss"] > 1 and each["ref_kl_loss"] == pytest.approx(-terms.mean(), abs=1e-5)


def pulled(lived, step):
    """Return for each token that is drawn to the teacher its live signal times its ratio, as the rows say; no mask."""
    references = lived.by_trace("base", "reference", "references", step)
    samples = lived.by_trace("base", "advantage", "samples", step)
    statistics = lived.rows("base", "training", "token_statistics", step)
    learner = {row["sample_id"]: row["logprobs"] for row in statistics}
    terms = list[Any]()
    for name, (_, prompt, completion) in exchanges(lived, "own", step).items():
        own = np.array(learner[samples[name]["sample_id"]][len(prompt["token_ids"]) :])
        ratio = np.exp(own - np.array(completion["logprobs"]))
        terms.append(((np.array(references[name]["logprobs"]) - own) * ratio)[np.array(completion["mask"])])
    return np.concatenate(terms)


def test_a_second_call_finds_everything_and_starts_nothing(lived):
    lived.train("base", "again")
    assert lived.started["again"] == [] and lived.outcomes["again"]["num_computed"] == 0
    assert lived.outcomes["again"]["policy"] == lived.outcomes["base"]["policy"]


def test_the_policy_shown_a_demonstration_scores_what_it_sampled(lived):
    from renderers import config_from_name, create_renderer
    from renderers.base import load_tokenizer

    assert lived.started["shown"] == ["engine"]
    renderer = create_renderer(load_tokenizer(str(lived.model("policy"))), config_from_name("qwen3"))
    before = {}
    for name, (trace, *_) in exchanges(lived, "own").items():
        text = "A correct answer, for guidance:\n" + json.loads(trace["record"])["task"]["data"]["text"]
        before[name] = renderer.render([{"role": "system", "content": text}]).token_ids
        assert len(before[name]) > 10
    check_references(lived, "shown", lived.model("policy"), before)
