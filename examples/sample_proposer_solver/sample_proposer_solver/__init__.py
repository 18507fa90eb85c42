"""A verifiers environment of two seats: one sets sums, the other solves each of them several times."""

from sample_proposer_solver.episode import ProposerSolverEnv
from sample_proposer_solver.taskset import ProposerSolverTaskset

__all__ = ["ProposerSolverEnv", "ProposerSolverTaskset"]
