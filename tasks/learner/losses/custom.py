"""A user's own loss, by import path."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from configs.losses import CustomLoss
from tasks.learner.losses.tokens import RlTokens, Term
from tasks.learner.protocol import LearnerError
from tasks.runtime.imports import NotImportable, code_version, load_function


def custom(rl: RlTokens, settings: CustomLoss) -> Term:
    """Return the user's function of the row's tokens: `function(rl, **arguments)`.

    It returns the loss of every token, (N,) with gradient in `rl.logprobs`, or a Term, which also says which tokens are
    masked; `importance.surrogate` and `importance_weights` apply `tis`. Weights, the squared log ratio, sequence masks
    and the denominator are added by the caller, and values of tokens that are no members are ignored. Raises
    LearnerError when the function cannot be loaded or is other code than the config was resolved with, ValueError when
    it returns something else for this row: other ranks may not see that error, so the process must not go on.
    """
    # A copy: a function that changes its arguments must not change those of the next row.
    result = _function(settings)(rl, **deepcopy(settings.arguments))
    none = torch.zeros_like(rl.member)
    term = result if isinstance(result, Term) else Term(result, none, none)
    for name in ("values", "masked", "truncated"):
        _require_tensor(settings.function, name, getattr(term, name), rl.member.shape)
    # Selected and not multiplied by zero, which would keep a value that is not finite.
    return replace(
        term,
        values=torch.where(rl.member, term.values, 0.0),
        masked=term.masked & rl.member,
        truncated=term.truncated & rl.member,
    )


def _function(settings: CustomLoss) -> Callable[..., Any]:
    try:
        version = _version(settings.function)
        function = load_function(settings.function)
    except NotImportable as error:
        raise LearnerError(f"training.loss.function: {error}; nothing was trained") from error
    if settings.version not in ("", version):
        raise LearnerError(
            f"training.loss.function: {settings.function!r} is {version} here, and the config was resolved with "
            f"{settings.version}; nothing was trained. Bring that code back, or start a new run with the new one"
        )
    return function


@cache
def _version(path: str) -> str:
    # Once per process: load_function refuses code that was edited since.
    return code_version(path)


def _require_tensor(function: str, name: str, given: object, shape: torch.Size) -> None:
    if isinstance(given, Tensor) and given.shape == shape:
        return
    what = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise ValueError(
        f"training.loss.function {function!r} gave {what} for {name}, where a tensor of shape {tuple(shape)} is "
        "needed, one entry for each token; nothing was trained"
    )
