"""What the learner holds and does: one policy with its optimizer, and the four requests that touch it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers

from configs.services import LearnerConfig
from configs.training import TrainingConfig
from tasks.learner.adapters import opened
from tasks.learner.checkpoint import companions, load_optimizer, memory_sha256, save_policy
from tasks.learner.digest import weights_sha256
from tasks.learner.distributed import World
from tasks.learner.errors import LearnerError
from tasks.learner.loop import accumulate_gradients
from tasks.learner.loss import Objective
from tasks.learner.model import PolicyModel, load_policy, run_row
from tasks.learner.optimizer import Optimizer, apply_gradients, clip_gradients, new_optimizer
from tasks.learner.results import Measurements, statistics_table, update_rows
from tasks.learner.rows import STREAMS, PackedBatch, Row, batches_from_table
from tasks.learner.schedules import learning_rate


@dataclass
class _Held:
    policy_key: str
    step: int | None
    weights_sha256: str
    policy: PolicyModel
    optimizer: Optimizer
    files: dict[str, bytes]


class Trainer:
    """One rank's part of the learner. Every rank makes the same calls in the same order."""

    def __init__(self, world: World, beat: Callable[[], None] = lambda: None) -> None:
        """`beat` is called whenever a part of the work is done, also in the middle of a request."""
        self._world = world
        self._beat = beat
        self._settings: TrainingConfig | None = None
        self._device = torch.device("cpu")
        self._held: _Held | None = None

    def configure(self, training: dict[str, Any], learner: dict[str, Any]) -> None:
        """Take the sections; another training section makes the learner forget its policy."""
        settings, own = TrainingConfig(**training), LearnerConfig(**learner)
        if settings.decay_steps and settings.decay_steps <= settings.warmup_steps:
            raise LearnerError(
                f"training.decay_steps is {settings.decay_steps}, not after warmup_steps {settings.warmup_steps}"
            )
        device = _device(settings, self._world)
        torch.set_num_threads(own.threads)
        if settings != self._settings:
            self._settings, self._device, self._held = settings, device, None

    def load(self, policy_key: str, directory: str, fresh_optimizer: bool, base: str = "") -> None:
        """Load weights and, unless `fresh_optimizer`, optimizer state; on an error the learner holds nothing.

        `base` is the directory of the weights below, where `directory` holds an adapter.
        """
        settings = self._configured()
        self._held = None
        path = Path(directory)
        adapter = opened(policy_key, path, Path(base) if base else None, settings.lora)
        policy = load_policy(path, settings, self._device, adapter)
        optimizer = new_optimizer(policy, settings)
        if not fresh_optimizer:
            load_optimizer(policy, optimizer, path)
        digest = adapter.weights_sha256 if adapter else weights_sha256(path)
        self._held = _Held(policy_key, None, digest, policy, optimizer, {} if adapter else companions(path))

    def train(
        self,
        table: pa.Table,
        *,
        step: int,
        policy_key_in: str,
        policy_key_out: str,
        directory_out: str,
        save_optimizer: bool,
    ) -> tuple[list[dict[str, Any]], pa.Table]:
        """Make the batch's optimizer steps and save what they made; see `client.Learner.train`."""
        held, directory = self._policy(policy_key_in), Path(directory_out)
        if directory.exists() and any(directory.iterdir()):
            raise LearnerError(f"{directory} is not empty: a policy is written once; nothing was trained")
        batches = batches_from_table(table, self._world.size)
        for batch in batches:
            _check_vocabulary(batch.rows, held.policy)
        digests, measured = [held.weights_sha256], []
        for number, batch in enumerate(batches):
            if number:
                digests.append(memory_sha256(held.policy, self._world))
                self._beat()
            measured.append(self._update(held, batch, step * len(batches) + number))
        saved = held.optimizer if save_optimizer else None
        digests.append(save_policy(held.policy, saved, held.files, directory, self._world, self._beat))
        known = {"version": step + 1, "policy_key_in": policy_key_in}
        updates = update_rows(known, batches, measured, digests, save_optimizer)
        self._held = _Held(policy_key_out, step, digests[-1], held.policy, held.optimizer, held.files)
        return updates, statistics_table([entry for update in measured for entry in update.statistics])

    def _update(self, held: _Held, batch: PackedBatch, optimizer_step: int) -> Measurements:
        """Make one optimizer step. Raises LearnerError, before the weights change, when the gradient is not finite."""
        settings = self._configured()
        objective = Objective(settings.loss, settings.ref_kl)
        totals, statistics = accumulate_gradients(held.policy, batch, objective, self._world, self._device, self._beat)
        grad_norm = clip_gradients(held.policy, settings.max_grad_norm, self._world)
        if not np.isfinite(grad_norm):
            held.optimizer.zero_grad()
            raise LearnerError(
                f"optimizer step {optimizer_step}: the gradient's norm is {grad_norm}; published policies are safe. "
                "Look at the batch's log-probs and advantages, or lower training.learning_rate"
            )
        # From here on the weights in memory are no policy until they are on disk.
        self._held = None
        rate = learning_rate(optimizer_step, settings)
        apply_gradients(held.optimizer, rate)
        self._beat()
        return Measurements(
            learning_rate=rate,
            grad_norm=grad_norm,
            clipped=grad_norm > settings.max_grad_norm,
            totals=totals,
            statistics=statistics,
            threads=torch.get_num_threads(),
            processes=self._world.size,
        )

    @torch.no_grad()
    def probe(self, token_ids: list[int]) -> list[float]:
        """Return each token's log-prob given those before it at temperature 1, in nats; the first is 0.0."""
        held = self._policy(None)
        size = len(token_ids)
        if size < 2:
            raise LearnerError("a probe needs at least two tokens")
        streams = {name: np.ones(size, np.float32) for name in STREAMS}
        streams["rl_weights"] = np.arange(size, dtype=np.float32)
        streams |= {name: np.zeros(size, np.float32) for name in ("ce_weights", "ref_kl_weights")}
        row = Row(0, 0, 0, (), (0, size), np.asarray(token_ids, np.int64), streams)
        _check_vocabulary((row,), held.policy)
        logprobs, _ = run_row(held.policy, row, self._device)
        return [0.0, *logprobs.float().cpu().tolist()]

    def state(self) -> dict[str, Any]:
        """Return what is held, and the process and versions that hold it."""
        held = self._held
        return {
            "policy_key": held and held.policy_key,
            "step": held and held.step,
            "weights_sha256": held and held.weights_sha256,
            "pid": os.getpid(),
            "processes": self._world.size,
            "device": self._device.type,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def forget(self) -> None:
        """Hold nothing: after a failure nobody foresaw, what is in memory is not to be trusted."""
        self._held = None

    def _configured(self) -> TrainingConfig:
        if self._settings is None:
            raise LearnerError("the learner has no config yet: call configure first")
        return self._settings

    def _policy(self, policy_key: str | None) -> _Held:
        if self._held is None or policy_key not in (None, self._held.policy_key):
            have = "none" if self._held is None else repr(self._held.policy_key)
            wanted = "a policy" if policy_key is None else f"policy {policy_key!r}"
            raise LearnerError(f"the learner holds {have}, not {wanted}: load it first")
        return self._held


def _device(settings: TrainingConfig, world: World) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise LearnerError("training.device is cuda, but torch sees no CUDA device; use cpu or auto")
    if settings.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    # Kernels without a deterministic form warn in the log instead of ending the run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    return device


def _check_vocabulary(rows: tuple[Row, ...], policy: PolicyModel) -> None:
    size = policy.causal.config.get_text_config().vocab_size
    for row in rows:
        low, high = row.token_ids.min(), row.token_ids.max()
        if low < 0 or high >= size:
            raise LearnerError(
                f"row {row.row}: token ids from {low} to {high}, but the model has {size}: the tokenizer is not its own"
            )
