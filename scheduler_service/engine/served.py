"""What is known of the model that an engine serves, and its text side."""

from dataclasses import dataclass

from scheduler_service.engine.grammars import GrammarChecker
from scheduler_service.engine.template import ChatTemplate
from scheduler_service.engine.tokens import Tokens
from scheduler_service.engine.values import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from stepwire.rpc.errors import StepwireError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's facts and its text side.

    `max_draft_tokens` is for requests that say nothing of speculation.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokens: Tokens
    template: ChatTemplate | None
    grammars: GrammarChecker
    max_draft_tokens: int = 0

    async def token_ids(self, prompt: Prompt | None) -> list[int]:
        """The token ids of a prompt. Raises StepwireError for one that cannot be had."""
        if isinstance(prompt, TokenPrompt):
            self.tokens.check_ids(prompt.token_ids, "token_ids")
            return list(prompt.token_ids)
        if isinstance(prompt, TextPrompt):
            return await self.tokens.encode(prompt.text, add_special_tokens=True)
        if isinstance(prompt, ChatPrompt):
            if self.template is None:
                raise StepwireError(
                    "CHAT_TEMPLATE_MISSING",
                    "the checkpoint has no chat template; send text or token_ids instead of messages",
                )
            text = await self.template.render(prompt.messages)
            # The template writes the special tokens itself.
            return await self.tokens.encode(text, add_special_tokens=False)
        raise StepwireError("FIELD_INVALID", "the prompt is missing", {"field": "prompt"})

    async def close(self) -> None:
        """Ends threads and processes of the text side."""
        self.tokens.close()
        await self.grammars.close()
        if self.template is not None:
            await self.template.close()
