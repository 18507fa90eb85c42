"""Reference: log-probs of the policy's tokens under a frozen teacher, or under the policy shown a demonstration."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from configs.algorithms import AlgorithmConfig, OpdConfig, OpsdConfig, PreferencesConfig
from configs.run import View, for_environment
from storage.schemas.contract import FLOATS
from storage.schemas.stage_tables import REFERENCES
from tasks.arrays.columns import rows_with, texts
from tasks.arrays.group_parts import group_parts
from tasks.arrays.images import BY_DIGEST
from tasks.arrays.message_graph import find_branches, owners
from tasks.arrays.ragged import Integers, Ragged
from tasks.inference.engine.client import EngineLost, NotScorable, ServedModel, score
from tasks.inference.trace_rows.demonstrations import DemonstrationPrompt
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import EngineService, TeacherService, require
from tasks.runtime.stage import Attempt, Outputs, Policy, Stage, retry_lost
from tasks.runtime.stored_rows import StoredRows, in_parts


@dataclass(frozen=True)
class ScoredPath:
    """A way through a message graph, from a root to the last message that no path before it scores."""

    trace: int
    """Row of its trace."""
    rows: list[int]
    """Rows of its messages, from the root on."""
    new: frozenset[int]
    """Those of them whose sampled tokens are scored on this path."""


class Scores:
    """Log-probs of the tokens of messages under a reference, laid down path by path."""

    def __init__(self, messages: pa.Table) -> None:
        self._messages = messages
        self._mask = Ragged.of(messages["mask"])
        self._tokens = Ragged.of(messages["token_ids"])
        # Zero, and not NaN, on tokens that were not sampled: they are no part of any signal.
        self._values: npt.NDArray[np.float32] = np.zeros(len(self._mask.values), np.float32)
        self._sampled = np.zeros(messages.num_rows, np.bool_)
        self._sampled[self._mask.row_of_value[self._mask.values]] = True

    def paths(self, owner: Integers) -> Iterator[ScoredPath]:
        """Yield the paths on which every message with sampled tokens is scored once: on the first branch through it.

        `owner` is the trace row of each message; shape [messages].
        """
        branches = find_branches(self._messages, owner)
        waiting = self._sampled.copy()
        for branch, trace in enumerate(branches.owner.tolist()):
            path = branches.path.values[branches.path.offsets[branch] : branches.path.offsets[branch + 1]].tolist()
            if new := [row for row in path if waiting[row]]:
                waiting[new] = False
                yield ScoredPath(trace, path[: path.index(new[-1]) + 1], frozenset(new))

    def tokens(self, path: ScoredPath) -> list[int]:
        """Return the token ids along a path."""
        found: list[int] = self._tokens.take(path.rows).values.tolist()
        return found

    def begins_sampled(self, path: ScoredPath) -> bool:
        """Tell whether the first token of a path was sampled, which nothing goes before that it could be given."""
        return bool(self._mask.take(path.rows).values[:1].any())

    def lay(self, path: ScoredPath, logprobs: Sequence[float]) -> None:
        """Keep the log-probs of a path's tokens, one for each, for the messages that are scored on it."""
        begin = 0
        for row in path.rows:
            place = slice(*self._mask.offsets[row : row + 2])
            end = begin + place.stop - place.start
            if row in path.new:
                self._values[place] = logprobs[begin:end]
            begin = end
        assert begin == len(logprobs), f"{len(logprobs)} log-probs for a path of {begin} tokens"

    def rows(self) -> pa.Table:
        """Return the rows of references: one for each message with sampled tokens; other tokens have 0."""
        chosen = np.flatnonzero(self._sampled)
        values = np.where(self._mask.values, self._values, np.float32(0))
        taken = self._messages.select(["trace_id", "message"]).take(chosen)
        logprobs = Ragged(values, self._mask.offsets).take(chosen).arrow(FLOATS)
        return pa.table([*taken.columns, logprobs], schema=REFERENCES.arrow)


SAFE = "Nothing was scored; the rows are safe"


@dataclass(frozen=True)
class ReferenceInputs:
    """The rollouts of a step with their verdicts, and the services that score them."""

    traces: StoredRows
    messages: StoredRows
    verdicts: StoredRows
    policy: Policy | None
    """The policy that sampled the rollouts, for algorithms that score with it."""
    engine: EngineService
    teachers: TeacherService

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        tables = attempt.rows("traces"), attempt.rows("messages"), attempt.rows("verdicts")
        services = require(attempt.services.engine), require(attempt.services.teachers)
        return cls(*tables, attempt.policy, *services)


