"""How a debate goes: who speaks when, what each is told, and how the judge's words are read."""

from collections.abc import Mapping
from typing import Any

from sample_arena.prompts import PromptPack
from sample_arena.schedule import Schedule, Slot, rounds
from sample_arena.scores import JUDGE
from sample_arena.verdicts import Verdicts

from sample_debate.claims import AFFIRMATIVE, NEGATIVE

DEBATERS = (AFFIRMATIVE, NEGATIVE)
MEMBERS = (*DEBATERS, JUDGE)
SPEAK, DECIDE = "speak", "decide"
"""The phases: a debater's statement, the judge's verdict."""
YES, NO = "<yes>", "<no>"
VERDICTS = Verdicts({YES: AFFIRMATIVE, NO: NEGATIVE})
"""The judge's tokens, and who wins by each."""
PROMPTS = PromptPack(
    turns={
        (AFFIRMATIVE, SPEAK): "say {{ round }}",
        (NEGATIVE, SPEAK): "say {{ round }}",
        (JUDGE, DECIDE): "{{ digit }}?",
    },
    question={AFFIRMATIVE: "yes: {{ digit }} in {{ numbers }}", NEGATIVE: "no: {{ digit }} in {{ numbers }}"},
    heard="{{ member }}: {{ public }}",
    names=frozenset({"digit", "numbers"}),
)
"""Debaters read their side and the claim with its list, the judge the claim alone and what was said in public."""


def program(num_rounds: int, *, at_once: bool) -> Schedule:
    """Return the rounds of statements, by turns or at once, and the verdict."""
    return Schedule((*rounds(SPEAK, DEBATERS, num_rounds, simultaneous=at_once), Slot(DECIDE, (JUDGE,))))


def shown(data: Any, member: str) -> Mapping[str, object]:
    """Return what a member may know of a claim, by `digit` and `numbers`: the judge does not see the list."""
    return {"digit": data.digit} if member == JUDGE else {"digit": data.digit, "numbers": data.numbers}
