"""Schedules: who speaks when. Static ones are a list of slots; a program may also decide as the play goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sample_arena.errors import ArenaError

if TYPE_CHECKING:
    from sample_arena.kernel import State


@dataclass(frozen=True)
class Slot:
    """One place in a schedule: a single member's turn, or several members' at once, who do not hear each other."""

    phase: str
    members: tuple[str, ...]

    def __post_init__(self) -> None:
        require_members(self.members)
        if not self.phase:
            raise ArenaError(f"slot of {list(self.members)}: its phase has no name, and templates are found by it")


class Program(Protocol):
    """Who speaks next, given all that was said."""

    def next_slot(self, state: "State") -> Slot | None:
        """Return the next slot, or None at the end. Must depend on nothing but the state."""


@dataclass(frozen=True)
class Schedule:
    """A program whose slots are known before anything is said."""

    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise ArenaError("schedule without slots: nobody would ever speak")

    def next_slot(self, state: "State") -> Slot | None:
        """Return the slot after the last committed one."""
        return self.slots[state.num_slots] if state.num_slots < len(self.slots) else None

    @property
    def members(self) -> tuple[str, ...]:
        """Everyone who speaks, in order of the first time."""
        return tuple(dict.fromkeys(member for slot in self.slots for member in slot.members))

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """Every (member, phase) that occurs, once."""
        return tuple(dict.fromkeys((member, slot.phase) for slot in self.slots for member in slot.members))

    def num_rounds(self, member: str) -> int:
        """Return how many slots a member has; slots of others do not count."""
        return sum(member in slot.members for slot in self.slots)


def rounds(phase: str, members: Sequence[str], num_rounds: int, *, simultaneous: bool = False) -> tuple[Slot, ...]:
    """Return slots in which each member speaks `num_rounds` times: all at once in each round, or one after another."""
    if num_rounds < 1:
        raise ArenaError(f"{num_rounds} rounds: at least one is played")
    single = (tuple(members),) if simultaneous else tuple((member,) for member in members)
    return tuple(Slot(phase, each) for _ in range(num_rounds) for each in single)


def require_members(members: Sequence[str]) -> None:
    """Raise ArenaError where nobody is named, a name is empty, or one is named twice."""
    if not members or not all(members) or len(set(members)) != len(members):
        raise ArenaError(f"members {list(members)}: name at least one, each once")


def require_same(members: Sequence[str], seats: Sequence[str], program: Program) -> None:
    """Raise ArenaError unless `members` are the seats of the config, in their order, and those of a static schedule.

    What a dynamic program will ask for is not known before it is played; the kernel then refuses strangers.
    """
    require_members(members)
    if tuple(members) != tuple(seats):
        raise ArenaError(
            f"members {list(members)}, seats {list(seats)}: name the same in the same order, or rewards go astray"
        )
    if isinstance(program, Schedule) and set(program.members) != set(members):
        missing, strange = sorted(set(members) - set(program.members)), sorted(set(program.members) - set(members))
        raise ArenaError(f"schedule: {missing} never speak in it, and {strange} are not members {list(members)}")
