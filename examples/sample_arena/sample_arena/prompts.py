"""Prompts: what members are told, as templates that can be judged before anything is played."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeVisitor

from sample_arena.errors import ArenaError
from sample_arena.kernel import State
from sample_arena.schedule import Program, Schedule

TURN_NAMES = frozenset({"round", "num_rounds", "phase"})
"""What differs from turn to turn: the number of a member's turn from 1, how many it has (0 where that is open)."""
ALLOWED = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name)
LANGUAGE = SandboxedEnvironment(keep_trailing_newline=True, autoescape=False)


@dataclass(frozen=True)
class PromptPack:
    """The templates of an arena: `{{ name }}` is all that they may hold beside text.

    Raises ArenaError where one holds a statement, an index or a name that is not known to it. System prompts and
    questions open a conversation and are read at every turn: what changes from turn to turn is no name of theirs.
    """

    turns: Mapping[tuple[str, str], str]
    """What a member is asked, by member and phase."""
    system: Mapping[str, str] = field(default_factory=dict)
    """System prompts by member; none where there is none."""
    question: Mapping[str, str] = field(default_factory=dict)
    """What a member reads once, ahead of its first turn, by member."""
    heard: str = "{{ member }}: {{ public }}"
    """How another's utterance is told."""
    names: frozenset[str] = frozenset()
    """What templates may say of the task."""

    def __post_init__(self) -> None:
        for kind, templates in (("system", self.system), ("question", self.question)):
            for member, template in templates.items():
                require_plain(template, f"{kind} of {member!r}", self.names, TURN_NAMES)
        for (member, phase), template in self.turns.items():
            require_plain(template, f"turn of {member!r} in {phase!r}", self.names | TURN_NAMES)
        require_plain(self.heard, "heard", frozenset({"member", "phase", "public"}))

    def require_complete(self, members: Iterable[str], program: Program) -> None:
        """Raise ArenaError where a turn has no template: each (member, phase) of a static schedule, or a member."""
        wanted = set(program.turns) if isinstance(program, Schedule) else set()
        without = wanted - set(self.turns)
        silent = set(members) - {member for member, _ in self.turns}
        if without or silent:
            raise ArenaError(
                f"prompts: no template for {sorted(without) or sorted(silent)}; every member needs one for each phase "
                "in which it speaks"
            )

    def rendered(self, template: str, values: Mapping[str, object]) -> str:
        """Return a template of this pack, filled in."""
        return _compiled(template).render(values)

    def reading(self, program: Program, state: State, member: str, values: Mapping[str, object]) -> list[str]:
        """Return what a member of the open slot reads now: its question once, what it has not heard, what it is asked.

        Nothing that it read before is among it, so that its prompts extend each other. `values` are those of the task.
        """
        assert state.slot is not None, "someone is asked in an open slot"
        number, phase = state.round_of(member), state.slot.phase
        opening = [self.rendered(self.question[member], values)] if number == 0 and member in self.question else []
        heard = [self.rendered(self.heard, vars(each)) for each in state.heard(member)]
        own = program.num_rounds(member) if isinstance(program, Schedule) else 0
        turn = {**values, "round": number + 1, "num_rounds": own, "phase": phase}
        return [*opening, *heard, self.rendered(self.turns[member, phase], turn)]


def require_plain(template: str, where: str, known: frozenset[str], varying: frozenset[str] = frozenset()) -> None:
    """Raise ArenaError where a template holds more than text and known names; `varying` are named in the refusal."""
    try:
        tree = LANGUAGE.parse(template)
    except TemplateSyntaxError as error:
        raise ArenaError(f"prompts, {where}: line {error.lineno}: {error.message}") from error
    _Plain(where, known, varying).visit(tree)


@lru_cache(maxsize=1024)
def _compiled(template: str) -> Template:
    return LANGUAGE.from_string(template)


class _Plain(NodeVisitor):
    """Walks a template and refuses what is neither text nor a known name."""

    def __init__(self, where: str, known: frozenset[str], varying: frozenset[str]) -> None:
        self._where = where
        self._known = known
        self._varying = varying

    def generic_visit(self, node: nodes.Node, *args: object, **kwargs: object) -> None:
        """Refuse a node of any other kind."""
        if not isinstance(node, ALLOWED):
            raise ArenaError(
                f"prompts, {self._where}: line {node.lineno}: {type(node).__name__} is not allowed; templates hold "
                "text and names, no statements, no index, no set and no calls. Prepare the value in the task"
            )
        super().generic_visit(node, *args, **kwargs)

    def visit_Name(self, node: nodes.Name) -> None:
        """Refuse a name that is unknown, or varies where nothing may."""
        if node.name in self._varying:
            raise ArenaError(
                f"prompts, {self._where}: {node.name!r} changes from turn to turn, and this opens the conversation: a "
                "later prompt would no longer begin with the earlier one. Say it in the turn's template"
            )
        if node.name not in self._known:
            raise ArenaError(f"prompts, {self._where}: {node.name!r} is not known; known are {sorted(self._known)}")
