"""The calculator as a tool server: verifiers starts this module as a process, once for each environment worker."""

import verifiers.v1 as vf
from verifiers.v1.mcp import SharedToolsetConfig

from sample_calc_tools.sums import calculated


class CalcServer(vf.Toolset[SharedToolsetConfig]):
    """Works out one operation; it remembers nothing, so that all rollouts of a worker may share it."""

    TOOL_PREFIX = None

    @vf.tool
    def calc(self, expression: str) -> str:
        """Work out one operation."""
        return calculated(expression)


if __name__ == "__main__":
    CalcServer.run()
