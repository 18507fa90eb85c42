"""Where a rollout is: the state that verifiers carries between the tool server and the taskset, one per rollout."""

from collections.abc import Sequence

import verifiers.v1 as vf
from pydantic import Field

from sample_wikispeedia.graph import Graph, page

CLICK, BACK = "click_link", "go_back"


class Walk(vf.State):
    """The pages of one rollout."""

    path: list[str] = Field(default_factory=list)
    """From the start to the page that is open; going back takes the last one away."""
    trail: list[str] = Field(default_factory=list)
    """Every page that was opened, in order, the start and pages that were gone back to among them."""

    def begin(self, topic: str) -> None:
        """Open the page where the walk starts."""
        self.path, self.trail = [topic], [topic]

    def click(self, links: Graph, topic: str) -> str:
        """Follow a link of the open page; return the new page, or what stands in the way."""
        if topic not in links[self.path[-1]]:
            return f"no link {topic!r}; {page(links, self.path[-1])}"
        self.path = [*self.path, topic]
        return self._opened(links)

    def back(self, links: Graph) -> str:
        """Return to the page before; return it, or what stands in the way."""
        if len(self.path) == 1:
            return f"nothing to go back to; {page(links, self.path[-1])}"
        self.path = self.path[:-1]
        return self._opened(links)

    def _opened(self, links: Graph) -> str:
        self.trail = [*self.trail, self.path[-1]]
        return page(links, self.path[-1])


def efficiency(trail: Sequence[str], target: str, distance: int) -> float:
    """The fewest moves over the moves made, where the target was reached; else 0. Going back is a move."""
    return distance / (len(trail) - 1) if trail and trail[-1] == target else 0.0
