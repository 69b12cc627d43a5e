"""Chat templates: messages to prompt text, by processes that can be killed.

A template comes with the checkpoint and messages come from clients; together they may raise, never
end, or fill the memory. Each of these costs the one request an error, and the process its life.
"""

from collections.abc import Mapping, Sequence

from scheduler_service.engine.helpers import HelperDied, Helpers, HelperTimeout
from scheduler_service.engine.values import ChatMessage
from stepwire.rpc.errors import StepwireError

_MODULE = "scheduler_service.engine.template_process"


class ChatTemplate:
    """Renders one checkpoint's template, in up to `num_processes` processes started as needed."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        time_limit_s: float = 5.0,
        max_characters: int = 1 << 24,
        num_processes: int = 2,
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._max_characters = max_characters
        self._helpers = Helpers(_MODULE, time_limit_s=time_limit_s, num_processes=num_processes)

    async def start(self) -> None:
        """Starts one process ahead of the first request."""
        await self._helpers.start()

    async def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt's text, with the header of the assistant's turn. Raises CHAT_TEMPLATE_FAILED."""
        variables = {
            **self._special_tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        request = {"template": self._source, "variables": variables, "max_characters": self._max_characters}
        try:
            answer = await self._helpers.ask(request)
        except HelperTimeout:
            raise _failed(f"ran longer than {self._helpers.time_limit_s:g} s") from None
        except HelperDied:
            raise _failed("killed the process that rendered it") from None
        if "error" in answer:
            raise _failed(f"refused these messages: {answer['error']}")
        text: str = answer["text"]
        return text

    async def close(self) -> None:
        """Kills the processes and waits for their end."""
        await self._helpers.close()


def _failed(what: str) -> StepwireError:
    return StepwireError("CHAT_TEMPLATE_FAILED", f"the checkpoint's chat template {what}", {"cause": what})
