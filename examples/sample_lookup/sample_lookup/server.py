"""The store as a tool server: verifiers starts this module as a process, once for each environment worker."""

import verifiers.v1 as vf
from verifiers.v1.mcp import SharedToolsetConfig

from sample_lookup.chains import chains, store


class StoreConfig(SharedToolsetConfig):
    """What the taskset says of its chains: the same settings, the same store."""

    num_examples: int
    num_hops: int
    seed: int


class LookupServer(vf.Toolset[StoreConfig]):
    """Finds entries by name."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        """Make the store."""
        each = self.config
        self._entries = store(chains(each.num_examples, each.num_hops, each.seed))

    @vf.tool
    def lookup(self, name: str) -> str:
        """Say what is under a name."""
        return self._entries.get(name, "nothing")


if __name__ == "__main__":
    LookupServer.run()
