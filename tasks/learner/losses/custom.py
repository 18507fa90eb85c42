"""A loss of one's own, by import path."""

from dataclasses import replace

import torch
from torch import Tensor

from configs.losses import CustomLoss
from tasks.import_paths import NotImportable, load_function
from tasks.learner.errors import LearnerError
from tasks.learner.losses.tokens import RlTokens, Term


def custom(rl: RlTokens, settings: CustomLoss) -> Term:
    """Return what the function gives for the row's tokens: `function(rl, **arguments)`.

    It returns the loss of every token, (N,) with gradient in `rl.logprobs`, or a Term, which also tells which tokens it
    masked; `importance.surrogate` and `importance_weights` make use of `tis`. Weights, the squared log ratio, sequence
    masks and the denominator are added outside, and what it gives to tokens that are no members counts for nothing.
    Raises LearnerError when it cannot be loaded or gives something else.
    """
    try:
        function = load_function(settings.function)
    except NotImportable as error:
        raise LearnerError(f"training.loss.function: {error}; nothing was trained") from error
    found = function(rl, **settings.arguments)
    none = torch.zeros_like(rl.member)
    term = found if isinstance(found, Term) else Term(found, none, none)
    for name, shape in (("values", rl.logprobs.shape), ("masked", rl.member.shape), ("truncated", rl.member.shape)):
        given = getattr(term, name)
        if not isinstance(given, Tensor) or given.shape != shape:
            what = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise LearnerError(
                f"training.loss.function {settings.function!r} gave {what} for {name}, where a tensor of shape "
                f"{tuple(shape)} is needed, one entry for each token; nothing was trained"
            )
    # Not multiplied by a weight of zero: a value that is not finite would stay.
    return replace(
        term,
        values=torch.where(rl.member, term.values, 0.0),
        masked=term.masked & rl.member,
        truncated=term.truncated & rl.member,
    )