def reference(inputs: ReferenceInputs, config: View) -> Outputs:
    """Return, for every message with sampled tokens of a kept trace that has a scorer, the reference's log-probs.

    A message is scored once, on the first branch that comes through it, given all tokens before it on the way. Messages
    are read a part after the other; all are looked at before the first is scored, so that a refusal wastes no work.

    The reverse KL is between the distributions that were sampled from, and an engine applies no temperature to the
    log-probs of a prompt: the traces must have been sampled at temperature 1. Raises NotScorable for those that were
    not, that are too long, or that no demonstration is known for. A loss of an engine is waited for, as in a rollout;
    what the services raise when it does not come back is passed on.
    """
    traces = _scorable_traces(inputs.traces.table(), inputs.verdicts.table(), config)
    scorers = Scorers(config, inputs.policy, inputs.engine, inputs.teachers)
    rows = _scored_parts(traces, inputs.messages, scorers)
    return {"references": in_parts(rows) if inputs.messages.num_parts > 1 else pa.concat_tables(rows)}


def _scored_parts(traces: pa.Table, messages: StoredRows, scorers: "Scorers") -> Iterator[pa.Table]:
    with scorers.pinned():
        if messages.num_parts > 1:
            for part in group_parts(traces, messages):
                _plan(*part, scorers)
        for part in group_parts(traces, messages):
            yield _plan(*part, scorers).score()


class Scorers:
    """Who scores the traces of each environment."""

    def __init__(self, config: View, policy: Policy | None, engine: EngineService, teachers: TeacherService) -> None:
        self.config = config
        self._policy, self._engine, self._teachers = policy, engine, teachers
        self._known: dict[str, Scorer] = {}

    def pinned(self) -> AbstractContextManager[object]:
        """Return a context in which nobody loads another policy into the engine between two calls."""
        return self._engine.pinned(self._policy) if self._policy else nullcontext()

    def of(self, environment: str) -> "Scorer":
        """Return the scorer of an environment, which is made once."""
        if environment not in self._known:
            settings = for_environment(self.config.scorers, environment)
            at, most = _scorer(settings, self._policy, self._engine, self._teachers)
            shown = DemonstrationPrompt(settings, self.config.model) if isinstance(settings, OpsdConfig) else None
            self._known[environment] = Scorer(at, most, shown)
        return self._known[environment]


@dataclass(frozen=True)
class Scorer:
    """A model that scores tokens."""

    at: Callable[[], ServedModel]
    """Says where it is served, and waits until it is."""
    most: int
    """Sequences that it takes at once."""
    shown: DemonstrationPrompt | None
    """What it is shown before each sequence."""


@dataclass(frozen=True)
class ScoringPlan:
    """What is to be scored of some traces."""

    scores: Scores
    calls: list[tuple[Scorer, list[ScoredPath], list[list[int]]]]
    """For each environment its scorer, its paths, and the sequence that ends with the tokens of each."""

    def score(self) -> pa.Table:
        """Return the rows of references."""
        for scorer, paths, sequences in self.calls:
            for path, logprobs in zip(paths, _score(sequences, scorer.at, scorer.most), strict=True):
                self.scores.lay(path, logprobs[len(logprobs) - len(self.scores.tokens(path)) :])
        return self.scores.rows()


def _plan(traces: pa.Table, messages: pa.Table, scorers: Scorers) -> ScoringPlan:
    """Return what is to be scored of some traces; raise NotScorable where one cannot be."""
    messages = rows_with(messages, "trace_id", traces["trace_id"])
    _refuse_images(messages)
    scores = Scores(messages)
    paths = list(scores.paths(owners(messages, traces, "messages")))
    environments, rows = texts(traces["environment"]), traces.to_pylist()
    plan = ScoringPlan(scores, [])
    for name in dict.fromkeys(environments):
        scorer, sequences = scorers.of(name), list[list[int]]()
        chosen = [path for path in paths if environments[path.trace] == name]
        for path in chosen:
            tokens, trace = scores.tokens(path), rows[path.trace]
            sequence = scorer.shown.prepend(trace, tokens) if scorer.shown else tokens
            # What is shown goes before the first token, so that a sampled one has something to be predicted from.
            unpreceded = len(sequence) == len(tokens) and scores.begins_sampled(path)
            _refuse(trace, sequence, scorers.config.engine.max_model_len, unpreceded)
            sequences.append(sequence)
        plan.calls.append((scorer, chosen, sequences))
    return plan


