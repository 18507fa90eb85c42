"""One episode: the proposer sets a problem, the solver tries it several times, and all of them are scored."""

from collections.abc import Sequence

import verifiers.v1 as vf
from sample_arena.scores import complete, errored, of_rewards, record
from sample_arena.seeds import shift_seed

from sample_proposer_solver.sums import Problem, difficulty, is_right, proposed
from sample_proposer_solver.taskset import RequestData, SumTask

PROPOSER, SOLVER = "proposer", "solver"


class ProposerSolverEnvConfig(vf.EnvConfig):
    """The two seats; how often the second one plays is the taskset's."""

    proposer: vf.AgentConfig = vf.AgentConfig()
    """Sets the problem."""
    solver: vf.AgentConfig = vf.AgentConfig()
    """Tries it, in several runs that know nothing of each other."""


class ProposerSolverEnv(vf.Env[ProposerSolverEnvConfig]):
    """A problem is set, and tried where it is one.

    A solver's run earns 1 where it is right and 0 where not. The proposer earns most where half of the runs are right,
    see `sums.difficulty`, and 0 where its reply is no problem that it was asked for: that ends the episode, without a
    solver, and is a score like any other.
    """

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Let the proposer reply, and the solver as often as the taskset says."""
        trace = await agents.proposer.run(task)
        if failed(trace):
            return
        problem = said(task.data, trace)
        if problem is None:
            return
        each = SumTask.of(problem, self.taskset.config.explain_rules)
        for _ in range(self.taskset.config.num_solvers):
            shift_seed(agents.solver)  # the same prompt with the same seed would be the same run again
            await agents.solver.run(each)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Score what can be scored.

        Where a solver's run failed the share of those that were right is not known, and the proposer is not scored;
        runs that did not fail keep what they earned.
        """
        proposer = next(trace for trace in episode.traces if trace.agent.name == PROPOSER)
        solvers = [trace for trace in episode.traces if trace.agent.name == SOLVER]
        if failed(proposer):
            _score(proposer, None)
            return
        problem = said(task.data, proposer)
        proposer.record_metric("valid", float(problem is not None))
        if problem is None:
            _score(proposer, 0.0)
            return
        right = _score_solvers(solvers, problem)
        if right is None:
            _score(proposer, None)
            return
        proposer.record_metric("solve_rate", right / len(solvers))
        _score(proposer, difficulty(right, len(solvers)))


def failed(trace: vf.Trace) -> bool:
    """Whether a run ended without a reply to be judged."""
    return not trace.ok or trace.is_timeout or not trace.num_turns


def said(asked: RequestData, trace: vf.Trace) -> Problem | None:
    """The problem that the proposer's reply is, None where it is none."""
    return proposed(trace.last_reply, asked.beginning, asked.largest)


def _score_solvers(solvers: Sequence[vf.Trace], problem: Problem) -> int | None:
    """Score the solvers' runs; return how many were right, None where it is not known of all."""
    right = 0
    for trace in solvers:
        if failed(trace):
            _score(trace, None)
            continue
        reward = is_right(trace.last_reply, problem)
        _score(trace, float(reward))
        right += reward
    return None if any(map(failed, solvers)) else right


def _score(trace: vf.Trace, reward: float | None) -> None:
    """Write one run's score: several runs of one agent are scored one by one."""
    members = [trace.agent.name]
    if reward is None:
        record(errored("a run of the episode failed", members), [trace])
    else:
        record(complete(of_rewards({members[0]: reward}), members), [trace])
