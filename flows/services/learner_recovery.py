"""LearnerRecovery: brings a learner to a recorded policy, optimizer state included, by training recorded batches again.

Called by LearnerProcess in the thread of the step that needs the learner.
"""

import logging
from pathlib import Path
from typing import Any

from configs.fields import is_operational
from configs.services import LearnerConfig
from configs.training import TrainingConfig
from storage.errors import PolicyAbsent
from storage.policies.manifest import adapter_base
from storage.refs import Entry
from tasks.learner.client import Learner
from tasks.learner.digest import INDEX_FILE, relative_difference, weight_paths
from tasks.learner.protocol import BatchReference, LearnerError, state_file
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy

MAX_DIFFERENCE = 1e-5
"""Norm of the difference of weights that were trained again on CUDA, over the norm of the weights. A step at a learning
rate of 1e-6 changes weights of 0.02 by about 5e-5 of their norm; sums in another order move a fraction of that."""
MAX_ROUNDED_DIFFERENCE = 2e-4
"""The same of weights in bfloat16. Such a difference turns one value in 400 to the next one, 1/256 away at most."""
PolicyRow = dict[str, Any]
"""A row of the table `policies`."""
Settings = dict[str, Any]
"""The section `training`, or `learner`, of a config."""
_log = logging.getLogger(__name__)


class WeightsDiffer(ValueError):
    """Training recorded batches again gave other weights than the recorded ones."""


def recorded_policy(context: RunContext, policy_key: str) -> PolicyRow:
    """Return the policy's row of the policies table."""
    [rows] = _recorded_work(context, policy_key).slices("policies")
    return dict(context.read(rows).to_pylist()[0])


def _recorded_work(context: RunContext, key: str) -> Entry:
    """Return the ledger row of a result, which may be another run's."""
    entry = context.find(key)
    assert entry is not None, f"{key} is referred to but not in the ledger"
    return entry


