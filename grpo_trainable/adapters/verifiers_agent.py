"""The policy as a `verifiers` agent that replies directly, without a harness or a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpo_trainable.adapters.dialogue import Ask

ONE_CONVERSATION = "an episode must be a single conversation, in which the policy is the only agent"


async def played(vf: Any, env: Any, task: Any, ask: Ask) -> Any:
    """Let the policy play every agent in an episode of `env`, and return the episode's trace.

    Args:
        vf: The module `verifiers.v1`.
        env: The environment.
        task: Task of the taskset.
        ask: Sends a message to the policy and returns the reply.

    Raises:
        ValueError: If the episode is not exactly one conversation with the policy, or if the
            environment or the task uses a feature that this adapter does not support.
    """
    traces: list[Any] = []
    refuse(type(env), shared_parts(vf, env))
    agents = vf.Agents(env.config, lambda name, config: PolicyAgent(vf, name, config, ask, traces))
    episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=recorded(vf, task))
    await env.setup(agents)
    await env.run(task, agents)
    if not traces:
        raise ValueError(ONE_CONVERSATION)
    episode.traces += traces
    await env.finalize(task, episode)
    return traces[0]


class PolicyAgent:
    """The policy in the role of an agent, `agents.NAME` in `Env.run`."""

    def __init__(self, vf: Any, name: str, config: Any, ask: Ask, traces: list[Any]) -> None:
        """Prepare an agent.

        Args:
            vf: The module `verifiers.v1`.
            name: Name of the agent.
            config: Config of the agent. Only its `max_turns` is read.
            ask: Sends a message to the policy and returns the reply.
            traces: List to which the trace of each conversation is appended.
        """
        self._vf, self._name, self._config, self._ask = vf, name, config, ask
        self._traces = traces
        self.trainable = True

    async def run(self, task: Any, **_: Any) -> Any:
        """Let the policy reply once to a task's prompt, and return the scored trace."""
        async with self.interaction(task) as conversation:
            await conversation.turn()
        return conversation.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[Conversation]:
        """Open a conversation about a task. Leaving the context scores the conversation.

        Raises:
            ValueError: If the task uses a feature that this adapter does not support, or if this is
                not the first conversation.
        """
        refuse(type(task), parts_of_a_harness(self._vf, task))
        if self._traces:
            raise ValueError(ONE_CONVERSATION)
        conversation = Conversation(self._vf, task, self._name, self._config, self._ask)
        self._traces.append(conversation.trace)
        yield conversation
        conversation.trace.stop("user_closed")
        conversation.trace.ok = True
        await task.score(conversation.trace)


class Conversation:
    """A conversation with the policy, opened by `agents.NAME.interaction(task)`.

    Each turn sends a message to the policy and waits for the reply.
    """

    def __init__(self, vf: Any, task: Any, name: str, config: Any, ask: Ask) -> None:
        self._vf, self._ask, self._most_turns = vf, ask, config.max_turns
        self.trace: Any = vf.Trace(
            task=recorded(vf, task), agent=vf.AgentInfo(config=config, name=name)
        )
        self._unread = [(vf.SystemMessage, task.data.system_prompt)]
        self._unread.append((vf.UserMessage, task.data.prompt_text))

    async def turn(self, message: Any = None) -> Any:
        """Return the policy's reply as a `Segment`, or a terminated `Segment` after `max_turns`."""
        if self._most_turns is not None and self.trace.num_turns >= self._most_turns:
            self.trace.stop("max_turns")
            return self._vf.Segment(messages=[], terminated=True)
        unread = [*self._unread, (self._vf.UserMessage, self._text_of(message))]
        self._unread = []
        said = [(kind, text) for kind, text in unread if text]
        for kind, text in said:
            self._note(kind(content=text), sampled=False)
        reply = await self._ask("".join(f"{text}\n" for _, text in said))
        answer = self._vf.AssistantMessage(content=reply)
        self._note(answer, sampled=True)
        return self._vf.Segment(messages=[answer], root_reply=reply)

    def _text_of(self, message: Any) -> str:
        if isinstance(message, str):
            return message
        return "\n".join(self._vf.types.content_text(part.content) for part in message or ())

    def _note(self, message: Any, sampled: bool) -> None:
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(self._vf.MessageNode(message=message, parent=parent, sampled=sampled))


def recorded(vf: Any, task: Any) -> Any:
    """Convert a task to the form in which traces and episodes record it."""
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def refuse(kind: type, needed: list[str]) -> None:
    """Reject a class that uses features that this adapter does not support.

    Raises:
        ValueError: If `needed` is not empty.
    """
    if needed:
        raise ValueError(
            f"{kind.__name__} uses features that this adapter does not support: {', '.join(needed)}"
        )


def parts_of_a_harness(vf: Any, task: Any) -> list[str]:
    """Return the task's features that need a harness and its runtime."""
    kind = type(task)
    found = [
        part for part in ("setup", "finalize") if getattr(kind, part) != getattr(vf.Task, part)
    ]
    found += ["a container"] if kind.NEEDS_CONTAINER else []
    found += ["tools"] if kind.toolsets(task.config) else []
    marks = ("stop", "intercept")
    return found + [f"@{m}" for m in marks if vf.utils.decorators.discover_decorated(task, m)]


def shared_parts(vf: Any, env: Any) -> list[str]:
    """Return the environment's features that all episodes on a server would share."""
    found = ["start"] if type(env).start != vf.Env.start else []
    return found + (["tools"] if env.taskset.toolsets(env.taskset.config) else [])
