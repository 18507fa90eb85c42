"""What to do about errors of environments whose own text does not say so."""

import re

ADVICE = {
    re.compile(r"process_multimodal|multimodal|image_url"): (
        "the environment sends images, and the renderer of this model takes text alone: choose a model and "
        "`model.renderer` that take images, or an environment without them"
    ),
    re.compile(r"Unable to serialize unknown type"): (
        "what an environment puts on a trace or its state must survive JSON: numbers, text, lists and dictionaries"
    ),
}
"""What helps, by what the error's text holds."""


def advised(message: str) -> str:
    """Return the message of an error, with what to do where that is known."""
    known = [advice for pattern, advice in ADVICE.items() if pattern.search(message)]
    return "; ".join([message, *known])
