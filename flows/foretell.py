"""Foretelling: walk the pipeline without computing anything, to know what would be."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from configs.run import RunConfig
from flows import pipeline
from flows.pipeline import attempts
from tasks.stage import Place, Policy, Ref, StageTask, inputs_of, ref_of


class Foreteller:
    """Computes nothing: says for every piece of work its key and whether the ledger has it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.pieces: list[Ref] = []

    def __call__(
        self,
        task: StageTask,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        services: Mapping[str, Any] | None = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref:
        """Return the reference to the work, finished or to come; work to come is taken to make one row a table."""
        stage = task.stage
        key = self._place.key(stage, step, inputs_of(refs, policy) | dict(extra_inputs or {}))
        entry = self._place.find(key)
        unknown = Ref(stage.name, step, key, tuple((table, 1) for table in stage.writes), 0, 0.0, computed=True)
        self.pieces.append(ref_of(entry, computed=False) if entry else unknown)
        return self.pieces[-1]


def foretell(place: Place, source: pipeline.Source, evaluation: Place, policy: Policy | None = None) -> list[Ref]:
    """Return every piece of work that the run of `place` consists of, once, found or still to be computed.

    Of a run that ended because nothing was left to train on, those are the pieces up to there.
    """
    tell, tell_evaluation = Foreteller(place), Foreteller(evaluation)
    with suppress(pipeline.Evicted):
        _walk(place.config, source, tell, tell_evaluation, policy)
    return list({piece.key: piece for piece in (*tell.pieces, *tell_evaluation.pieces)}.values())


def _walk(
    config: RunConfig, source: pipeline.Source, tell: Foreteller, tell_evaluation: Foreteller, policy: Policy | None
) -> None:
    if config.kind == "evaluate":
        attempts(tell_evaluation, policy or pipeline.first_policy(tell, source))
        return
    every = config.evaluation.every if config.kind == "train" else 0
    if every:
        attempts(tell_evaluation, pipeline.first_policy(tell, source))
    for step, _drawn, _trained, made in pipeline.run_steps(tell, source, config):
        if every and (step + 1) % every == 0:
            attempts(tell_evaluation, made)
