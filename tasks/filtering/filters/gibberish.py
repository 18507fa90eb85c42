"""Gibberish: a rare token that the policy itself thought very unlikely; what follows is seldom language."""

from math import log

import numpy as np

from configs.filters import GibberishFilter
from tasks.arrays.finding import FilterInput, Finding, hits_from
from tasks.arrays.ragged import Ragged


class UnknownVocabulary(ValueError):
    """The filter needs the size of the vocabulary, and the config does not say it."""


def gibberish(material: FilterInput, settings: GibberishFilter) -> Finding:
    """Hit every trace with a sampled token of an id above the threshold and a log-prob below -log(vocabulary) - offset.

    The evidence is the first such token and their number. Raises UnknownVocabulary if the vocabulary's size is 0.
    """
    if material.vocab_size <= 0:
        raise UnknownVocabulary(
            "filter 'gibberish' needs model.vocab_size, which is 0. Nothing was filtered. "
            "Resolve the config with the model at hand, set model.vocab_size, or leave the filter out."
        )
    bound = -log(material.vocab_size) - settings.logprob_offset
    tokens, mask, logprobs = (Ragged.of(material.messages[name]) for name in ("token_ids", "mask", "logprobs"))
    found = np.flatnonzero(mask.values & (tokens.values > settings.token_id_threshold) & (logprobs.values < bound))
    message = tokens.row_of_value[found]
    trace, first, count = np.unique(material.owner[message], return_index=True, return_counts=True)
    evidence = {
        int(row): {
            "message": material.messages["message"][int(message[i])].as_py(),
            "position": int(found[i] - tokens.offsets[message[i]]),
            "token_id": int(tokens.values[found[i]]),
            "logprob": float(logprobs.values[found[i]]),
            "bound": bound,
            "tokens": int(number),
        }
        for row, i, number in zip(trace, first, count, strict=True)
    }
    return hits_from(evidence, material.traces.num_rows)
