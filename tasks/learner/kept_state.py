"""Keeps weights and optimizer state of the newest policies in files of this machine, beside the next step.

Each rank writes its own shards and nothing is exchanged, so the same number of ranks can read them: for a learner that
died and is started again. Where another number is, or the machine was lost, the store's policies are gone back to.
"""

import errno
import logging
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.learner.checkpoint import MASTER, moment_tensors, trained_parameters
from tasks.learner.distributed import World, local
from tasks.learner.model import PolicyModel
from tasks.learner.optimizer import Optimizer
from tasks.learner.protocol import KEPT_STATES, LearnerError, state_file


class StateKeeper:
    """One rank's files; all ranks make the same calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="keep state")
        self._last: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def keep(self, policy_key: str, policy: PolicyModel, optimizer: Optimizer, directory: Path) -> None:
        """Have the state written while the caller goes on, who calls `settle` before the state changes or is dropped.

        A GPU's is copied first, on a stream of its own into pinned memory, which torch keeps for the next one. What
        cannot be written is logged and left out: the state can be had again by training.
        """
        self.wait()  # two copies at a time would need twice the memory
        content = {name: local(tensor.detach()) for name, tensor in _state(policy, optimizer).items()}
        if any(tensor.is_cuda for tensor in content.values()):
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                content = {name: tensor.to("cpu", non_blocking=True, copy=True) for name, tensor in content.items()}
            self._copied = self._stream.record_event()
        target = directory / state_file(policy_key, self._world.rank, self._world.size)
        self._last = self._threads.submit(_write, content, target, self._copied)

    def settle(self) -> None:
        """Let the state change: what a GPU computes next waits for the copy, a processor until it is written."""
        if self._copied:
            torch.cuda.current_stream().wait_event(self._copied)
        else:
            self.wait()

    def wait(self) -> None:
        """Wait until what was kept is written."""
        if self._last is not None:
            self._last.result()


def load_kept(policy_key: str, policy: PolicyModel, optimizer: Optimizer, directory: Path, world: World) -> None:
    """Fill a policy that holds its published weights, and an optimizer without state, from what was kept of them.

    Raises LearnerError on all ranks where the files are not there, or not those of the published weights.
    """
    path = directory / state_file(policy_key, world.rank, world.size)
    try:
        stored = load_file(path)
        fits = _fits(stored, policy, optimizer)
    except (OSError, SafetensorError, KeyError, RuntimeError):
        stored, fits = {}, False
    # All or none: a rank that went on alone would wait for the others for ever.
    if not all(world.gather(fits)):
        raise LearnerError(f"{directory} has no state of policy {policy_key} that belongs to its weights")
    for part, name, parameter in trained_parameters(policy, optimizer):
        with torch.no_grad():
            local(parameter).copy_(stored[MASTER + name])
        state = {moment: torch.zeros_like(parameter) for moment in part.moments}
        for moment, tensor in state.items():
            local(tensor).copy_(stored[f"{moment}.{name}"])
        if part.counts_steps:
            state["step"] = stored["step"].clone().to(parameter.device)
        if state:
            part.inner.state[parameter] = state


def _state(policy: PolicyModel, optimizer: Optimizer) -> dict[str, Tensor]:
    masters = {MASTER + name: parameter for _, name, parameter in trained_parameters(policy, optimizer)}
    return masters | moment_tensors(policy, optimizer)


def _fits(stored: dict[str, Tensor], policy: PolicyModel, optimizer: Optimizer) -> bool:
    """Tell whether the weights behind a policy are those that it was published from, rounded or not."""
    return all(
        bool(torch.equal(exact, found) or torch.equal(exact.to(torch.bfloat16).float(), found))
        for _, name, parameter in trained_parameters(policy, optimizer)
        for exact, found in [(stored[MASTER + name], local(parameter.detach()).cpu())]
    )


def _write(content: dict[str, Tensor], target: Path, copied: torch.cuda.Event | None) -> None:
    if copied:
        copied.synchronize()
    draft = target.with_suffix(".draft")
    try:
        # The last one may be gone back to: who asked for this one may not have got the answer.
        rank = target.name.partition(".")[2]
        mine = sorted(target.parent.glob(f"*.{rank}"), key=lambda path: path.stat().st_mtime_ns)
        for old in mine[: 1 - KEPT_STATES]:
            old.unlink()
        size = sum(tensor.nbytes for tensor in content.values())
        if size > shutil.disk_usage(target.parent).free:
            raise OSError(errno.ENOSPC, f"no room for {size} bytes")
        save_file(content, draft)
        draft.rename(target)
    except (OSError, SafetensorError) as error:  # the second where a disk is full, too
        logging.getLogger(__name__).warning("%s was not written, and is not gone back to: %s", target, error)
        draft.unlink(missing_ok=True)
