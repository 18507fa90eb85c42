"""The kernel: what was said so far, and what may follow. States never change; a transition returns a new one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sample_arena.channels import Heard, Utterance
from sample_arena.errors import PlayFinished, SpokenAlready, WrongMember
from sample_arena.schedule import Program, Slot, require_members

Stop = Literal["error", "schedule_exhausted", "prompt_too_long"]


@dataclass(frozen=True)
class State:
    """An episode so far. A slot's utterances are in `turns` all together or not at all."""

    members: tuple[str, ...]
    turns: tuple[tuple[Utterance, ...], ...] = ()
    """The utterances of each committed slot, in the slot's order of members."""
    slot: Slot | None = None
    """Whose turn it is."""
    said: tuple[Utterance, ...] = ()
    """What was said in the open slot, in order of arrival; nobody hears it before the slot is committed."""
    exhausted: bool = False
    """Whether the program has no further slot."""
    too_long: str | None = None
    """The member that could not read on."""
    error: str | None = None
    """Why the episode failed."""

    @property
    def stop(self) -> Stop | None:
        """Why nothing follows, the gravest reason first; None while something does."""
        if self.error is not None:
            return "error"
        if self.exhausted:
            return "schedule_exhausted"
        return "prompt_too_long" if self.too_long is not None else None

    @property
    def num_slots(self) -> int:
        """How many slots were committed."""
        return len(self.turns)

    def round_of(self, member: str) -> int:
        """Return how often a member has spoken: the number, from 0, of the turn that it has next."""
        return len(self.of(member))

    def of(self, member: str) -> tuple[Utterance, ...]:
        """Return everything that a member said, its private part too."""
        return tuple(each for turn in self.turns for each in turn if each.member == member)

    def heard(self, member: str) -> tuple[Heard, ...]:
        """Return what others said in public since a member was last asked, in order: what it has not read yet.

        Those who spoke at once with it are among them, as it could not hear them then.
        """
        own = [number for number, turn in enumerate(self.turns) if any(each.member == member for each in turn)]
        unread = self.turns[own[-1] :] if own else self.turns
        return tuple(each.heard for turn in unread for each in turn if each.member != member)


def begin(members: Sequence[str], program: Program) -> State:
    """Return the state in which the program's first slot is open."""
    require_members(members)
    return advance(State(tuple(members)), program)


def advance(state: State, program: Program) -> State:
    """Return the state with the program's next slot open, or at its end. A state that has stopped stays as it is.

    Raises WrongMember where the program asks for someone who is no member.
    """
    if state.stop is not None or state.slot is not None:
        return state
    slot = program.next_slot(state)
    if slot is None:
        return replace(state, exhausted=True)
    if strange := sorted(set(slot.members) - set(state.members)):
        raise WrongMember(f"slot {state.num_slots} ({slot.phase}): {strange} are not members {list(state.members)}")
    return replace(state, slot=slot)


def submit(state: State, utterance: Utterance) -> State:
    """Return the state in which a member has spoken; where it was the last of its slot, the slot is committed.

    Raises PlayFinished after the end, SpokenAlready where the member has spoken in this slot, and WrongMember where it
    has no turn there. No one hears any of the slot before all of it is committed.
    """
    member = utterance.member
    if state.stop is not None or state.slot is None:
        raise PlayFinished(f"member {member!r} spoke after the end ({state.stop or 'no slot is open'})")
    if any(each.member == member for each in state.said):
        raise SpokenAlready(f"member {member!r} spoke twice in slot {state.num_slots} ({state.slot.phase})")
    if member not in state.slot.members:
        raise WrongMember(
            f"member {member!r} spoke in slot {state.num_slots} ({state.slot.phase}), which is of "
            f"{list(state.slot.members)}"
        )
    said = (*state.said, utterance)
    if len(said) < len(state.slot.members):
        return replace(state, said=said)
    by_member = {each.member: each for each in said}
    turn = tuple(by_member[each] for each in state.slot.members)
    return replace(state, turns=(*state.turns, turn), slot=None, said=())


def rolled_back(state: State) -> State:
    """Return the state as it was when its open slot was opened."""
    return replace(state, said=())


def failed(state: State, error: str) -> State:
    """Return the state in which the episode has failed; its open slot never was."""
    return replace(rolled_back(state), error=state.error or error)


def overflowed(state: State, member: str) -> State:
    """Return the state in which a member could not read on; its open slot never was."""
    return replace(rolled_back(state), too_long=state.too_long or member)
