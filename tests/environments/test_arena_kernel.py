"""The kernel against random schedules, random failures and random interleavings; its rules one by one."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_arena.channels import Channels
from sample_arena.errors import (
    ArenaError,
    MemberFailed,
    PlayError,
    PlayFinished,
    PromptTooLong,
    ProtocolError,
    SpokenAlready,
    WrongMember,
)
from sample_arena.kernel import State, advance, begin, failed, overflowed, submit
from sample_arena.play import Play
from sample_arena.schedule import Schedule, Slot, require_same, rounds

MEMBERS = ("a", "b", "c")
CHANNELS = Channels("note")


def said(member, text="hi", phase="talk"):
    return CHANNELS.utterance(member, phase, text)


slots = st.lists(
    st.builds(
        Slot,
        st.sampled_from(("talk", "vote")),
        st.permutations(MEMBERS).flatmap(lambda order: st.integers(1, 3).map(lambda count: tuple(order[:count]))),
    ),
    min_size=1,
    max_size=6,
)


# Schedules


def test_a_schedule_knows_its_members_turns_and_rounds():
    schedule = Schedule((*rounds("talk", ("a", "b"), 2), Slot("vote", ("b", "c")), Slot("talk", ("a",))))
    assert [slot.members for slot in schedule.slots] == [("a",), ("b",), ("a",), ("b",), ("b", "c"), ("a",)]
    assert schedule.members == MEMBERS
    assert schedule.turns == (("a", "talk"), ("b", "talk"), ("b", "vote"), ("c", "vote"))
    assert [schedule.num_rounds(member) for member in "abcx"] == [3, 3, 1, 0]
    state, numbers = begin(MEMBERS, schedule), []
    while state.slot is not None:
        speaking = state.slot.members
        numbers += [(member, state.round_of(member)) for member in speaking]
        for member in speaking:
            state = submit(state, said(member))
        state = advance(state, schedule)
    assert numbers == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2), ("c", 0), ("a", 2)]


@pytest.mark.parametrize(
    ("members", "seats", "told"),
    [
        (("a", "b"), ("b", "a"), "name the same in the same order"),
        (("a",), ("a",), r"\['b'\] are not members"),
        (("a", "b", "c"), ("a", "b", "c"), r"\['c'\] never speak"),
    ],
)
def test_members_are_those_of_the_seats_and_of_the_schedule(members, seats, told):
    with pytest.raises(ArenaError, match=told):
        require_same(members, seats, Schedule(rounds("talk", ("b", "a"), 1)))


class Echo:
    """A program that follows the last word: who is named in it speaks next."""

    def next_slot(self, state):
        last = state.turns[-1][-1].public if state.turns else "a"
        return None if last == "end" else Slot("talk", (last,))


def test_a_program_that_decides_as_it_goes_is_not_held_to_the_members_beforehand():
    require_same(("a", "b"), ("a", "b"), Echo())
    state = begin(("a", "b"), Echo())
    for word in ("b", "b", "a", "end"):
        assert state.slot is not None
        state = advance(submit(state, said(state.slot.members[0], word)), Echo())
    assert state.stop == "schedule_exhausted" and [turn[0].member for turn in state.turns] == ["a", "b", "b", "a"]
    with pytest.raises(WrongMember, match=r"\['x'\] are not members"):
        advance(submit(begin(("a", "b"), Echo()), said("a", "x")), Echo())


# Moves


def test_moves_that_the_rules_do_not_allow():
    schedule = Schedule((Slot("talk", ("a", "b")), Slot("talk", ("c",))))
    opened = begin(MEMBERS, schedule)
    one = submit(opened, said("b"))
    for state, member, error in ((opened, "c", WrongMember), (one, "b", SpokenAlready), (one, "x", WrongMember)):
        with pytest.raises(error):
            submit(state, said(member))
    # A slot that was under way when the episode ended never was.
    assert failed(one, "gone").said == overflowed(one, "a").said == () and one.said != ()
    committed = submit(one, said("a"))
    for state in (committed, failed(one, "gone"), overflowed(one, "a")):
        with pytest.raises(PlayFinished):
            submit(state, said("c"))
    ended = advance(submit(advance(committed, schedule), said("c")), schedule)
    assert ended.stop == "schedule_exhausted"
    with pytest.raises(PlayFinished, match="schedule_exhausted"):
        submit(ended, said("a"))
    assert issubclass(ProtocolError, PlayError)


def test_the_gravest_reason_to_stop_comes_first():
    state = State(("a",))
    assert state.stop is None
    state = overflowed(state, "a")
    assert state.stop == "prompt_too_long"
    exhausted = State(("a",), exhausted=True, too_long="a")
    assert exhausted.stop == "schedule_exhausted"
    assert failed(exhausted, "gone").stop == "error"
    assert failed(failed(state, "first"), "second").error == "first"
    assert overflowed(state, "b").too_long == "a"


# What members hear


@settings(max_examples=40, deadline=None)
@given(slots)
def test_a_member_hears_every_public_word_of_others_once_and_never_a_private_one(each):
    schedule = Schedule(tuple(each))
    state = begin(MEMBERS, schedule)
    read = {member: [] for member in MEMBERS}
    for number, slot in enumerate(each):
        for member in slot.members:
            heard = state.heard(member)
            assert "SECRET" not in repr(heard)
            read[member] += [one.public for one in heard]
        for member in slot.members:
            state = submit(state, said(member, f"{number}{member} <note>SECRET</note><think>SECRET</think>"))
        state = advance(state, schedule)
    for member in MEMBERS:
        everything = [f"{number}{one}" for number, slot in enumerate(each) for one in slot.members if one != member]
        rest = [one.public for one in state.heard(member)]
        # Read before its turns, and what is left after the last of them: nothing missing, nothing twice.
        assert read[member] + rest == everything
    assert all(one.private == "SECRET" for turn in state.turns for one in turn)


# Whole plays


class Table:
    """Members that speak after random pauses, and fail where they are told to."""

    def __init__(self, draw, faults):
        self.draw, self.faults = draw, faults
        self.asked = []

    async def speak(self, state, slot, member):
        self.asked.append((state.num_slots, member))
        for _ in range(self.draw.randrange(4)):
            await asyncio.sleep(0)
        if fault := self.faults.get((state.num_slots, member)):
            raise fault
        return said(member, f"{state.num_slots}{member}", slot.phase)


def _played(schedule, table):
    play = Play(MEMBERS, schedule, table.speak)
    try:
        asyncio.run(play.finish())
    except KeyError as error:
        return play, error
    return play, None


@settings(max_examples=40, deadline=None)
@given(
    slots,
    st.randoms(use_true_random=False),
    st.dictionaries(
        st.tuples(st.integers(0, 5), st.sampled_from(MEMBERS)),
        st.sampled_from((MemberFailed, PromptTooLong, KeyError)),
        max_size=3,
    ),
)
def test_whatever_fails_slots_are_whole_and_the_state_is_that_before_the_slot(each, draw, faults):
    schedule = Schedule(tuple(each))
    made = {where: KeyError("bug") if kind is KeyError else kind(where[1], "gone") for where, kind in faults.items()}
    table = Table(draw, made)
    play, raised = _played(schedule, table)
    hit = [number for number, slot in enumerate(each) if any((number, member) in made for member in slot.members)]
    first = hit[0] if hit else len(each)
    expected = tuple(
        tuple(said(member, f"{number}{member}", slot.phase) for member in slot.members)
        for number, slot in enumerate(each[:first])
    )
    state = play.state
    assert state.turns == expected and state.said == ()
    if not hit:
        assert state.stop == "schedule_exhausted" and raised is None
        return
    here = {member: faults[first, member] for member in each[first].members if (first, member) in faults}
    outcome = KeyError if raised else MemberFailed if state.error else PromptTooLong
    assert outcome in here.values() and (len(set(here.values())) > 1 or {outcome} == set(here.values()))
    assert all(number <= first for number, _ in table.asked)
    if raised:  # not a failure of the play: the state is the very one before the slot
        assert state.stop is None and state.slot == each[first]


def test_the_first_failure_ends_the_turns_of_the_others():
    ended = []

    async def speak(state, slot, member):
        if member == "b":
            await asyncio.sleep(0)
            raise MemberFailed("b", "gone")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(member)
            raise
        raise AssertionError("nobody sets the event")

    state = asyncio.run(Play(MEMBERS, Schedule((Slot("talk", MEMBERS),)), speak).finish())
    assert sorted(ended) == ["a", "c"] and state.stop == "error" and state.turns == ()
    assert state.error == "member 'b' failed: gone"


@pytest.mark.parametrize("kinds", [(PromptTooLong, MemberFailed), (MemberFailed, PromptTooLong)])
def test_of_two_failures_at_once_the_graver_decides(kinds):
    async def run():
        opened = asyncio.Event()

        async def speak(state, slot, member):
            if member == "a":
                opened.set()
            try:
                await opened.wait()
            finally:
                raise kinds["ab".index(member)](member, "gone")

        return await Play(("a", "b"), Schedule((Slot("talk", ("a", "b")),)), speak).finish()

    assert asyncio.run(run()).stop == "error"


@pytest.mark.parametrize("error", [PlayError("no"), KeyError("bug")])
def test_a_hook_that_fails_leaves_the_state_before_the_slot(error):
    seen = []

    async def committed(state):
        seen.append(state)
        if state.num_slots == 2:
            raise error

    table = Table(random.Random(0), {})
    play = Play(MEMBERS, Schedule(rounds("talk", MEMBERS, 1)), table.speak, committed)
    with pytest.raises(type(error)):
        asyncio.run(play.finish())
    assert [state.num_slots for state in seen] == [1, 2]
    assert play.state == advance(seen[0], Schedule(rounds("talk", MEMBERS, 1))) and play.state.num_slots == 1
    assert play.state.stop is None
