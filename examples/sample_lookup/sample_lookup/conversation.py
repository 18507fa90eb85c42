"""One episode: the model's turns and the tool's results, and a user who reminds where neither led anywhere."""

import verifiers.v1 as vf

from sample_lookup.chains import REMINDER, answered


class LookupEnvConfig(vf.EnvConfig):
    """The one seat; the user is a script, whose settings are the taskset's."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """The policy."""


class LookupEnv(vf.Env[LookupEnvConfig]):
    """The model calls the tool until it answers; a reply that does neither is met with a reminder, once."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Let the model reply; remind it where a reply ends its turn without an answer."""
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            if not said.terminated and not answered(said.last_reply):
                await talk.turn(REMINDER)
