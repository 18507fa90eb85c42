"""The pages as a tool server: verifiers starts this module as a process, once for each environment worker.

One server serves all rollouts of its worker. Where each of them is comes and goes with the call, as its state.
"""

import verifiers.v1 as vf
from verifiers.v1.mcp import SharedToolsetConfig

from sample_wikispeedia.graph import graph
from sample_wikispeedia.walk import BACK, CLICK, Walk


class PagesConfig(SharedToolsetConfig):
    """What the taskset says of its graph: the same settings, the same graph."""

    num_topics: int | None


class PagesServer(vf.Toolset[PagesConfig, Walk]):
    """Opens pages."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        """Make the graph."""
        self._links = graph(self.config.num_topics)

    @vf.tool(name=CLICK)
    def click_link(self, page: str) -> str:
        """Follow a link."""
        return self.state.click(self._links, page)

    @vf.tool(name=BACK)
    def go_back(self) -> str:
        """Return to the page before."""
        return self.state.back(self._links)


if __name__ == "__main__":
    PagesServer.run()
