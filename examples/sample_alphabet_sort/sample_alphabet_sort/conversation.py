"""One episode: the user gives names, the model sorts them, and the user adds more."""

import verifiers.v1 as vf

from sample_alphabet_sort.lists import asked


class AlphabetSortEnvConfig(vf.EnvConfig):
    """The one seat; the user is a script, whose settings are the taskset's."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """The policy."""


class AlphabetSortEnv(vf.Env[AlphabetSortEnvConfig]):
    """The user says all turns of the task, whatever the replies: only a limit ends the conversation before."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Let the model answer each turn of the user."""
        tag = self.taskset.config.task.tag
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for names in task.data.turns[1:]:
                if said.terminated:
                    return
                said = await talk.turn(asked(names, tag, first=False))
