"""The section of a config that says who gets a message when something happens to a run; in no key."""

from typing import Literal

from configs.fields import Section, operational

About = Literal["failed", "gate", "warning", "finished"]


class AlertConfig(Section):
    """Somebody who gets messages: by a service that a variable names, or by a command."""

    variable: str = operational("")
    """Environment variable that holds the address, which is a secret: a URL of Apprise, of Slack, Mattermost, e-mail
    and others; docs/alerts.md has examples."""
    command: tuple[str, ...] = operational(())
    """In place of `variable` a program on the run's machine, with its arguments. Its standard input is JSON with run,
    store, about and text."""
    on: tuple[About, ...] = operational(("failed", "gate", "warning", "finished"))
    """failed: the run ended by an error or a refused batch. gate: a batch waits for a person. warning: a rule over
    figures or replies began to hold. finished: the run has all its steps."""

    @property
    def receiver(self) -> str:
        """Who gets the messages, without a secret."""
        return self.variable or " ".join(self.command)
