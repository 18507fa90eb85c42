"""One episode: two seats play a deal, each in a conversation of its own, and win or lose chips."""

from collections.abc import Sequence

import verifiers.v1 as vf
from sample_arena.scores import EpisodeScore, MemberScore, complete, errored, record
from sample_arena.seats import flag_unreadable
from sample_arena.seeds import shift_seed
from verifiers.v1.agent import Interaction
from verifiers.v1.errors import RolloutError

from sample_kuhn_poker.play import facts
from sample_kuhn_poker.rules import FOLD, History, after, chips, is_over, passive
from sample_kuhn_poker.talk import move_of, request
from sample_kuhn_poker.taskset import SEATS, DealData


class Unfinished(RolloutError):
    """A seat could not be asked for its move, and nothing failed there: a limit is too small for the game."""


class KuhnPokerEnvConfig(vf.EnvConfig):
    """The two seats; who holds which card and who acts first is the deal's."""

    player_0: vf.AgentConfig = vf.AgentConfig()
    """One player."""
    player_1: vf.AgentConfig = vf.AgentConfig()
    """The other."""


class Seat:
    """One player in the course of a game: its conversation, and what it has played."""

    def __init__(self, card: str, conversation: Interaction, forfeits: bool) -> None:
        self.card = card
        self.forfeits = forfeits
        """Whether a reply that cannot be read loses the game."""
        self.conversation = conversation
        self.trace = conversation.trace
        self.trace.info.update(moves=[], unreadable=[])

    async def move(self, history: History) -> str | None:
        """Ask for a move and return it, or None where the model failed.

        Raises Unfinished where a limit ended the conversation.
        """
        played: list[str] = self.trace.info["moves"]
        said = await self.conversation.turn(request(history, "" if played else self.card))
        if said.terminated:
            return self._failed()
        move = move_of(said.last_reply, history)
        played.append(move or self._unread(history))
        return played[-1]

    def _unread(self, history: History) -> str:
        """Note a reply that names no allowed move, by its place in the game; return what it is played as.

        Where it does not forfeit the game it is flagged, so that it is not trained on: the chips that the passive move
        wins or loses are no judgement of that reply.
        """
        self.trace.info["unreadable"].append(len(history))
        if not self.forfeits:
            flag_unreadable(self.trace)
        return passive(history)

    def _failed(self) -> None:
        if not self.trace.errors and not self.trace.is_timeout:
            raise Unfinished(
                f"seat {self.trace.agent.name} could not be asked for move {len(self.trace.info['moves']) + 1} "
                f"(stop condition {self.trace.stop_condition!r}) and the game is not over; nobody is scored. A seat "
                "moves up to twice: allow max_turns of 2 and room for the game in the model's context"
            )


class KuhnPokerEnv(vf.Env[KuhnPokerEnvConfig]):
    """Two seats play a deal. A seat is told its own card and the public moves; rewards are the chips won."""

    @property
    def forfeits(self) -> bool:
        """Whether a reply that cannot be read loses the game."""
        return bool(self.taskset.config.unreadable == "forfeit")

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Let the seats move in turn until the game is over or one of them fails."""
        # With the same seed both would draw alike between the same two words, and play would not be independent.
        shift_seed(agents.player_1)
        mine, theirs = (type(task)(task.data.seat(number), task.config) for number in range(len(SEATS)))
        async with agents.player_0.interaction(mine) as zero, agents.player_1.interaction(theirs) as one:
            talks = zip(SEATS, (zero, one), strict=True)
            seats = [Seat(task.data.cards[name], each, self.forfeits) for name, each in talks]
            history: History = ()
            while not is_over(history):
                move = await seats[actor(task.data, history)].move(history)
                if move is None:
                    return
                history = after(history, move)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Score both seats, or neither where one failed: a game that was not played out has no winner."""
        failed = [trace.agent.name for trace in episode.traces if not trace.ok or trace.is_timeout]
        if failed:
            record(errored(f"{failed[0]} failed before the game was over", SEATS), episode.traces)
            return
        record(complete(score(task.data, episode.traces, self.forfeits), SEATS), episode.traces)


def actor(deal: DealData, history: History) -> int:
    """The seat that is to act."""
    return (deal.first + len(history)) % len(SEATS)


def replayed(deal: DealData, moves: Sequence[Sequence[str]]) -> list[tuple[int, History, str]]:
    """The game that each seat's moves make together, move by move: the seat, the history before, and the move."""
    left = [list(each) for each in moves]
    game: list[tuple[int, History, str]] = []
    history: History = ()
    while not is_over(history):
        seat = actor(deal, history)
        game.append((seat, history, left[seat].pop(0)))
        history = after(history, game[-1][2])
    return game


def score(deal: DealData, traces: Sequence[vf.Trace], forfeits: bool) -> EpisodeScore:
    """Chips won by each seat, which add up to zero, with facts of its play.

    Where a reply that cannot be read `forfeits` the game, the first seat that gave one loses a chip to the other.
    """
    by_seat = {trace.agent.name: trace for trace in traces}
    info = [by_seat[name].info for name in SEATS]
    game = replayed(deal, [each["moves"] for each in info])
    history = after(*game[-1][1:])
    won = chips((deal.cards[SEATS[deal.first]], deal.cards[SEATS[1 - deal.first]]), history)
    unread = [number for each in info for number in each["unreadable"]]
    if unread and forfeits:
        won = -1 if min(unread) % 2 == 0 else 1
    members = []
    for number, name in enumerate(SEATS):
        own = [(before, move) for seat, before, move in game if seat == number]
        first = number == deal.first
        count = len(info[number]["unreadable"])
        metrics = {"unreadable_moves": float(count), "acts_first": float(first)}
        # One reply that could not be read clouds the whole seat: which move it meant is not known.
        metrics |= {} if count else facts(deal.cards[name], own)
        members.append(MemberScore(member=name, reward=float(won if first else -won), metrics=metrics))
    shown = float(history[-1] != FOLD)
    return EpisodeScore(members=tuple(members), metrics={"showdown": shown, "num_moves": float(len(game))})