class LearnerRecovery:
    """Brings a learner to a recorded policy, its optimizer state included."""

    def __init__(
        self,
        learner: Learner,
        context: RunContext,
        sections: tuple[Settings, Settings],
        state_directory: str = "",
    ) -> None:
        """`sections` are training and learner, with which the learner is configured, and is again in the end.

        In `state_directory` the learner keeps optimizer state that is not saved; empty where it keeps none.
        """
        self._learner, self._context, self._policies = learner, context, context.store.policies
        self._training, self._learner_section = sections
        self._configured = self._training
        self._state_directory = state_directory

    def recover(self, policy: Policy) -> None:
        """Load `policy` from the nearest one whose state was kept on this machine or that can be loaded whole.

        Batches are trained with the settings that they were recorded with: a replay may start from policies that its
        source run trained with others. Raises WeightsDiffer when training again does not give the recorded weights.
        """
        rows = self._ancestry(policy)
        settings = [*(self._training | self._settings(row) for row in rows[1:]), self._training]
        unchanged = all(training == self._training for training in settings)
        later = range(len(rows) - 1, 0, -1) if unchanged else ()
        start = next((index for index in later if self._load_kept(rows[index])), 0)
        if not start:
            self._load_for(rows[0], self._policies.directory(rows[0]["policy_key"]), settings[0])
        for index, row in enumerate(rows[start + 1 :], start + 1):
            # A learner that is configured anew forgets: its state goes through the disk.
            changes = settings[index] != settings[index - 1]
            # The learner writes what it trains; the recorded weights stay, these go.
            scratch = self._policies.scratch(f"again-{row['policy_key']}")
            try:
                self._train(row, scratch, save_optimizer=changes)
                if changes:
                    self._load_for(row, scratch, settings[index])
            finally:
                self._policies.discard(scratch)

    def _ancestry(self, policy: Policy) -> list[PolicyRow]:
        """Return the rows of the policies from the last one that can be loaded whole to `policy`, oldest first.

        A policy can be loaded whole when its optimizer state was saved and its weights were not removed since, or when
        it has no parent and so no state.
        """
        rows = [recorded_policy(self._context, policy.key)]
        # Backwards, as a policy names its parent and not its children.
        while parent := rows[0]["parent_key"]:
            if rows[0]["has_optimizer"] and self._policies.find(rows[0]["policy_key"]) is not None:
                break
            rows.insert(0, recorded_policy(self._context, parent))
        return rows

    def _settings(self, row: PolicyRow) -> Settings:
        """Return the settings of training that a policy was made with, those included that keys do not name."""
        recorded = TrainingConfig(**_recorded_work(self._context, row["policy_key"]).section["training"])
        # Operational settings do not change the weights.
        fields = TrainingConfig.model_fields
        return {k: v for k, v in recorded.model_dump(mode="json").items() if not is_operational(fields[k])}

    def _load_for(self, row: PolicyRow, directory: Path, training: Settings) -> None:
        """Load a policy to train on with the settings `training`, with which the learner is configured first."""
        if training != self._configured:
            self._learner.configure(training, self._learner_section)
            self._configured = training
        self._load(row, directory)

    def _load(self, row: PolicyRow, directory: Path, state_directory: str = "") -> None:
        """Load a policy, with fresh state where its own is of another kind than the learner's."""
        trained = row["parent_key"] is not None  # imported weights have no optimizer state, and need none
        trained = trained and _state_kind(self._settings(row)) == _state_kind(self._configured)
        self._learner.load(
            row["policy_key"],
            str(directory),
            fresh_optimizer=not trained,
            base=self._base(directory),
            state_directory=state_directory,
        )

    def _base(self, directory: Path) -> str:
        """Return the directory of the weights below an adapter; empty for whole weights."""
        below = adapter_base(directory)
        return str(self._policies.directory(below)) if below else ""

    def _load_kept(self, row: PolicyRow) -> bool:
        """Load a policy with the state that the learner kept of it on this machine; return whether there was some."""
        key, ranks = row["policy_key"], LearnerConfig(**self._learner_section).num_ranks
        files = [Path(self._state_directory, state_file(key, rank, ranks)) for rank in range(ranks)]
        if not self._state_directory or not all(file.is_file() for file in files):
            return False
        try:
            self._load(row, self._policies.directory(key), self._state_directory)
        except (LearnerError, PolicyAbsent) as error:
            _log.warning("%s; recorded batches are trained again", error)
            return False
        return True

    def _train(self, row: PolicyRow, directory: Path, save_optimizer: bool) -> None:
        """Train the recorded batches that made the policy of `row`; the weights must come out as recorded.

        On CUDA, where another driver or GPU may add up in another order, they may differ by `MAX_DIFFERENCE`: the
        learner then continues from the recorded ones, with the optimizer state of its own training.
        """
        tolerant = self._configured.get("device") == "cuda"
        step, batch = self._batch(row)
        self._learner.train(
            batch,
            step=step,
            policy_key_in=row["parent_key"],
            policy_key_out=row["policy_key"],
            directory_out=str(directory),
            save_optimizer=save_optimizer or tolerant,
        )
        sha256 = self._learner.state()["weights_sha256"]
        if sha256 != row["weights_sha256"] and not (tolerant and self._adopt_recorded(row, directory)):
            raise WeightsDiffer(
                f"policy {row['policy_key']} (version {row['version']}): training its recorded batches again gave "
                f"weights {sha256[:12]}, recorded are {row['weights_sha256'][:12]}. The recorded weights and all "
                f"tables are safe; the optimizer state between them is not to be had on this machine with this torch. "
                f"Resume where the run was trained, or branch from this policy with a fresh optimizer (model.path)."
            )

    def _batch(self, row: PolicyRow) -> tuple[int, BatchReference]:
        """Return the step that made a policy, and where the batch is that it was trained on."""
        training = _recorded_work(self._context, row["policy_key"])
        packing = _recorded_work(self._context, training.inputs["packing"])
        slices = (packing.slices(table) for table in ("batches", "batch_images", "batch_experts"))
        return training.step, BatchReference(self._context.store.root.address, *slices)

    def _adopt_recorded(self, row: PolicyRow, made: Path) -> bool:
        """Load the recorded weights beside the optimizer state in `made`, if the weights there hardly differ."""
        key = row["policy_key"]
        if self._policies.find(key) is None:  # removed, so there is nothing to compare with
            return False
        recorded = self._policies.directory(key)
        difference = relative_difference(made, recorded)
        rounded = self._configured.get("policy_dtype") == "bfloat16"
        limit = MAX_ROUNDED_DIFFERENCE if rounded else MAX_DIFFERENCE
        if not difference <= limit:
            return False
        _log.warning(
            "policy %s (version %d): training its recorded batches again gave weights that differ by %.2g of their "
            "norm, of which %.2g is taken for rounding; the recorded weights are trained on",
            *(key, row["version"], difference, limit),
        )
        for file in (*weight_paths(made), made / INDEX_FILE):
            file.unlink(missing_ok=True)
        for file in (*weight_paths(recorded), *recorded.glob(INDEX_FILE)):
            (made / file.name).symlink_to(file.resolve())
        self._learner.load(key, str(made), fresh_optimizer=False, base=self._base(recorded))
        return True


def _state_kind(training: Settings) -> tuple[str, bool]:
    """Return what optimizer state is for: the kind of optimizer, and whether all weights are trained or an adapter."""
    settings = TrainingConfig(**training)
    return settings.optimizer.state_kind, settings.lora is None
