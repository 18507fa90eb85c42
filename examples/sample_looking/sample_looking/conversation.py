"""One episode: the user shows pictures one after the other, or the model looks at them with a tool."""

import verifiers.v1 as vf


class LookingEnvConfig(vf.EnvConfig):
    """The one seat; the user is a script, whose settings are the taskset's."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """The policy."""


class LookingEnv(vf.Env[LookingEnvConfig]):
    """The user shows the next picture whatever was said of the last: only a limit ends the conversation before."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Let the model answer each turn of the user."""
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for message in task.data.later:
                if said.terminated:
                    return
                said = await talk.turn([message])
