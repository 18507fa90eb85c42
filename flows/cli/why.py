"""Why a rollout was trained on, or not, in lines for a person: `stagecoach why`."""

import json

from configs.run import RunConfig
from flows.queries.outcomes import explain
from flows.queries.sentences import head, in_quarantine, sentence
from flows.reporting.formats import say
from storage.errors import border
from storage.read.frames import Frames, existing_store


def main(text: str, as_json: bool = False, store: str = "", run: str = "") -> int:
    """Print what became of a rollout in every run that uses it; return the exit status.

    Raises UnknownId, RunUnknown, and LayoutError where there is no store.
    """
    frames = Frames(existing_store(store or RunConfig().store))
    with border("reading the tables", frames.store.root.address):
        found = explain(frames.run(run) if run else frames, text)
    if as_json:
        print(json.dumps(found, default=str))
        return 0
    say(head(found))
    for use in found["runs"]:
        print()
        say(sentence(found, use))
    for each in found["quarantines"]:
        print()
        say(in_quarantine(each))
    return 0
