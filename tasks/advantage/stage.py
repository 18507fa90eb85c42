"""Advantage: credits every kept trace, and every token of its branches, by its environment's algorithm."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.algorithms import AlgorithmConfig
from configs.run import View
from configs.sections import AdmissionConfig
from storage.schemas.contract import FLOATS, INDICES
from storage.schemas.stage_tables import ESTIMATOR_STATES, SAMPLES
from tasks.advantage.algorithms import ALGORITHMS
from tasks.advantage.algorithms.credit import AdvantageBreach, Credit, GroupedTraces
from tasks.advantage.per_environment import credit_by_environment, require_agents
from tasks.arrays.columns import codes, rows_with, texts
from tasks.arrays.finding import Flags
from tasks.arrays.group_parts import group_parts
from tasks.arrays.message_graph import Branches, drop_rejected, find_branches, owners
from tasks.arrays.parse_errors import check_flagged_messages, parse_error_flags
from tasks.arrays.ragged import Ragged, places
from tasks.arrays.seats import trained_seats
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Attempt, Outputs, Stage, Tables
from tasks.runtime.stored_rows import StoredRows

ROUNDING = 1e-9
"""An advantage this close to the refused range counts as within: a mean of equal rewards is not always exact."""
SINGLE = 2.0**-23
"""The same, as a share of an end of the range: advantages of tokens are stored in single precision."""


def without_unreadable(kept: GroupedTraces) -> tuple[GroupedTraces, Flags]:
    """Return the same with no token of an unreadable turn marked as sampled, and per token whether it is of one.

    The tokens stay where they are, as context of the turns after them. Raises StrangeFlag where a trace flags a message
    that it does not have.
    """
    check_flagged_messages(kept.traces, kept.messages, kept.owner)
    mute = parse_error_flags(kept.traces, kept.messages, kept.owner)[kept.mask.row_of_value]
    return replace(kept, mask=Ragged(kept.mask.values & ~mute, kept.mask.offsets)), mute


def refused_tokens(kept: GroupedTraces, credit: Credit, settings: AdmissionConfig) -> Flags:
    """Return, per token, whether its group is refused: all its rl tokens have advantages within the range.

    A group without rl tokens is not.
    """
    group_of_trace, groups = codes(kept.traces["group_id"])
    group = group_of_trace[kept.owner[kept.mask.row_of_value]]
    worth = credit.signals(kept).astype(np.float64)
    rl = credit.rl != 0
    lowest, highest = (end + sign * _slack(end) for end, sign in ((settings.reject_min, -1), (settings.reject_max, 1)))
    apart = (worth < lowest) | (worth > highest)
    weighed, differing = (np.bincount(group, flags, len(groups)) for flags in (rl, rl & apart))
    # A group is refused whole, and so are its tokens of other components.
    found: Flags = ((weighed > 0) & (differing == 0))[group]
    return found


def _slack(end: float) -> float:
    return ROUNDING + SINGLE * abs(end)


def silence(kept: GroupedTraces, credit: Credit, tokens: Flags) -> Credit:
    """Return the credit without weight on some tokens; what their traces would have been worth stays to be read."""
    if not tokens.any():
        return credit
    rl, ce, ref_kl, signal = (
        np.where(tokens, np.float32(0), stream)
        for stream in (credit.rl, credit.ce, credit.ref_kl, credit.signals(kept))
    )
    return replace(credit, rl=rl, ce=ce, ref_kl=ref_kl, signal=signal)


class ImportedWithoutTokens(AdvantageBreach):
    """Rollouts whose tokens no policy is known to have sampled were to be trained on by reinforcement learning."""


class StateMissing(AdvantageBreach):
    """An algorithm carries state from step to step, and that of the step before is not there."""


@dataclass(frozen=True)
class AdvantageInputs:
    """The rollouts of a step with their verdicts, and what some algorithms need in addition."""

    traces: StoredRows
    messages: StoredRows
    verdicts: StoredRows
    references: StoredRows | None
    estimator_states: StoredRows | None
    """After the step before; None where no algorithm had any."""
    step: int

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        tables = attempt.rows("traces"), attempt.rows("messages"), attempt.rows("verdicts")
        optional = attempt.optional_rows("references"), attempt.optional_rows("estimator_states")
        return cls(*tables, *optional, attempt.step)


def advantage(inputs: AdvantageInputs, config: View) -> Outputs:
    """Return one credit per branch of every kept trace, with per-token streams laid along the branch.

    Each environment's traces are credited by its own algorithm, which sees no others. A token that several branches
    share has its weight in the first of them only, so it is trained exactly once. Turns that the environment could not
    read, and groups that the section `admission` refuses, have no weight; what a refused trace would have been worth
    stays in its column `advantage`.

    Raises AdvantageBreach if verdicts and traces do not match, an errored trace is kept, a reward is not finite, a kept
    trace has no messages, a group's advantages do not add up to zero where the algorithm says so, or a group has
    several trainable agents that its algorithm does not keep apart; ImportedWithoutTokens if tokens that no policy
    sampled were to be in the rl component; StateMissing where an algorithm has lost its state.
    """
    traces, verdicts, step = inputs.traces.table(), inputs.verdicts.table(), inputs.step
    states = inputs.estimator_states.table() if inputs.estimator_states else None
    if sorted(texts(traces["trace_id"])) != sorted(texts(verdicts["trace_id"])):
        raise _breach("verdicts", "trace_id", "there is not exactly one verdict for every trace")
    stateful = _stateful(config)
    if stateful and step and states is None:
        raise StateMissing(
            f"table estimator_states: algorithm {stateful} goes on from the state after step {step - 1}, which "
            "recorded none. Nothing was credited: a cold start would look healthy and be wrong. All that was sampled "
            "is safe. Begin at step 0 (replay: without --steps), or choose an algorithm without state."
        )
    environments = dict.fromkeys(texts(traces["environment"]))
    algorithms = {name: config.algorithms.get(name, config.algorithm) for name in environments}
    parts = CreditedParts(traces, verdicts, states, inputs.messages, inputs.references, config, algorithms)
    made = {"samples": parts.samples()} | ({"estimator_states": parts.states()} if stateful else {})
    return made if parts.are_several else {name: next(rows) for name, rows in made.items()}


class CreditedParts:
    """Credits the traces of a step a part after the other, each with whole groups; all at once where that must be."""

    def __init__(
        self,
        traces: pa.Table,
        verdicts: pa.Table,
        states: pa.Table | None,
        messages: StoredRows,
        references: StoredRows | None,
        config: View,
        algorithms: Mapping[str, AlgorithmConfig],
    ) -> None:
        """Take what is small of all traces, then what is not, and the algorithm of each environment."""
        self._traces, self._verdicts, self._states = traces, verdicts, states
        self._messages, self._references = messages, references
        self._config, self._algorithms = config, algorithms
        self.are_several = messages.num_parts > 1 and not any(map(_sees_all, algorithms.values()))
        self._of_batch: dict[str, tuple[float, float]] = {}
        """Baseline and advantage by trace, where they are made of all parts before any is credited."""

    def samples(self) -> Iterator[pa.Table]:
        """Yield the rows of samples."""
        if self.are_several and any(map(_sees_rewards, self._algorithms.values())):
            self._of_batch = self._credit_batch()
        for tables in self._parts():
            # At the end of a part, states go on to the next as they do from step to step.
            states = {} if self._states is None else {"estimator_states": self._states}
            samples, after = self._credit_part(tables | states)
            self._states = self._states if after is None else after
            yield samples

    def states(self) -> Iterator[pa.Table]:
        """Yield the states of estimators, once all samples have been taken."""
        yield ESTIMATOR_STATES.arrow.empty_table() if self._states is None else self._states

    def _parts(self) -> Iterator[dict[str, pa.Table]]:
        if not self.are_several:
            references = {} if self._references is None else {"references": self._references.table()}
            messages = self._messages.table()
            yield {"traces": self._traces, "verdicts": self._verdicts, "messages": messages, **references}
            return
        verdicts, scored = self._verdicts, None if self._references is None else InOrder(self._references)
        for own, messages in group_parts(self._traces, self._messages):
            judged = rows_with(verdicts, "trace_id", own["trace_id"])
            references = {} if scored is None else {"references": scored.of(own["trace_id"].combine_chunks())}
            yield {"traces": own, "messages": messages, "verdicts": judged, **references}

    def _credit_part(self, tables: Tables) -> tuple[pa.Table, pa.Table | None]:
        """Return the samples of some groups, and the states of estimators after them."""
        kept, mute = without_unreadable(_grouped_traces(tables))
        require_agents(trained_seats(tables["traces"], self._config.seat_rules), self._algorithms)
        # The gate comes last: a turn that nobody could read must not be what admits a group.
        credit = silence(kept, credit_by_environment(kept, self._algorithms.__getitem__, self._credit), mute)
        check_sampled(kept, credit)
        if self._config.admission is not None:
            credit = silence(kept, credit, refused_tokens(kept, credit, self._config.admission))
        return _credits(kept, credit, find_branches(kept.messages, kept.owner)), credit.states

    def _credit(self, kept: GroupedTraces, settings: AlgorithmConfig) -> Credit:
        if not (self._of_batch and _sees_rewards(settings)):
            return _credit(kept, settings)
        worth = np.array([self._of_batch[name] for name in texts(kept.traces["trace_id"])])
        return Credit.of_advantages(kept, worth[:, 0], worth[:, 1])

    def _credit_batch(self) -> dict[str, tuple[float, float]]:
        """Return baseline and advantage of every kept trace whose algorithm needs the rewards of all."""
        found: dict[str, tuple[float, float]] = {}
        batch = GroupedTraces.without_messages(
            without_unreadable(_grouped_traces(tables))[0] for tables in self._parts()
        )
        for name in dict.fromkeys(texts(batch.traces["environment"])):
            if _sees_rewards(settings := self._algorithms[name]):
                own = batch.of(name)
                credit = _credit(own, settings)
                worth = zip(credit.baseline.tolist(), credit.advantage.tolist(), strict=True)
                found |= zip(texts(own.traces["trace_id"]), worth, strict=True)
        return found


class InOrder:
    """Rows about some of the traces, in the order of the traces."""

    def __init__(self, rows: StoredRows) -> None:
        self._coming, self._waiting = rows.parts(), rows.schema.empty_table()

    def of(self, trace_ids: "pa.Array[pa.StringScalar]") -> pa.Table:
        """Return the rows of the traces that come next, up to the first row of a later one."""
        found = list[pa.Table]()
        while True:
            own = pc.is_in(self._waiting["trace_id"], value_set=trace_ids)
            found.append(self._waiting.filter(own))
            self._waiting = self._waiting.filter(pc.invert(own))
            if self._waiting.num_rows or (further := next(self._coming, None)) is None:
                return pa.concat_tables(found)
            self._waiting = further


def _sees_all(settings: AlgorithmConfig) -> bool:
    """Tell whether a user's function is called, of which nobody says that it may be given a part of a batch."""
    called = ALGORITHMS[settings.type].sees == "all" or bool(getattr(settings, "keep_mask", ""))
    return called and not getattr(settings, "in_parts", False)


