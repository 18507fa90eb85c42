"""Playing: slot after slot from the first to the end, each committed whole or not at all."""

import asyncio
from collections.abc import Awaitable, Callable

from sample_arena.channels import Utterance
from sample_arena.errors import MemberFailed, PromptTooLong
from sample_arena.kernel import State, advance, begin, failed, overflowed, submit
from sample_arena.schedule import Program, Slot

Speak = Callable[[State, Slot, str], Awaitable[Utterance]]
"""Ask one member for its utterance, given the state before the slot."""
Committed = Callable[[State], Awaitable[None]]
"""Told the state after a slot; where it raises, the slot never was."""


async def nothing(state: State) -> None:
    """Do nothing about a committed slot."""


class Play:
    """One episode under way; `state` is always one between slots, whatever is raised."""

    def __init__(self, members: tuple[str, ...], program: Program, speak: Speak, committed: Committed = nothing):
        self.state = begin(members, program)
        self._program = program
        self._speak = speak
        self._committed = committed

    async def finish(self) -> State:
        """Play on to the end and return how it ended.

        A member that fails or cannot read on ends the episode; anything else that is raised is raised on, with the
        state still the one before the slot.
        """
        while self.state.stop is None:
            try:
                after = await self._slot(self.state)
            except MemberFailed as error:
                self.state = failed(self.state, str(error))
            except PromptTooLong as error:
                self.state = overflowed(self.state, error.member)
            else:
                self.state = after
                self.state = advance(after, self._program)
        return self.state

    async def _slot(self, before: State) -> State:
        assert before.slot is not None, "a state that has not stopped has an open slot"
        state = before
        for utterance in await self._said(before, before.slot):
            state = submit(state, utterance)
        assert state.num_slots == before.num_slots + 1, "every member of the slot was asked"
        await self._committed(state)
        return state

    async def _said(self, state: State, slot: Slot) -> list[Utterance]:
        """What each member of a slot says, given the same state; the first to fail ends the others' turns."""
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._speak(state, slot, member)) for member in slot.members]
        except BaseExceptionGroup as errors:
            raise gravest(errors) from errors
        return [task.result() for task in asked]


def gravest(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that decides: a fault of the program, then a member's failure, then a prompt too long."""
    leaves: list[BaseException] = []
    for error in errors.exceptions:
        leaves += [gravest(error)] if isinstance(error, BaseExceptionGroup) else [error]
    return min(leaves, key=lambda error: (isinstance(error, PromptTooLong), isinstance(error, MemberFailed)))
