"""Custom: credit by a function of one's own, named by import path; what it returns is checked."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.algorithms import CustomConfig
from storage.schemas.stage_tables import ESTIMATOR_STATES
from tasks.advantage.algorithms.credit import AdvantageBreach, Credit, GroupedTraces
from tasks.arrays.columns import texts
from tasks.arrays.ragged import Ragged
from tasks.runtime.imports import load_version


def custom(kept: GroupedTraces, settings: CustomConfig) -> Credit:
    """Return what the section's function makes of one environment's kept traces, called as `f(kept, settings)`.

    Raises AdvantageBreach where that is no Credit, or one that cannot be meant (see `require_credit`), and
    NotImportable where the function cannot be loaded or is not what the config was resolved with.
    """
    function = load_version(settings.function, settings.version)
    # What it does to its arguments changes neither what it is judged by nor what the next step is given.
    credit = function(kept.copy(), settings.model_copy(deep=True))
    try:
        require_credit(kept, credit, settings.keeps_state)
    except AdvantageBreach as error:
        raise AdvantageBreach(
            f"algorithm {settings.function}: {error}. Nothing was trained; all that was sampled is safe. Correct the "
            "function (its code is part of the key) and go on under a new name, or replay the run from advantage."
        ) from error
    return credit  # type: ignore[no-any-return]


def require_credit(kept: GroupedTraces, credit: object, keeps_state: bool = False) -> None:
    """Raise AdvantageBreach unless `credit` is one for these traces that training can be held to.

    Advantages are finite or NaN, which is none; weights are finite and not negative; rl and ref_kl weigh sampled tokens
    only, for which alone there is a log-prob of the engine, and no token both; a token with rl weight has a finite
    signal, or its trace an advantage; ref_kl has a signal; there is state where it is handed back, and nowhere else.
    """
    if not isinstance(credit, Credit):
        raise AdvantageBreach(f"it returned {type(credit).__name__}, not stagecoach.Credit")
    _require_shapes(kept, credit)  # first, since all below index by token
    for name in ("rl", "ref_kl"):
        if (getattr(credit, name)[~kept.mask.values] != 0).any():
            raise AdvantageBreach(f"{name} has weight on tokens that the policy did not sample")
    if ((credit.rl != 0) & (credit.ref_kl != 0)).any():
        raise AdvantageBreach("a token has weight in rl and in ref_kl; column advantages can serve but one of them")
    if credit.signal is None:
        _require_advantages(kept, credit)
    if keeps_state:
        _require_states(kept, credit.states)
    elif credit.states is not None:
        raise AdvantageBreach("it returned states, which would be lost; set keeps_state=true for them to be kept")


def _require_shapes(kept: GroupedTraces, credit: Credit) -> None:
    traces, tokens = kept.traces.num_rows, len(kept.mask.values)
    for name in ("baseline", "advantage"):
        values = _floats(credit, name, np.float64, traces, "traces")
        if np.isinf(values).any():
            raise AdvantageBreach(f"{name} is infinite for some traces; NaN is none")
    for name in ("rl", "ce", "ref_kl"):
        weights = _floats(credit, name, np.float32, tokens, "tokens")
        if not np.isfinite(weights).all() or (weights < 0).any():
            raise AdvantageBreach(f"{name} has weights that are negative or not finite; let an advantage be negative")
    if credit.signal is not None and not np.isfinite(_floats(credit, "signal", np.float32, tokens, "tokens")).all():
        raise AdvantageBreach("signal is not finite for some tokens")


def _floats(credit: Credit, name: str, dtype: type, size: int, what: str) -> NDArray[np.floating]:
    values: NDArray[np.floating] = getattr(credit, name)
    if not isinstance(values, np.ndarray) or values.shape != (size,) or values.dtype != dtype:
        kind = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
        raise AdvantageBreach(f"{name} is {kind}, not an array of {dtype.__name__} for {size} {what}")
    return values


def _require_advantages(kept: GroupedTraces, credit: Credit) -> None:
    if credit.ref_kl.any():
        raise AdvantageBreach("ref_kl has weight, and there is no signal: log pi_ref - log pi_engine of each token")
    if (np.isnan(credit.advantage)[kept.owner[kept.mask.row_of_value]] & (credit.rl != 0)).any():
        raise AdvantageBreach("rl has weight in a trace without an advantage")


def _require_states(kept: GroupedTraces, states: pa.Table | None) -> None:
    """Raise AdvantageBreach unless states are rows of the table for the one environment, each seat's once."""
    if not isinstance(states, pa.Table) or not states.schema.equals(ESTIMATOR_STATES.arrow):
        what = f"a table of {states.schema.names}" if isinstance(states, pa.Table) else type(states).__name__
        raise AdvantageBreach(
            f"it keeps state and returned {what} for states, not a table with the schema ESTIMATOR_STATES.arrow"
        )
    if foreign := {*texts(states["environment"])} - {*texts(kept.traces["environment"])}:
        raise AdvantageBreach(f"states are of environment {min(foreign)!r}, whose traces it was not given")
    if states.group_by(["example_id", "agent"]).aggregate([]).num_rows < states.num_rows:
        raise AdvantageBreach("states have an example and agent twice")
    if not np.isfinite(Ragged.of(states["values"]).values).all():
        raise AdvantageBreach("states have values that are not finite")
