"""Keep masks: a function by import path that says which tokens of the messages may be chosen."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.algorithms.credit import AdvantageBreach, Kept
from tasks.import_paths import load_version


def keep_mask(kept: Kept, path: str, version: str, arguments: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Return, per token of the messages, flat, whether the function named by `path` keeps it.

    It is called with the table of the messages and `arguments`, and returns for each message one truth value per token.
    Raises AdvantageBreach where it returns anything else, NotImportable where it cannot be loaded or is not `version`.
    """
    found = load_version(path, version)(kept.messages, **deepcopy(dict(arguments)))
    try:
        rows = [np.asarray(row, np.bool_ if len(row) == 0 else None) for row in found]
    except (TypeError, ValueError) as error:
        raise _breach(path, f"it returned {type(found).__name__}, not lists of truth values ({error})") from error
    lengths = kept.mask.lengths.tolist()
    if len(rows) != len(lengths):
        raise _breach(path, f"it returned {len(rows)} lists for {len(lengths)} messages")
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.dtype != np.bool_ or row.shape != (length,):
            name = f"message {kept.messages['message'][number]} of trace {kept.messages['trace_id'][number]}"
            raise _breach(path, f"for {name} it returned {row.dtype} {row.shape}, not {length} truth values")
    return np.concatenate([np.zeros(0, np.bool_), *rows])


def _breach(path: str, what: str) -> AdvantageBreach:
    return AdvantageBreach(
        f"keep_mask {path}: {what}. Nothing was trained; all that was sampled is safe. Let it return, for each message "
        "of the table that it is given, a list of booleans as long as the message's token_ids."
    )
