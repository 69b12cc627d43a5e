"""From sampled tokens to each client's messages.

The text of all tokens of one applied step is made in one job, in order, and goes to the requests'
streams. A stream never blocks whoever fills it: what its client has not taken yet is merged, sequence
by sequence.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from scheduler_service.core.plan import PromptLogprobs, TokenEvent
from scheduler_service.core.request import FinishReason
from scheduler_service.core.request import Sequence as SchedulerSequence
from scheduler_service.engine.detokenize import SequenceDecoder
from scheduler_service.engine.stop import StopFinder
from scheduler_service.engine.values import Output
from stepwire.rpc.errors import StepwireError

MAX_MERGED_TOKENS = 512
# Tokens of a sequence that a client may have wait for each other.
MAX_STREAM_INTERVAL = MAX_MERGED_TOKENS
# What a client may leave untaken: as many tokens, or a 24th of it with log-probabilities, which are that much larger.
MAX_BACKLOG = 250_000
LOGPROBS_COST = 24
# In columns they are smaller: at most 21 numbers of ids and as many of values for a position.
_PROMPT_COST = 5

_log = structlog.stdlib.get_logger(__name__)


class OutputStream:
    """The messages of one request that its client has not taken yet. Used on the event loop alone."""

    __slots__ = (
        "_backlog",
        "_begun",
        "_error",
        "_growing",
        "_held",
        "_interval",
        "_is_ended",
        "_items",
        "_num_unscored",
        "_tails",
        "_waiter",
    )

    def __init__(self, num_scored: int = 0, *, interval: int = 1) -> None:
        """With `num_scored` prompt tokens to tell of before the first output; messages after the first of a sequence
        have at least `interval` tokens, unless they are its last."""
        self._interval = interval
        self._begun: set[int] = set()
        self._growing: dict[int, Output] = {}
        self._backlog = 0
        self._items: deque[Output | PromptLogprobs] = deque()
        self._num_unscored = num_scored
        self._held: list[Output] = []
        self._tails: dict[int, Output] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._is_ended = False
        self._error: StepwireError | None = None

    @property
    def is_overfull(self) -> bool:
        """Whether more waits here than a client may leave untaken."""
        return self._backlog > MAX_BACKLOG

    def put(self, output: Output) -> None:
        """Adds a message, or merges it into the last one of its sequence if that has not been taken."""
        index = output.sequence_index
        if (growing := self._growing.get(index)) is not None:
            merge_output(growing, output)
            if self._may_go(growing):
                self._add(self._growing.pop(index))
            return
        tail = self._tails.get(index)
        if tail is not None and len(tail.token_ids) < MAX_MERGED_TOKENS:
            self._backlog += cost(output)
            merge_output(tail, output)
        elif self._may_go(output):
            self._add(output)
        else:
            self._growing[index] = output

    def _may_go(self, output: Output) -> bool:
        if len(output.token_ids) >= self._interval or output.finish_reason is not None:
            return True
        return output.sequence_index not in self._begun

    def _add(self, output: Output) -> None:
        self._backlog += cost(output)
        (self._held if self._num_unscored else self._items).append(output)
        self._tails[output.sequence_index] = output
        if self._interval > 1:
            self._begun.add(output.sequence_index)
        self._wake()

    def put_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Adds a part of the prompt's log-probabilities. Other sequences may be ahead of it, after a recovery: what
        they brought follows the last part."""
        self._backlog += cost(part)
        self._items.append(part)
        self._num_unscored -= part.num
        if self._num_unscored <= 0:
            self._items += self._held
            self._held.clear()
        self._wake()

    def end(self, error: StepwireError | None = None) -> None:
        """No more messages come: `get` answers None, or raises the error, after those that are there."""
        if not self._is_ended:
            self._is_ended = True
            self._error = error
            for output in self._growing.values():
                self._add(output)
            self._growing.clear()
            self._wake()

    async def get(self) -> Output | PromptLogprobs | None:
        """The next message; None after the last. Raises the error that the stream ended with."""
        while not self._items:
            if self._is_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        self._backlog -= cost(item)
        if isinstance(item, Output) and self._tails.get(item.sequence_index) is item:
            del self._tails[item.sequence_index]
        return item

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def cost(output: Output | PromptLogprobs) -> int:
    """What a message counts of MAX_BACKLOG."""
    if isinstance(output, PromptLogprobs):
        return _PROMPT_COST * output.num
    return len(output.token_ids) + LOGPROBS_COST * len(output.logprobs)


