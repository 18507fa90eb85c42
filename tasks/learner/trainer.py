"""The learner's state, one policy with its optimizer, and the requests that use it: configure, load, train, probe."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
import transformers

from configs.services import LearnerConfig
from configs.training import TrainingConfig
from storage.errors import StoreError
from storage.refs import File
from storage.schemas.stage_tables import TOKEN_MASKS, TOKEN_STATISTICS
from tasks.arrays.samples import COMPONENTS
from tasks.learner import preferences
from tasks.learner.adapters import open_adapter
from tasks.learner.attention import activate_attention
from tasks.learner.checkpoint import (
    check_stored_names,
    companions,
    load_optimizer,
    memory_sha256,
    probe_tokens,
    save_policy,
    save_rounded,
)
from tasks.learner.digest import weights_sha256
from tasks.learner.distributed import World
from tasks.learner.kept_state import StateKeeper, load_kept
from tasks.learner.loop import RowStatistics, Totals, accumulate_gradients
from tasks.learner.loss import GROUPS, Objective
from tasks.learner.model import PolicyModel, load_policy, run_row
from tasks.learner.optimizer import Optimizer, apply_gradients, clip_gradients, learning_rate, new_optimizer
from tasks.learner.proof import proof_length
from tasks.learner.protocol import STATISTICS_FILE, BatchReference, LearnerError
from tasks.learner.router_losses import FIGURES
from tasks.learner.rows import STREAMS, BatchReader, PackedBatch, Row
from tasks.learner.speed import StepTimer, training_cost
from tasks.learner.vision import check_counts

if TYPE_CHECKING:  # it imports vllm
    from tasks.learner.weight_sender import Ask, WeightSender


@dataclass
class _LoadedPolicy:
    """The policy in memory, with everything that is saved beside its weights."""

    policy_key: str
    step: int | None
    """The step that trained it; None for one that was loaded."""
    weights_sha256: str
    policy: PolicyModel
    optimizer: Optimizer
    files: dict[str, bytes]
    """See `checkpoint.companions`."""
    written: tuple[File, ...] = ()
    """The digests of its files, as far as they are known from writing them."""
    probe: list[int] = field(default_factory=list)
    """See `checkpoint.probe_tokens`."""


class Trainer:
    """One rank's part of the learner. Every rank makes the same calls in the same order."""

    def __init__(self, world: World, beat: Callable[[], None] = lambda: None) -> None:
        """`beat` is called after each part of a request: progress for `tasks.learner.pulse`."""
        self._world = world
        self._beat = beat
        self._keeper = StateKeeper(world)
        self._settings: TrainingConfig | None = None
        self._device = torch.device("cpu")
        self._attention = ""
        self._loaded: _LoadedPolicy | None = None
        self._sender: WeightSender | None = None

    def configure(self, training: dict[str, Any], learner: dict[str, Any]) -> None:
        """Apply the config sections; another training section makes the learner forget its policy."""
        settings, own = TrainingConfig(**training), LearnerConfig(**learner)
        device = self._world.agree(lambda: _device(settings, self._world))
        torch.set_num_threads(own.threads)
        self._attention = self._world.agree(lambda: activate_attention(own.attention, device))
        world = self._world.arrange(own.replicas, own.context_parallel, own.expert_parallel)
        if settings != self._settings or world != self._world:
            self._settings, self._device, self._loaded = settings, device, None
        self._world = world

    def load(
        self, policy_key: str, directory: str, fresh_optimizer: bool, base: str = "", state_directory: str = ""
    ) -> None:
        """Load weights and, unless `fresh_optimizer`, optimizer state; after an error no policy is loaded.

        Where `directory` holds an adapter, `base` is the directory of the weights below it. With a `state_directory`
        the state is what `kept_state` kept there.
        """
        settings, world, path = self._require_settings(), self._world, Path(directory)
        self._keeper.settle()
        self._loaded = None
        adapter = world.agree(lambda: open_adapter(policy_key, path, Path(base) if base else None, settings.lora))
        policy = load_policy(path, settings, self._device, adapter, world)
        optimizer = new_optimizer(policy, settings)
        if state_directory:
            load_kept(policy_key, policy, optimizer, Path(state_directory), world)

        def complete() -> _LoadedPolicy:
            if rounded := _is_rounded(settings):
                check_stored_names(policy, path)
            if not (state_directory or fresh_optimizer):
                load_optimizer(policy, optimizer, path)
            digest = adapter.weights_sha256 if adapter else weights_sha256(path)
            files = {} if adapter else companions(path, "bfloat16" if rounded else "float32")
            vocab_size = policy.causal.config.get_text_config().vocab_size
            probe = probe_tokens(adapter.base_directory if adapter else path, vocab_size)
            return _LoadedPolicy(policy_key, None, digest, policy, optimizer, files, probe=probe)

        self._loaded = world.agree(complete)

    def train(
        self,
        *,
        batch: dict[str, Any],
        step: int,
        policy_key_in: str,
        policy_key_out: str,
        directory_out: str,
        save_optimizer: bool,
        state_directory: str = "",
        labels: dict[str, list[Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """Make the batch's optimizer steps and save the new policy; see `client.Learner.train`."""
        from storage.read.groups import open_groups  # imported by `import_learner` before

        loaded, directory = self._require_policy(policy_key_in), Path(directory_out)
        rounded = _is_rounded(self._require_settings())
        if directory.exists() and any(directory.iterdir()):
            raise LearnerError(f"{directory} is not empty: a policy is written once; nothing was trained")
        reference, world = BatchReference.from_json(batch), self._world
        if loaded.policy.replay is None:
            reference = replace(reference, experts=())
        reader = BatchReader(open_groups(reference.store), reference)
        check = partial(_check_row, loaded.policy)
        batches = reader.plan(world.rank, world.gather, world.size, check, self._beat)
        digests, updates = [loaded.weights_sha256], list[dict[str, Any]]()
        pairs: preferences.Labels = {name: (group, label) for name, (group, label) in (labels or {}).items()}
        with statistics_file(directory) if world.rank == 0 else nullcontext() as statistics:
            for number, packed in enumerate(batches):
                if number:  # the digest before the first update is that of the loaded policy
                    digests.append(memory_sha256(loaded.policy, self._world, rounded))
                    self._beat()
                measured = self._update(loaded, packed, step * len(batches) + number, statistics, pairs)
                updates.append({"version": step + 1, "policy_key_in": policy_key_in, "update": number, **measured})
        optimizer = loaded.optimizer if save_optimizer else None
        parts = loaded.policy, optimizer, loaded.files, directory, self._world, self._beat
        timer = StepTimer(self._device)
        digest, written = save_rounded(*parts) if rounded else (save_policy(*parts), ())
        timer.end("writing")
        updates[-1]["metrics"] |= timer.seconds
        digests.append(digest)
        for update, before, after in zip(updates, digests, digests[1:], strict=False):
            # Optimizer state is stored beside the last weights alone.
            update |= {"weights_sha256_in": before, "weights_sha256": after}
            update["has_optimizer"] = save_optimizer and update is updates[-1]
        self._loaded = replace(loaded, policy_key=policy_key_out, step=step, weights_sha256=digest, written=written)
        if state_directory and not save_optimizer:
            self._keeper.keep(policy_key_out, loaded.policy, loaded.optimizer, Path(state_directory))
        return updates

    def _update(
        self,
        loaded: _LoadedPolicy,
        batch: PackedBatch,
        optimizer_step: int,
        file: pa.ipc.RecordBatchStreamWriter | None,
        labels: preferences.Labels,
    ) -> dict[str, Any]:
        """Make one optimizer step; return what it measured, see `measurements`. Its statistics are written to `file`.

        Raises LearnerError, before the weights change, when the gradient is not finite.
        """
        settings = self._require_settings()
        objective = Objective(settings.loss, settings.ref_kl)
        timer = StepTimer(self._device)

        def take(statistics: list[RowStatistics]) -> None:
            assert file is not None, "statistics are gathered on rank 0"
            file.write_table(statistics_table(statistics))

        if replay := loaded.policy.replay:
            replay.counts.zero_()
        parts = loaded.policy, batch, objective, self._world, self._device, self._beat
        try:
            totals = accumulate_gradients(*parts, take, labels)
        except StoreError as error:  # rows that were there when they were checked
            if self._world.size > 1:
                raise RuntimeError("a rank cannot read a row, and the others wait for it") from error
            loaded.optimizer.zero_grad()
            raise
        timer.end("gradients")
        grad_norm = clip_gradients(loaded.policy, settings.max_grad_norm, self._world)
        if not np.isfinite(grad_norm):
            loaded.optimizer.zero_grad()
            raise LearnerError(
                f"optimizer step {optimizer_step}: the gradient's norm is {grad_norm}; published policies are safe. "
                "Look at the batch's log-probs and advantages, or lower training.learning_rate"
            )
        self._keeper.settle()
        # From here until they are on disk, the weights in memory are no policy: an error must not leave them loaded.
        self._loaded = None
        rate = learning_rate(optimizer_step, settings)
        apply_gradients(loaded.optimizer, rate)
        timer.end("optimizer")
        self._beat()
        measured = measurements(batch, totals) | {"learning_rate": rate, "grad_norm": grad_norm}
        measured["metrics"] |= {
            "clipped": grad_norm > settings.max_grad_norm,
            # Recorded because with other ones sums are rounded in another order: weights then agree, but not to the
            # last bit.
            "threads": torch.get_num_threads(),
            "processes": self._world.size,
            "attention": self._attention,
            **(_router_metrics(self._world.gather(replay.counts.tolist())) if replay else {}),
            **timer.figures(batch.plan, training_cost(loaded.policy), self._world.size),
            **loaded.policy.proof,
        }
        loaded.policy.proof = {}
        return measured

    @torch.no_grad()
    def probe(self, token_ids: list[int]) -> list[float]:
        """Return each token's log-prob given those before it at temperature 1, in nats; the first is 0.0."""
        loaded = self._require_policy(None)
        size = len(token_ids)
        if size < 2:
            raise LearnerError("a probe needs at least two tokens")
        streams = {name: np.ones(size, np.float32) for name in STREAMS}
        # Any weight makes a token a selected one; the first token has none, because nothing predicts it.
        streams["rl_weights"] = np.arange(size, dtype=np.float32)
        streams |= {name: np.zeros(size, np.float32) for name in ("ce_weights", "ref_kl_weights")}
        row = Row(0, (), (0, size), np.asarray(token_ids, np.int64), streams)
        _check_row(loaded.policy, row)
        logprobs, _ = run_row(loaded.policy, row, self._device)
        return [0.0, *logprobs.float().cpu().tolist()]

    def send_weights(self, ask: "Ask", *, policy_key: str, **target: Any) -> None:
        """Send the policy as it is published to an engine; see `weight_sender.WeightSender.send`.

        Raises LearnerError where that fails on one rank alone; several, which wait for each other by then, end.
        """
        loaded = self._require_policy(policy_key)
        dtype = torch.bfloat16 if _is_rounded(self._require_settings()) else None
        try:
            from tasks.learner.weight_sender import PolicySource, WeightSender

            self._sender = self._sender or WeightSender()
            source = PolicySource(loaded.policy.causal, dtype, self._world)
            self._sender.send(source, ask, **target)
        except Exception as error:
            if self._world.size > 1:
                raise
            raise LearnerError(f"the policy was not sent ({type(error).__name__}: {error})") from error
        finally:
            self.release()

    def state(self) -> dict[str, Any]:
        """Return what is loaded, and the process and versions that hold it."""
        loaded = self._loaded
        return {
            "policy_key": loaded and loaded.policy_key,
            "step": loaded and loaded.step,
            "weights_sha256": loaded and loaded.weights_sha256,
            "probe_token_ids": loaded.probe if loaded else [],
            "proof_length": proof_length(loaded.policy.causal.config.get_text_config()) if loaded else 0,
            "files": [vars(file) for file in loaded.written] if loaded else [],
            "pid": os.getpid(),
            "processes": self._world.size,
            "device": self._device.type,
            "attention": self._attention,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def release(self) -> None:
        """Give the allocator's unused memory of a GPU back, for an engine beside."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Drop the policy: after an unforeseen failure its state in memory cannot be trusted."""
        self._loaded = None

    def _require_settings(self) -> TrainingConfig:
        if self._settings is None:
            raise LearnerError("the learner has no config yet: call configure first")
        return self._settings

    def _require_policy(self, policy_key: str | None) -> _LoadedPolicy:
        if self._loaded is None or policy_key not in (None, self._loaded.policy_key):
            current = "none" if self._loaded is None else repr(self._loaded.policy_key)
            wanted = "a policy" if policy_key is None else f"policy {policy_key!r}"
            raise LearnerError(f"the learner holds {current}, not {wanted}: load it first")
        return self._loaded


def _device(settings: TrainingConfig, world: World) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise LearnerError("training.device is cuda, but torch sees no CUDA device; use cpu or auto")
    if settings.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    # Not `warn_only`, with which attention's backward pass adds up in any order. An operation without a deterministic
    # kernel, say of a user's own loss, ends the run by an error that names it.
    torch.use_deterministic_algorithms(settings.deterministic)
    # Else each new tensor is filled first, which only shows who reads what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def _is_rounded(settings: TrainingConfig) -> bool:
    """Tell whether policies are in bfloat16; adapters never are."""
    return settings.policy_dtype == "bfloat16" and settings.lora is None


def _check_row(policy: PolicyModel, row: Row) -> None:
    """Raise LearnerError for tokens that the model does not have, and images that do not fit their tokens."""
    size = policy.causal.config.get_text_config().vocab_size
    if row.images is not None:
        check_counts(f"batches row {row.row}", policy.causal, row.images)
    low, high = row.token_ids.min(), row.token_ids.max()
    if low < 0 or high >= size:
        raise LearnerError(
            f"row {row.row}: token ids from {low} to {high}, but the model has {size}: the tokenizer is not its own"
        )


STATISTICS = TOKEN_STATISTICS.arrow.append(TOKEN_MASKS.arrow.field("masked"))
"""The columns of the file: `token_statistics`, and beside them `masked` of the table `token_masks`."""


def statistics_file(directory: Path) -> pa.ipc.RecordBatchStreamWriter:
    """Open the file of what was measured on tokens, in Arrow's IPC format; a context manager."""
    directory.mkdir(parents=True, exist_ok=True)
    return pa.ipc.new_stream(str(directory / STATISTICS_FILE), STATISTICS)


def measurements(batch: PackedBatch, totals: Totals) -> dict[str, Any]:
    """Return the columns of a row of `updates` that follow from the batch's totals, with `metrics` as a dictionary.

    Means are over rl tokens, and null when there are none.
    """
    counts = batch.denominators
    losses = {f"{name}_loss": totals.sums[f"{name}_loss"] for name in COMPONENTS}
    samples = [row for row in batch.plan if row.sample_ids]
    return {
        "loss": sum(losses.values()),
        **losses,
        "entropy": _share(totals.sums["entropy"], counts["rl"]),
        "mismatch_kl": _share(totals.sums["mismatch_kl"], counts["rl"]),
        "mismatch_kl_max": totals.maxima["mismatch_kl"] if counts["rl"] else None,
        "masked_fraction": _share(totals.sums["masked"], counts["rl"]),
        "num_rows": len(samples),
        "num_tokens": sum(row.num_tokens for row in samples),
        **{f"{name}_tokens": counts[name] for name in COMPONENTS},
        "metrics": _other_metrics(totals, counts),
    }


def statistics_table(statistics: list[RowStatistics]) -> pa.Table:
    """Return the columns STATISTICS of packed rows.

    One row for each sample, in the order of rows and of samples in them; padding rows give none.
    """
    parts: dict[str, list[Any]] = {"sample_id": [], "logprobs": [], "entropies": [], "masked": []}
    for entry in statistics:
        borders = entry.row.borders
        for sample_id, start, end in zip(entry.row.sample_ids, borders, borders[1:], strict=False):
            parts["sample_id"].append(sample_id)
            for name in ("logprobs", "entropies", "masked"):
                parts[name].append(getattr(entry, name)[start:end])
    return pa.table(parts, schema=STATISTICS)


def _other_metrics(totals: Totals, counts: dict[str, int]) -> dict[str, Any]:
    """Return the metrics that have no column.

    A value that is not finite is null, because JSON cannot hold it, and is named in `not_finite`: null alone would read
    as "not measured".
    """
    sums, maxima = totals.sums, totals.maxima
    metrics = {
        "masked_fraction_positive": _share(sums["masked_positive"], sums["positive"]),
        "masked_fraction_negative": _share(sums["masked_negative"], sums["negative"]),
        "truncated_fraction": _share(sums["truncated"], counts["rl"]),
        **_mismatch(totals, counts["rl"]),
        "ce_nll_mean": _share(sums["ce_nll"], counts["ce"]),
        "ce_nll_max": maxima["ce_nll"] if counts["ce"] else None,
        "ref_kl_mean": _share(sums["ref_kl"], counts["ref_kl"]),
        "ref_kl_masked_fraction": _share(sums["ref_kl_masked"], counts["ref_kl"]),
        **{name: value for name, value in sums.items() if name in (*FIGURES, *preferences.FIGURES)},
    }
    missing = [name for name, value in metrics.items() if value is not None and not math.isfinite(value)]
    return metrics | dict.fromkeys(missing) | ({"not_finite": missing} if missing else {})


def _router_metrics(counts: list[list[int]]) -> dict[str, float | None]:
    """Return shares of the choices of experts, from the counts of all ranks as of `RouterReplay`."""
    absent, recorded, differing = map(sum, zip(*counts, strict=True))
    return {
        "router_absent_fraction": _share(absent, absent + recorded),
        "router_differing_fraction": _share(differing, recorded),
    }


def _mismatch(totals: Totals, num_rl: int) -> dict[str, float | None]:
    """Return mean, standard deviation and maximum of the mismatch by group; mean and maximum over all are columns."""
    num_masked = totals.sums["masked"]
    metrics: dict[str, float | None] = {}
    for group, count in zip(GROUPS, (num_rl, num_masked, num_rl - num_masked), strict=True):
        name = f"{group}mismatch_kl"
        mean, square = _share(totals.sums[name], count), _share(totals.sums[f"{name}_squared"], count)
        variance = None if mean is None or square is None else square - mean * mean
        # Rounding may leave a variance just below zero.
        metrics[f"{name}_std"] = variance if variance is None or math.isnan(variance) else math.sqrt(max(variance, 0.0))
        if group:
            metrics |= {f"{name}_mean": mean, f"{name}_max": totals.maxima[name] if count else None}
    return metrics


def _share(total: float, count: float) -> float | None:
    return total / count if count else None
