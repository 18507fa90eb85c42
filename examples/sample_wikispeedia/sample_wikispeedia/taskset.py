"""The taskset that verifiers loads under the id `sample_wikispeedia`."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from sample_wikispeedia.graph import graph, prompt, trips
from sample_wikispeedia.named import NamedPagesServer
from sample_wikispeedia.server import PagesConfig, PagesServer
from sample_wikispeedia.walk import Walk, efficiency


class WikispeediaData(vf.TaskData):
    """One trip; the prompt shows the page where it starts."""

    start: str
    """The topic to start from."""
    target: str
    """The topic to reach."""
    distance: int
    """The fewest clicks from one to the other."""


class WikispeediaTask(vf.Task[WikispeediaData, Walk]):
    """Scores where a walk ended and how long it was."""

    @property
    def key(self) -> str:
        """Start and target tell a trip from all others, whatever its place in the list."""
        return f"{self.data.start} to {self.data.target}"

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Open the page where the walk starts: the tools find it in the rollout's state."""
        trace.state.begin(self.data.start)

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Write the walk into the record: the state is gone with the rollout."""
        trace.info["trail"] = list(trace.state.trail)

    @vf.stop
    async def arrived(self, trace: vf.Trace) -> bool:
        """The rollout is over on the page that was asked for."""
        return bool(trace.state.trail) and trace.state.trail[-1] == self.data.target

    @vf.reward(weight=0.5)
    async def success(self, task: WikispeediaData, trace: vf.Trace) -> float:
        """1 where the walk ended on the page that was asked for, else 0."""
        return float(efficiency(trace.state.trail, task.target, task.distance) > 0)

    @vf.reward(weight=0.5)
    async def efficiency(self, task: WikispeediaData, trace: vf.Trace) -> float:
        """The fewest moves over the moves made, where the walk ended there; else 0."""
        return efficiency(trace.state.trail, task.target, task.distance)

    @vf.metric
    async def num_moves(self, task: WikispeediaData, trace: vf.Trace) -> float:
        """Pages that were opened, those gone back to among them."""
        return float(len(trace.state.trail) - 1)


class WikispeediaConfig(vf.TasksetConfig):
    """Which trips there are."""

    num_examples: int | None = Field(None, ge=1)
    """Trips; null is all that there are. All differ."""
    num_topics: int | None = Field(None, ge=2)
    """Topics of the graph, drawn from the 46 that the package ships; null is all of them."""
    min_distance: int = Field(1, ge=1)
    """Fewest clicks from start to target."""
    max_distance: int = Field(3, ge=1)
    """Most clicks from start to target."""
    seed: int = 0
    """Another seed, another order of the trips."""
    named_tools: bool = False
    """Whether the names of the tools begin with `pages_`: the harness `rlm` takes no tool server without a name."""


class WikispeediaTaskset(vf.Taskset[WikispeediaTask, WikispeediaConfig]):
    """Trips through the graph."""

    def load(self) -> Iterator[WikispeediaTask]:
        """Yield one task for each trip. Raises ValueError where the settings leave too few."""
        each = self.config
        links = graph(each.num_topics)
        for trip in trips(each.num_examples, links, each.min_distance, each.max_distance, each.seed):
            data = WikispeediaData(
                prompt=prompt(links, trip), start=trip.start, target=trip.target, distance=trip.distance
            )
            yield WikispeediaTask(data, each.task)

    @classmethod
    def toolsets(cls, config: WikispeediaConfig) -> list[vf.Toolset]:
        """One server of the pages for all rollouts of an environment worker."""
        server = NamedPagesServer if config.named_tools else PagesServer
        return [server(PagesConfig(num_topics=config.num_topics))]
