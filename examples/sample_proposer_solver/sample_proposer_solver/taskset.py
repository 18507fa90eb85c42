"""The taskset that verifiers loads under the id `sample_proposer_solver`: its tasks are requests for a problem."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from sample_proposer_solver.sums import Problem, beginnings, question, request

RULES_OF_PROPOSER = (
    "You set problems for others. You are told how a problem begins and the largest number that may follow, as in "
    "'Set 7+? to 9'. Reply with the number that completes it alone, as in '5'. The best problems are solved by half of "
    "those who try."
)
RULES_OF_SOLVER = "Reply with the result alone, a whole number."


class RequestData(vf.TaskData):
    """How the problem is to begin."""

    beginning: str
    """A number and an operator."""
    largest: int
    """The largest number that may follow."""


class RequestTask(vf.Task[RequestData]):
    """A problem to be set; what it is worth shows when others have tried it, so that the episode scores it."""

    @property
    def key(self) -> str:
        """How the problem begins: stable whatever else is asked for."""
        return self.data.beginning


class SumData(vf.TaskData):
    """A problem that was set, as a solver is asked."""

    problem: str
    """The problem itself."""


class SumTask(vf.Task[SumData]):
    """A problem to be solved; scored with the episode."""

    @classmethod
    def of(cls, problem: Problem, explain_rules: bool) -> "SumTask":
        """The task of solving a problem."""
        system = RULES_OF_SOLVER if explain_rules else None
        return cls(SumData(prompt=question(problem), problem=problem.text, system_prompt=system))


class ProposerSolverConfig(vf.TasksetConfig):
    """Which problems there are, and how often each is tried."""

    num_solvers: int = Field(4, ge=1)
    """Runs of the solver on one problem."""
    largest: int = Field(9, ge=1)
    """The largest number in a problem."""
    explain_rules: bool = False
    """Whether system prompts say what to reply, for a model that was not warmed up."""


class ProposerSolverTaskset(vf.Taskset[RequestTask, ProposerSolverConfig]):
    """A request for each beginning of a problem."""

    def load(self) -> Iterator[RequestTask]:
        """Yield one task for each beginning."""
        system = RULES_OF_PROPOSER if self.config.explain_rules else None
        largest = self.config.largest
        for beginning in beginnings(largest):
            data = RequestData(
                prompt=request(beginning, largest), beginning=beginning, largest=largest, system_prompt=system
            )
            yield RequestTask(data, self.config.task)
