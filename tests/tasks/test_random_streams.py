"""No two random draws share a stream, unless docs/reproducibility.md says why."""

import inspect
import re
from collections import defaultdict
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs.training import LoraConfig
from tasks.arrays import permutation
from tasks.assignment import stage as assigning
from tasks.inference.environments.agent_runs import SEED_STRIDE, call_seed
from tasks.inference.sampling.rollout_runner import RETRY_SEED_STRIDE
from tasks.learner import attention
from tasks.learner.tiny import tiny_qwen3
from tasks.learner.tiny_vision import tiny_qwen3_vl
from tasks.packing import stage as packing
from tests.fixtures.builders import environments, example, table, view

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[2] / "docs/reproducibility.md"
# Names of the page, by the first part of what is hashed.
PURPOSES = {
    "order": "order of the examples in an epoch",
    "pool": "examples by difficulty",
    "held out": "choice of held-out examples",
    "sampling": "seed of an assignment",
    "again": "an evaluation's errors, sampled again",
    "update": "order of the groups in the updates of a step",
}
CALLS, ADAPTER = "tokens of a call", "initial adapter (LoRA)"
STEPS, ENVIRONMENTS, EXAMPLES = 4, ("a", "b"), 12


class Seeds:
    """The seeds of each draw, by its name on the page and what is drawn."""

    def __init__(self):
        self.of = defaultdict(dict)

    def digest(self, *parts):
        """Return the hash that seeds are made of, and note it."""
        value = permutation.digest(*parts)
        self.of[PURPOSES[str(parts[0])]][parts] = value
        return value


def tables_of_examples():
    rows = [example(f"{name}{number}", name) for name in ENVIRONMENTS for number in range(EXAMPLES)]
    rows += [example(f"{name}-held-{number}", name, "eval") for name in ENVIRONMENTS for number in range(3)]
    return {"examples": table("examples", rows)}


def assign(seed):
    """Assign the rollouts of some steps and of an evaluation, by both samplers; return the seeds of all of them."""
    sections = environments(a={}, b={})
    examples, found = tables_of_examples()["examples"], []
    for sampler in ({"type": "standard"}, {"type": "difficulty_pools"}):
        settings = {"groups_per_step": 4, "group_size": 3, "sampler": sampler}
        config = view(assigning.STAGE, seed=seed, environments=sections, assignment=settings)
        for step in range(STEPS):
            for batch in range(2):
                difficulties = table("difficulties", []) if step or batch else None
                request = assigning.BatchRequest(batch)
                inputs = assigning.AssignmentInputs(examples, step, request, difficulties=difficulties)
                found += assigning.assignment(inputs, config)["assignments"]["seed"].to_pylist()
    config = view(
        assigning.EVALUATION_STAGE,
        seed=seed,
        environments=sections,
        evaluation={"num_examples": 2, "attempts": 2, "every": 1},
    )
    evaluated = assigning.evaluation_assignment(assigning.EvaluationInputs(examples), config)["assignments"]
    again = assigning._again(evaluated, evaluated["assignment_id"].to_pylist())
    return found + evaluated["seed"].to_pylist() + again["seed"].to_pylist()


def seeds_of_calls(assigned):
    """Seeds of the calls of two attempts with two agent runs each: the first call, and two prompts that come twice."""
    seeds = {}
    for number, seed in enumerate(dict.fromkeys(assigned)):
        for attempt in range(2):
            for run in range(2):
                run_seed = seed + attempt * RETRY_SEED_STRIDE + run * SEED_STRIDE
                seeds[number, attempt, run, "first"] = run_seed
                for prompt in ("one", "two"):
                    for repetition in range(2):
                        seeds[number, attempt, run, prompt, repetition] = call_seed(run_seed, prompt, repetition)
    return seeds


@pytest.fixture
def seeds(monkeypatch):
    """The seeds of all draws on common inputs: two runs of the same examples."""
    made = Seeds()
    samplers = ("tasks.assignment.samplers.standard", "tasks.assignment.samplers.difficulty_pools")
    for module in (assigning, packing, *map(import_module, samplers)):
        monkeypatch.setattr(module, "digest", made.digest)
    assigned = [seed for run_seed in (0, 7) for seed in assign(run_seed)]
    groups = [f"{step}-{slot}" for step in range(STEPS) for slot in range(4)]
    list(packing.updates(SimpleNamespace(weighted=np.arange(len(groups)), groups=groups), 2))
    assert made.of.keys() == set(PURPOSES.values()), "each of these was drawn"
    # Hashes of assignments are not drawn from as they are, but after a shift to 63 bits.
    for purpose in ("sampling", "again"):
        made.of[PURPOSES[purpose]] = {parts: value >> 1 for parts, value in made.of[PURPOSES[purpose]].items()}
    assert {*assigned} == {*made.of[PURPOSES["sampling"]].values(), *made.of[PURPOSES["again"]].values()}
    made.of[CALLS] = seeds_of_calls(assigned)
    made.of[ADAPTER][()] = LoraConfig().seed
    made.of["initial weights of a small model"][()] = inspect.signature(tiny_qwen3).parameters["seed"].default
    made.of["initial weights of a small model that sees"][()] = (
        inspect.signature(tiny_qwen3_vl).parameters["seed"].default
    )
    (kernel,) = re.findall(r"manual_seed\((\d+)\)", inspect.getsource(attention.largest_difference))
    made.of["states in the check of an attention kernel"][()] = int(kernel)
    return made


def test_each_draw_has_one_seed_for_each_thing_that_is_drawn(seeds):
    for name, by_parts in seeds.of.items():
        assert len({*by_parts.values()}) == len(by_parts), name


def test_draws_share_a_stream_where_the_page_says_why_and_nowhere_else(seeds):
    page = PAGE.read_text(encoding="utf-8")
    drawn, shared = (re.search(rf"## {title}\n.*?(?=\n## )", page, re.DOTALL) for title in ("Draws", "Shared streams"))
    assert drawn is not None and shared is not None
    assert seeds.of.keys() <= {row.split(" | ")[0] for row in re.findall(r"^\| (.*)$", drawn[0], re.MULTILINE)}
    explained = {
        frozenset(pair)
        for row in re.findall(r"^\| (.*? = .*?) \|", shared[0], re.MULTILINE)
        for pair in combinations(row.split(" = "), 2)
    }
    # The first call of a run is drawn from the seed of its assignment, which nothing else is drawn from.
    own = {PURPOSES["sampling"], PURPOSES["again"]}
    found = {
        frozenset((one, other))
        for one, other in combinations(seeds.of.keys() - own, 2)
        if {*seeds.of[one].values()} & {*seeds.of[other].values()}
    }
    assert found == explained
