"""Custom: what a function of one's own finds, named by import path; what it returns is checked."""

import json
from copy import deepcopy
from dataclasses import replace

from configs.filters import CustomFilter
from tasks.arrays.finding import FilterInput, Finding, hits_from
from tasks.runtime.imports import load_version


class NoFinding(ValueError):
    """A function that was to find something returned what cannot be a finding."""


def custom(material: FilterInput, settings: CustomFilter) -> Finding:
    """Hit every trace of which the section's function returns evidence, called as `f(material, **arguments)`.

    It returns a mapping from rows of the traces to mappings that JSON can hold. Raises NoFinding for anything else, and
    NotImportable where the function cannot be loaded or is not what the config was resolved with.
    """
    own = replace(material, owner=material.owner.copy(), standing=material.standing.copy())
    function = load_version(settings.function, settings.version)
    # What it does to its arguments changes neither what other filters see nor what the next step is given.
    evidence = function(own, **deepcopy(settings.arguments))
    if problem := _problem(evidence, material.traces.num_rows):
        raise NoFinding(
            f"filter {settings.name!r}: {settings.function} {problem}. Nothing was filtered or trained; all that was "
            "sampled is safe. Correct the function (its code is part of the key) and go on under a new name, or replay "
            "the run from filtering."
        )
    return hits_from(evidence, material.traces.num_rows)


def _problem(evidence: object, num_traces: int) -> str:
    if not isinstance(evidence, dict):
        return f"returned {type(evidence).__name__}, not a dictionary of evidence by row"
    for row, found in evidence.items():
        # Not isinstance: True is an int, and would be row 1.
        if type(row) is not int or not 0 <= row < num_traces:
            return f"names row {row!r} of {num_traces} traces"
        if not isinstance(found, dict):
            return f"gave {type(found).__name__} for row {row}, not a dictionary"
    try:
        json.dumps(list(evidence.values()), allow_nan=False)  # NaN is no JSON, whatever Python writes
    except (TypeError, ValueError) as error:
        return f"gave evidence that JSON cannot hold: {error}"
    return ""
