"""Evaluation: which held-out examples a policy is tried on, how often, and when."""

from pydantic import Field

from configs.fields import Section, operational


class EvaluationConfig(Section):
    num_examples: int = Field(64, ge=1)
    """Held-out examples tried, the first in hash order."""
    attempts: int = Field(1, ge=1)
    """Rollouts of each example, k of avg@k."""
    pass_at: tuple[int, ...] = operational((1,))
    """The k of pass@k by the unbiased estimator; none above attempts."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature in evaluation."""
    policy: str = operational("")
    """The policy to evaluate: RUN for a run's last one, RUN:VERSION for an earlier one; empty takes model.path."""
    every: int = operational(0, ge=0)
    """Evaluate every n steps during training; 0 only when asked."""
