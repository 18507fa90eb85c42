"""Losses as a user might write them, for `training.loss.type = "custom"`."""

import math

import torch

from tasks.learner.losses.importance import surrogate
from tasks.learner.losses.tokens import Term


def reinforce(rl, scale=1.0):
    """Policy gradient without an importance ratio."""
    return -scale * rl.advantages * rl.logprobs


def only_praise(rl):
    """The surrogate on tokens of positive advantage."""
    return surrogate(rl, rl.member & (rl.advantages < 0))


def not_a_number(rl):
    """Zero on the tokens that count, and not a number on the others."""
    return torch.where(rl.member, rl.logprobs * 0.0, math.nan)


def a_sum(rl):
    """One number for all, which is not what is asked for."""
    return (rl.advantages * rl.logprobs).sum()


def a_number(rl):
    """Not even a tensor."""
    return 0.0


def all_masked(rl):
    """Nothing to learn from any token of the row, members or not."""
    every = torch.ones_like(rl.member)
    return Term(rl.logprobs * 0.0, every, every)


def forgetful(rl, scales):
    """Policy gradient with a scale that only the first call finds."""
    return reinforce(rl, scales.pop())
