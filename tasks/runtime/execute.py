"""Runs one stage: key, ledger, inputs, compute, slices, and the ledger row that makes them exist."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from configs.run import View
from storage.refs import Entry, Slice
from tasks.runtime.group_commits import Parts, count_tokens
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import Policy, Ref, Stage, Tables, inputs_of, ref_of

OWN = ("step", "key", "policy", "directory", "parts")
"""Keywords of stages whose values an attempt has itself."""


@dataclass
class Attempt:
    """One attempt at one key."""

    stage: Stage
    context: RunContext
    step: int
    key: str
    inputs: dict[str, str]
    policy: Policy | None
    name: str = field(default_factory=lambda: uuid4().hex)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @cached_property
    def view(self) -> View:
        return View(self.context.config, self.stage.sections, self.stage.name)

    @cached_property
    def directory(self) -> Path:
        """An empty directory for the weights that the stage makes, on the policies' own file system."""
        return self.context.store.policies.scratch(self.key)

    @cached_property
    def parts(self) -> Parts:
        return Parts(self.context.store, self.entry, self.stage.unit)

    def compute(self, refs: Sequence[Ref], services: Services, parameters: Mapping[str, Any]) -> list[Slice]:
        """Read the inputs, call the stage's function, write the rows that it returns; return the slices."""
        made = {name for ref in refs for name in dict(ref.rows)}
        reads = (*self.stage.reads, *(name for name in self.stage.optional if name in made))
        tables = {name: self.context.table(name, refs) for name in reads}
        keywords = self._keywords(services, parameters)
        if "parts" in keywords:
            return self._compute_in_parts(tables, keywords)
        outputs = self.stage.function(tables, self.view, **keywords)
        self.tokens = count_tokens(outputs)
        if "policies" in self.stage.writes:
            self.context.store.policies.publish(self.directory, self.key)
        missing = [name for name in self.stage.writes if name not in outputs and name not in self.stage.optional]
        assert not missing and set(outputs) <= set(self.stage.writes), f"{self.stage.name} made {list(outputs)}"
        return [self._append(name, rows) for name, rows in outputs.items()]

    def _compute_in_parts(self, tables: Tables, keywords: Mapping[str, Any]) -> list[Slice]:
        try:
            self.stage.function(tables, self.view, **keywords)
        finally:
            self.parts.stop()  # what is finished is committed, also when the stage fails
        return self.parts.close()

    def discard(self) -> None:
        """Remove the directory of weights that were not published, also when the run is cancelled."""
        if "directory" in vars(self):
            self.context.store.policies.discard(self.directory)

    def finish(self, outputs: Sequence[Slice]) -> Entry:
        """Write the one ledger row that makes the work exist; return the row that stands."""
        tokens = self.parts.tokens if "parts" in self.stage.keywords else self.tokens
        return self.context.commit(self.entry("", outputs, tokens))

    def entry(self, part: str, outputs: Sequence[Slice], tokens: int) -> Entry:
        """Return the ledger row for the whole (part empty) or for one part."""
        return Entry(
            run=self.context.run,
            step=self.step,
            stage=self.stage.name,
            stage_version=self.stage.version,
            key=self.key,
            part=part,
            attempt=self.name,
            section=self.view.content(),
            inputs=self.inputs,
            outputs=tuple(outputs),
            started_at=self.started_at,
            finished_at=datetime.now(UTC),
            tokens=tokens,
            versions=self.context.versions,
        )

    def _append(self, table: str, rows: pa.Table) -> Slice:
        return self.context.append(table, rows, step=self.step, key=self.key, attempt=self.name)

    def _keywords(self, services: Services, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the function takes by keyword: the attempt's own, services, and the parameters of this call."""
        keywords = {**parameters, **{name: getattr(self, name) for name in OWN if name in self.stage.keywords}}
        for name in self.stage.services:
            keywords[name] = getattr(services, name)
            assert keywords[name] is not None, f"stage {self.stage.name} asks the service {name}, and there is none"
        return keywords


def perform(
    stage: Stage,
    context: RunContext,
    step: int,
    refs: Sequence[Ref] = (),
    policy: Policy | None = None,
    services: Services | None = None,
    parameters: Mapping[str, Any] | None = None,
    extra_inputs: Mapping[str, str] | None = None,
) -> Ref:
    """Run one stage, unless the ledger has it already: the only way in which work is done.

    `parameters` are keywords of this one call; what they mean for the rows must be in the key, by `extra_inputs`: the
    digests of inputs that are no tables (a file, the number of a batch attempt). Raises what the
    stage raises, with a note that says which run, step and stage it was and that nothing of the attempt is visible.
    """
    inputs = inputs_of(refs, policy) | dict(extra_inputs or {})
    key = context.key(stage, step, inputs)
    entry = context.find(key)
    if entry is not None:
        return ref_of(context.adopt(entry, step), computed=False)
    attempt = Attempt(stage, context, step, key, inputs, policy)
    try:
        return ref_of(attempt.finish(attempt.compute(refs, services or Services(), parameters or {})), computed=True)
    except Exception as error:
        error.add_note(
            f"Run {context.run}, step {step}, stage {stage.name}. Nothing of this attempt is visible; all earlier "
            f"stages are safe in the ledger. Call the same run again to go on from here."
        )
        raise
    finally:
        attempt.discard()