def _sees_rewards(settings: AlgorithmConfig) -> bool:
    return ALGORITHMS[settings.type].sees == "rewards"


def _stateful(config: View) -> str:
    """Return the type of an algorithm that carries state from step to step; empty where none does."""
    each = (config.algorithm, *config.algorithms.values())
    return next((settings.type for settings in each if settings.stateful), "")


def _credit(kept: GroupedTraces, settings: AlgorithmConfig) -> Credit:
    algorithm = ALGORITHMS[settings.type]
    credit = algorithm.credit(kept, settings)
    if algorithm.zero_sum and credit.zero_sum:
        check_zero_sum(kept.traces, credit)
    return credit


def check_zero_sum(traces: pa.Table, credit: Credit) -> None:
    """Raise AdvantageBreach if the advantages of a group's traces do not add up to zero, up to rounding."""
    code, names = codes(traces["group_id"])
    values = np.nan_to_num(credit.advantage)
    total, scale = np.bincount(code, values, len(names)), np.bincount(code, np.abs(values), len(names))
    # Not `>`: a sum that is not a number is wrong, too.
    wrong = np.flatnonzero(~(np.abs(total) <= 1e-9 * (1 + scale)))
    if len(wrong):
        raise AdvantageBreach(
            f"table samples, column advantage: group {names[wrong[0]]} adds up to {total[wrong[0]]:.3g}, not to zero "
            f"({len(wrong)} groups). Nothing was trained. A trace outside the baseline was given an advantage."
        )