def _score(sequences: Sequence[Sequence[int]], at: Callable[[], ServedModel], most: int) -> list[list[float]]:
    """Return the log-probs of all sequences; those that were lost with an engine are asked for again of the next."""
    done: dict[int, list[float]] = {}

    def score_missing() -> None:
        while missing := [place for place in range(len(sequences)) if place not in done]:
            served = at()  # waits for a restart, or raises when none is left
            for place, found in score(served, [sequences[each] for each in missing], most):
                done[missing[place]] = found

    retry_lost(score_missing, EngineLost)
    return [done[place] for place in range(len(sequences))]


def _scorer(
    settings: AlgorithmConfig | None, policy: Policy | None, engine: EngineService, teachers: TeacherService
) -> tuple[Callable[[], ServedModel], int]:
    """Return what says where the scorer is served, and waits until it is, and how many sequences it takes at once."""
    if isinstance(settings, OpdConfig | PreferencesConfig):
        teacher = settings.teacher
        return lambda: teachers.serve(teacher), teacher.max_in_flight
    assert isinstance(settings, OpsdConfig), f"{settings} scores nothing"
    if policy is None:
        raise NotScorable(
            "algorithm opsd scores with the policy that sampled the rollouts, and no policy of the store sampled "
            f"these. {SAFE}. Choose another algorithm"
        )
    return lambda: engine.serve(policy), settings.max_in_flight


def _scorable_traces(traces: pa.Table, verdicts: pa.Table, config: View) -> pa.Table:
    """Return the kept traces that have a scorer; refuse those at a temperature that cannot be scored at."""
    kept = rows_with(traces, "trace_id", verdicts.filter(verdicts["keep"])["trace_id"])
    has_scorer = [for_environment(config.scorers, name) is not None for name in texts(kept["environment"])]
    chosen = kept.filter(pa.array(has_scorer, pa.bool_()))
    other = chosen.filter(pc.not_equal(chosen["temperature"], pa.scalar(1.0, pa.float32())))
    if other.num_rows:
        raise NotScorable(
            f"table traces, column temperature: {other.num_rows} kept traces, first {other['trace_id'][0]} of "
            f"environment {other['environment'][0]}, were sampled at {other['temperature'][0].as_py():g}; a reference "
            f"is scored at 1, the only temperature at which engines score a prompt. {SAFE}. Sample at "
            "rollout.temperature=1, or choose an algorithm without a reference"
        )
    return chosen


def _refuse_images(messages: pa.Table) -> None:
    """Raise NotScorable for messages with images: an engine would score the tokens without them, and not say so."""
    shown = messages.filter(pc.match_substring(messages["body"], BY_DIGEST))
    if shown.num_rows:
        raise NotScorable(
            f"table messages: {shown.num_rows} messages of kept traces show images, first of trace "
            f"{shown['trace_id'][0]}; a reference reads text alone. {SAFE}. Choose an algorithm without a reference"
        )


def _refuse(trace: dict[str, object], sequence: Sequence[int], longest: int, begins_sampled: bool) -> None:
    where = f"trace {trace['trace_id']} of environment {trace['environment']}"
    if begins_sampled:
        raise NotScorable(f"{where} begins with a sampled token, which nothing goes before. {SAFE}. Quarantine it")
    if len(sequence) > longest:
        raise NotScorable(
            f"{where} has {len(sequence)} tokens to be scored, with what is shown before them; engine.max_model_len is "
            f"{longest}. {SAFE}. Raise engine.max_model_len, or shorten what is shown (algorithm.template)"
        )


STAGE = Stage(
    name="reference",
    version=1,
    reads=("traces", "messages", "verdicts"),
    writes=("references",),
    sections=("scorers", "engine", "model"),
    read_inputs=ReferenceInputs.read,
    function=reference,
    services=("engine", "teachers"),
)
task = as_task(STAGE)
