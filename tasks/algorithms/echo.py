"""ECHO: grpo on what the policy did, and cross-entropy on what its environment answered.

The tokens that tools, users and systems add in later turns are predicted along with the actions. Their loss is the ce
component, which has its own denominator, so that neither dilutes the other.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from configs.algorithms import EchoConfig
from tasks.algorithms.credit import Credit, Kept, Weights
from tasks.algorithms.grpo import grpo
from tasks.algorithms.keep_masks import keep_mask
from tasks.algorithms.tool_names import tool_names
from tasks.branches import Branches, find_branches
from tasks.columns import texts
from tasks.ragged import Ragged


def echo(kept: Kept, settings: EchoConfig) -> Credit:
    """Return what grpo gives, with ce weight alpha on environment tokens of later turns; without any role, grpo's.

    Such a token is body and not template (`is_content`; a message of which that is unknown has none), was not sampled,
    and is of a message that comes after a sampled one on its branch and whose role has a section; a tool's also has to
    be one of `tool_names` where those are given, and `keep_mask` may leave it out. Rewards do not matter to it. Raises
    AdvantageBreach where `keep_mask` does not give one truth value for every token.
    """
    credit = grpo(kept, settings)
    if not (settings.system or settings.user or settings.tool):
        return credit
    alpha = _alphas(kept, settings)[kept.mask.row_of_value]
    chosen = _content(kept) & ~kept.mask.values
    if settings.keep_mask:
        chosen &= keep_mask(kept, settings.keep_mask, settings.keep_mask_version, settings.arguments)
    return replace(credit, ce=np.where(chosen, alpha, np.float32(0)))


def _alphas(kept: Kept, settings: EchoConfig) -> Weights:
    """Return the weight that an environment token of each message would have, 0 where none has any."""
    branches = find_branches(kept.messages, kept.owner)
    role = np.array(texts(kept.messages["role"]), object)
    alpha = np.zeros(len(role), np.float32)
    for name, section in (("system", settings.system), ("user", settings.user), ("tool", settings.tool)):
        if section is not None:
            alpha[role == name] = section.alpha
    if settings.tool is not None and settings.tool.tool_names is not None:
        allowed = settings.tool.tool_names
        foreign = [row for row, name in tool_names(kept.messages, branches).items() if name not in allowed]
        alpha[foreign] = 0
    sampled = kept.messages["sampled"].to_numpy()
    alpha[sampled | ~_later(sampled, branches)] = 0
    return alpha


def _later(sampled: NDArray[np.bool_], branches: Branches) -> NDArray[np.bool_]:
    """Return, per message, whether a sampled one comes before it on its branch."""
    path = branches.path
    before = np.concatenate(([0], np.cumsum(sampled[path.values])))
    later = np.zeros(len(sampled), np.bool_)
    later[path.values] = before[:-1] > np.repeat(before[path.offsets[:-1]], path.lengths)
    return later


def _content(kept: Kept) -> NDArray[np.bool_]:
    """Return, per token, whether it is known to be body."""
    known = Ragged.of(kept.messages["is_content"])
    whole = known.lengths == kept.mask.lengths
    content = np.zeros(len(kept.mask.values), np.bool_)
    content[whole[kept.mask.row_of_value]] = known.values[whole[known.row_of_value]]
    return content