def check_sampled(kept: GroupedTraces, credit: Credit) -> None:
    """Raise ImportedWithoutTokens if a trace that no policy is known to have sampled has weight in rl or ref_kl.

    The log-probs of such a trace (a demonstration, an import of text or of token ids alone) are zeros: its importance
    ratio would be the policy's probability, and means nothing. Those of a frozen teacher are the teacher's own.
    """
    unsampled = np.array([key == "" for key in texts(kept.traces["policy_key"])], np.bool_)
    weighted = np.zeros(kept.traces.num_rows, np.bool_)
    weighted[kept.owner[kept.mask.row_of_value[(credit.rl != 0) | (credit.ref_kl != 0)]]] = True
    if len(wrong := np.flatnonzero(unsampled & weighted)):
        raise ImportedWithoutTokens(
            f"table traces, column policy_key: {len(wrong)} kept traces, first "
            f"{kept.traces['trace_id'][int(wrong[0])]}, have tokens that no policy sampled, or none with log-probs: "
            "the renderer made them of text, an imported file held token ids alone, or a frozen teacher sampled them "
            "(algorithm sft). The rl and ref_kl components need the policy's log-prob of every token. Nothing was "
            "trained on; the rows are safe. Train on them with algorithm.type=supervised, or score or export them. For "
            "reinforcement learning, import traces with token ids and log-probs (verifiers writes them where its "
            "client is of type train)."
        )


