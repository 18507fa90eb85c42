"""Noisy demonstrations for a supervised warm start: debates of members that know the forms and little else."""

import random
from collections.abc import Iterator

from chat_loop.demonstrating import command, read
from sample_arena.channels import Channels
from sample_arena.folding import SEPARATOR
from sample_arena.kernel import State, advance, begin, submit
from sample_arena.schedule import Schedule
from sample_arena.scores import JUDGE

from sample_debate.claims import AFFIRMATIVE, CITE, DIGITS, MOST_CLAIMS, Claim, cited, claims
from sample_debate.rules import DEBATERS, MEMBERS, NO, PROMPTS, YES, program, shown
from sample_debate.taskset import data_of

Row = dict[str, list[dict[str, str]]]
IDLE = "hm"
"""A statement that says nothing."""


def demonstrations(
    count: int,
    *,
    seed: int,
    cite: float = 0.3,
    misquote: float = 0.3,
    num_rounds: int = 2,
    at_once: float = 0.5,
) -> Iterator[Row]:
    """Yield `count` conversations, each one member's of a debate; the members of a debate follow one another.

    Debaters cite the list with probability `cite`, another one with `misquote`, and otherwise say nothing of use,
    whatever their side. The judge believes the only debater who cites a list. Where both do, it goes by the lists if
    they agree about the digit. Else it draws. Debates have up to `num_rounds` rounds, a share `at_once` of them spoken
    at once. Raises ValueError where shares are negative, or exceed 1 together or alone.
    """
    if min(cite, misquote) < 0 or cite + misquote > 1:
        raise ValueError(f"cite {cite} and misquote {misquote}: shares from 0 to 1 that sum to at most 1")
    if not 0 <= at_once <= 1:
        raise ValueError(f"at_once {at_once}: a share from 0 to 1")
    draw = random.Random(f"debates {seed}")
    pool = list(claims(min(-(-count // 3), MOST_CLAIMS), seed))
    made = 0
    while made < count:
        claim = draw.choice(pool)
        schedule = program(draw.randint(1, num_rounds), at_once=draw.random() < at_once)
        for row in _debate(claim, draw, (cite, misquote), schedule)[: count - made]:
            yield row
            made += 1


def _debate(claim: Claim, draw: random.Random, shares: tuple[float, float], schedule: Schedule) -> list[Row]:
    """One debate, as the conversation of each member."""
    data = data_of(claim)
    rows: dict[str, Row] = {member: {"messages": []} for member in MEMBERS}
    state = begin(MEMBERS, schedule)
    while state.slot is not None:
        before, slot = state, state.slot
        for member in slot.members:
            read = SEPARATOR.join(PROMPTS.reading(schedule, before, member, shown(data, member)))
            said = _verdict(claim, before, draw) if member == JUDGE else _statement(claim, draw, *shares)
            rows[member]["messages"] += [{"role": "user", "content": read}, {"role": "assistant", "content": said}]
            state = submit(state, Channels().utterance(member, slot.phase, said))
        state = advance(state, schedule)
    return list(rows.values())


def _statement(claim: Claim, draw: random.Random, cite: float, misquote: float) -> str:
    kind = draw.random()
    if kind < cite:
        return f"{CITE} {claim.listed}"
    other = " ".join(draw.choice(DIGITS) for _ in claim.numbers)
    return f"{CITE} {other}" if kind < cite + misquote else IDLE


def _verdict(claim: Claim, state: State, draw: random.Random) -> str:
    """What the judge makes of the statements: the list itself it has not seen."""
    lists = {member: [cited(each.public) for each in state.of(member)] for member in DEBATERS}
    citing = [member for member in DEBATERS if any(lists[member])]
    if len(citing) == 1:
        return YES if citing == [AFFIRMATIVE] else NO
    found = {claim.digit in listed.split() for each in lists.values() for listed in each if listed is not None}
    holds = found.pop() if len(found) == 1 else draw.random() < 0.5
    return YES if holds else NO


def words() -> list[str]:
    """What a small byte-level tokenizer shall keep whole, so that a debate is a few dozen tokens."""
    told = [f"{member}: " for member in DEBATERS]
    return [*told, "yes: ", "no: ", " in ", "say ", f"{CITE} ", IDLE, YES, NO, "user", "assistant", SEPARATOR]


def main() -> None:
    """Run the command line."""
    parser = command(__doc__, count=4800)
    parser.add_argument("--cite", type=float, default=0.3, help="share of statements that cite the list")
    parser.add_argument("--misquote", type=float, default=0.3, help="share that cite another list")
    parser.add_argument("--num-rounds", type=int, default=2, help="most rounds of a debate")
    parser.add_argument("--at-once", type=float, default=0.5, help="share of debates in which both speak at once")
    files, choices = read(parser)
    files.write(demonstrations(**choices), words())


if __name__ == "__main__":
    main()