def merge_output(tail: Output, output: Output) -> None:
    """Adds to a message the one after it, of the same sequence."""
    tail.token_ids += output.token_ids
    tail.text += output.text
    tail.logprobs += output.logprobs
    tail.finish_reason = output.finish_reason
    tail.stop = output.stop
    tail.stop_token_id = output.stop_token_id


class SequenceText:
    """The text of one sequence. After its creation only the text thread touches it, but for `sequence`.

    `sequence` is the scheduler's record: the thread never looks into it.
    """

    __slots__ = ("_decoder", "_finder", "_is_ended", "sequence")

    def __init__(self, sequence: SchedulerSequence, decoder: SequenceDecoder, finder: StopFinder | None) -> None:
        self.sequence = sequence
        self._decoder = decoder
        self._finder = finder
        self._is_ended = False

    def take(self, event: TokenEvent) -> Output | None:
        """The message for one token; None when the text has ended before it, by a stop string."""
        if self._is_ended:
            return None
        sequence, token_id, position, logprobs, reason = event
        logprobs_list = [] if logprobs is None else [logprobs]
        if reason is FinishReason.STOP:
            # The token that ends a sequence is reported, but is no part of its text.
            text, found = self._decoder.flush(), None
        else:
            text, found = self._decoder.feed(token_id), None
            if reason is not None:
                text += self._decoder.flush()
        if self._finder is not None:
            text, found = self._finder.feed(text, position + 1)
            if found is None and reason is not None:
                text += self._finder.flush()
        output = Output(sequence.index, position, [token_id], text, logprobs_list, reason)
        if found is not None:
            output.finish_reason, output.stop = FinishReason.STOP, found
        elif reason is FinishReason.STOP:
            output.stop_token_id = token_id
        self._is_ended = output.finish_reason is not None
        return output


Work = tuple[SequenceText, TokenEvent | PromptLogprobs | StepwireError]
Delivery = tuple[SequenceText, Output | PromptLogprobs | StepwireError]


class TextPipeline:
    """Makes text of tokens in the order of the submits; delivers on the event loop.

    With `inline` it does so at once, on the event loop: right for decoders that take about a
    microsecond for a token, where a thread costs more, in handing the interpreter to and fro, than
    the text. Otherwise one thread does it.
    """

    def __init__(self, deliver: Callable[[list[Delivery]], None], *, inline: bool = False) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._thread = None if inline else ThreadPoolExecutor(1, thread_name_prefix="text")

    def submit(self, work: Sequence[Work]) -> None:
        """Takes the tokens of one step; `deliver` is called with their messages, once: now or later."""
        if self._thread is None:
            self._deliver(_make_texts(work))
        else:
            self._thread.submit(self._run, work)

    async def flush(self) -> None:
        """Waits until all that was submitted is delivered."""
        if self._thread is not None:
            # It comes by the event loop, as deliveries do, and after them.
            await asyncio.wrap_future(self._thread.submit(lambda: None))

    def close(self) -> None:
        """Lets the thread end; waits for nothing."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: Sequence[Work]) -> None:
        deliveries = _make_texts(work)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, deliveries)


def _make_texts(work: Sequence[Work]) -> list[Delivery]:
    """The messages of one step's tokens."""
    deliveries: list[Delivery] = []
    for text, event in work:
        if not isinstance(event, TokenEvent):
            deliveries.append((text, event))
            continue
        try:
            output = text.take(event)
        except BaseException:  # a panic of the tokenizers library is no Exception
            _log.exception("text_failed", request_id=event.sequence.request.request_id)
            error = StepwireError("INTERNAL", "the text of this request could not be made; the log says why")
            deliveries.append((text, error))
        else:
            if output is not None:
                deliveries.append((text, output))
    return deliveries