def _grouped_traces(tables: Tables) -> GroupedTraces:
    """Return the kept traces and their messages, in table order; raise AdvantageBreach if they do not match."""
    traces, messages, verdicts = tables["traces"], tables["messages"], tables["verdicts"]
    keep = verdicts.filter(verdicts["keep"])["trace_id"]
    chosen = rows_with(traces, "trace_id", keep)
    if (errored := chosen.filter(pc.is_valid(chosen["error_class"]))).num_rows:
        raise _breach("verdicts", "keep", f"errored trace {errored['trace_id'][0]} is kept and would enter a baseline")
    if not np.isfinite(chosen["reward"].drop_null().to_numpy()).all():
        raise _breach("traces", "reward", "a kept trace has a reward that is not finite")
    own = drop_rejected(chosen, rows_with(messages, "trace_id", keep))
    owner = owners(own, chosen, "messages")
    empty = np.setdiff1d(np.arange(chosen.num_rows), owner)
    if len(empty):
        raise _breach("messages", "trace_id", f"kept trace {chosen['trace_id'][int(empty[0])]} has no messages")
    return GroupedTraces(
        chosen, own, owner, Ragged.of(own["mask"]), _references(tables, own), tables.get("estimator_states")
    )


def _references(tables: Tables, messages: pa.Table) -> Ragged | None:
    """Return the log-probs under the reference, laid along the messages; raise AdvantageBreach if some do not fit."""
    if "references" not in tables:
        return None
    rows = tables["references"]
    place = {
        each: row for row, each in enumerate(zip(texts(rows["trace_id"]), rows["message"].to_pylist(), strict=True))
    }
    names = list(zip(texts(messages["trace_id"]), messages["message"].to_pylist(), strict=True))
    # Messages without a sampled token have no row; nor has what no algorithm asked a score for.
    own = np.array([row for row, each in enumerate(names) if each in place], np.int64)
    found = np.array([place[names[row]] for row in own], np.int64)
    scored, lengths = Ragged.of(rows["logprobs"]), Ragged.of(messages["mask"]).lengths
    if len(wrong := own[scored.lengths[found] != lengths[own]]):
        trace, message = names[wrong[0]]
        raise _breach("references", "logprobs", f"message {message} of trace {trace} has another length")
    laid = Ragged.from_lengths(np.full(lengths.sum(), np.nan, np.float32), lengths)  # zero is a log-prob too
    where, _ = places(laid.offsets, own)
    laid.values[where] = scored.take(found).values
    return laid


def _breach(table: str, column: str, what: str) -> AdvantageBreach:
    return AdvantageBreach(
        f"table {table}, column {column}: {what}. Nothing was trained on these rows; all that was sampled is safe. "
        "Run the stage that wrote the table again."
    )


def _credits(kept: GroupedTraces, credit: Credit, branches: Branches) -> pa.Table:
    tokens = kept.mask.take(branches.path.values)
    counts = branches.path.lengths
    # A token that branches share is laid along each of them, and weighs in the first alone.
    once = np.repeat(branches.first, tokens.lengths)

    def along(stream: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Ragged:
        taken = Ragged(stream, kept.mask.offsets).take(branches.path.values)
        return Ragged(np.where(once, taken.values, np.float32(0)), taken.offsets).merge(counts)

    rl = along(credit.rl)
    traces = kept.traces.take(branches.owner)
    numbers = kept.messages["message"].to_numpy()
    columns = {
        "sample_id": [f"{i}/{n}" for i, n in zip(texts(traces["trace_id"]), branches.number, strict=True)],
        "trace_id": traces["trace_id"],
        "branch": pa.array(branches.number, pa.int32()),
        "group_id": traces["group_id"],
        "path": Ragged(numbers[branches.path.values], branches.path.offsets).arrow(INDICES),
        "reward": traces["reward"],
        "baseline": pa.array(credit.baseline[branches.owner], from_pandas=True),
        "advantage": pa.array(credit.advantage[branches.owner], from_pandas=True),
        "num_tokens": pa.array(rl.lengths),
        "advantages": along(credit.signals(kept)).arrow(FLOATS),
        "rl_weights": rl.arrow(FLOATS),
        "ce_weights": along(credit.ce).arrow(FLOATS),
        "ref_kl_weights": along(credit.ref_kl).arrow(FLOATS),
    }
    return pa.table(columns, schema=SAMPLES.arrow)


STAGE = Stage(
    name="advantage",
    version=2,
    reads=("traces", "messages", "verdicts"),
    writes=("samples", "estimator_states"),
    sections=("algorithm", "algorithms", "admission", "seat_rules"),
    read_inputs=AdvantageInputs.read,
    function=advantage,
    optional=("references", "estimator_states"),
)
task = as_task(STAGE)
