"""An optimizer's state as named tensors, as it lies beside the weights: `MOMENT.PARAMETER`, and `step`."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from tasks.learner.distributed import like
from tasks.learner.model import PolicyModel
from tasks.learner.optimizer import Optimizer, OptimizerPart

STEP = "step"


def names(policy: PolicyModel, optimizer: Optimizer) -> set[str]:
    """Return the names of all tensors that the state consists of once a step has been made."""
    found = {f"{moment}.{name}" for part, name, _ in _trained(policy, optimizer) for moment in part.moments}
    return found | ({STEP} if any(part.counts_steps for part in optimizer.parts) else set())


def tensors(policy: PolicyModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state, by name, laid out over the ranks as it is. All parameters have made the same steps."""
    found = {}
    for part, name, parameter in _trained(policy, optimizer):
        state = part.inner.state[parameter]
        found |= {f"{moment}.{name}": state[moment] for moment in part.moments}
        if part.counts_steps:
            found[STEP] = state[STEP]
    return found


def fill(policy: PolicyModel, optimizer: Optimizer, stored: Callable[[str], Tensor]) -> None:
    """Give an optimizer without state the whole tensors that `stored` returns by name."""
    for part, name, parameter in _trained(policy, optimizer):
        # Copies: every tensor read is a view of the file, and one step counter for all would count for each.
        state = {moment: like(stored(f"{moment}.{name}").clone(), parameter) for moment in part.moments}
        if part.counts_steps:
            state[STEP] = stored(STEP).clone().to(parameter.device)
        if state:
            part.inner.state[parameter] = state


def _trained(policy: PolicyModel, optimizer: Optimizer) -> Iterator[tuple[OptimizerPart, str, nn.Parameter]]:
    named = {id(parameter): name for name, parameter in policy.causal.named_parameters()}
    for part in optimizer.parts:
        for parameter in part.parameters():
            yield part, named[id(parameter)], parameter
