"""Generate over real gRPC, with a fake worker that checks every step."""

import asyncio

import grpc
import pytest

from stepwire.rpc.channel import create_channel
from stepwire.rpc.errors import from_rpc_error
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.fake_worker import expected_tokens, letter_ids
from tests.support.scheduler_server import MODEL, last_output, running_scheduler, text_of, tokens_of, until
from tests.support.tiny_checkpoint import EOS_TOKEN_ID


async def test_a_stream_has_started_then_each_token_then_finished() -> None:
    async with running_scheduler() as scheduler:
        prompt = [10, 11, 12]
        responses = await scheduler.generate(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(max_tokens=20, seed=7),
            request_id="r1",
        )
        assert responses[0].started == pb.GenerateStarted(request_id="r1", seed=7, model=MODEL, prompt_token_count=3)
        expected = expected_tokens(prompt, 20, letter_ids(scheduler.tokenizer), seed=7)
        assert tokens_of(responses) == expected
        assert text_of(responses) == scheduler.tokenizer.decode(expected)
        positions = [(r.output.position, len(r.output.token_ids)) for r in responses[1:-1]]
        assert [start for start, _ in positions] == [sum(n for _, n in positions[:i]) for i in range(len(positions))]
        assert last_output(responses).finish_reason == pb.FINISH_REASON_LENGTH
        assert responses[-1].finished.usage == pb.Usage(prompt_token_count=3, output_token_count=20)


async def test_text_prompts_and_messages_become_the_tokens_that_tokenize_answers() -> None:
    async with running_scheduler() as scheduler:
        text = await scheduler.stub.Tokenize(pb.TokenizeRequest(text="hello"), timeout=5)
        assert list(text.token_ids) == scheduler.tokenizer.encode("hello").ids
        messages = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        chat = await scheduler.stub.Tokenize(pb.TokenizeRequest(messages=messages), timeout=5)
        rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert list(chat.token_ids) == scheduler.tokenizer.encode(rendered, add_special_tokens=False).ids
        sampling = pb.SamplingParams(max_tokens=1, seed=1)
        responses = await scheduler.generate(messages=messages, sampling=sampling)
        assert responses[0].started.prompt_token_count == len(chat.token_ids)
        (new,) = scheduler.worker.steps[0].new_sequences
        assert list(new.token_ids) == list(chat.token_ids)


async def test_detokenize_answers_text_with_or_without_special_tokens() -> None:
    async with running_scheduler() as scheduler:
        ids = [EOS_TOKEN_ID, *scheduler.tokenizer.encode("hello").ids]
        plain = await scheduler.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=5)
        assert plain.text == "hello"
        request = pb.DetokenizeRequest(token_ids=ids, keep_special_tokens=True)
        assert (await scheduler.stub.Detokenize(request, timeout=5)).text == "<|im_end|>hello"


async def test_speculation_is_asked_of_the_worker_and_changes_no_token() -> None:
    async with running_scheduler() as scheduler:
        asked = {
            "default": pb.Speculation(),
            "some": pb.Speculation(max_draft_tokens=3),
            "none": pb.Speculation(max_draft_tokens=0),
            "unsaid": None,
        }
        sampling = pb.SamplingParams(max_tokens=12, seed=5)
        for request_id, speculation in asked.items():
            responses = await scheduler.generate(
                text="hello", request_id=request_id, sampling=sampling, speculation=speculation
            )
            prompt = scheduler.tokenizer.encode("hello").ids
            assert tokens_of(responses) == expected_tokens(prompt, 12, letter_ids(scheduler.tokenizer), seed=5)
        most = dict.fromkeys(asked, 0)
        limits: dict[str, int] = {}
        request_of: dict[int, str] = {}
        for step in scheduler.worker.steps:
            request_of |= {new.sequence_id: new.request_id for new in step.new_sequences}
            limits |= {new.request_id: new.token_limit for new in step.new_sequences}
            for sequence_id, num in zip(step.sequence_ids, step.draft_token_counts, strict=False):
                most[request_of[sequence_id]] = max(most[request_of[sequence_id]], num)
        assert most == {"default": 7, "some": 3, "none": 0, "unsaid": 0}
        limit = len(prompt) + 12
        assert limits == {"default": limit, "some": limit, "none": 0, "unsaid": 0}


@pytest.mark.parametrize("interval", [1, 4, 512])
async def test_messages_hold_as_many_tokens_as_are_asked_for(interval: int) -> None:
    async with running_scheduler() as scheduler:
        responses = await scheduler.generate(
            text="hello", sampling=pb.SamplingParams(max_tokens=10, seed=5), stream_interval=interval
        )
        outputs = [response.output for response in responses if response.HasField("output")]
        sizes = [len(output.token_ids) for output in outputs]
        assert all(size >= interval for size in sizes[1:-1]) and len(sizes) <= 2 + 9 // interval
        prompt = scheduler.tokenizer.encode("hello").ids
        assert tokens_of(responses) == expected_tokens(prompt, 10, letter_ids(scheduler.tokenizer), seed=5)


async def test_n_sequences_have_their_own_tokens_and_indexes() -> None:
    async with running_scheduler() as scheduler:
        prompt = list(range(10, 50))
        responses = await scheduler.generate(
            token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(max_tokens=9, seed=3, n=5)
        )
        for index in range(5):
            expected = expected_tokens(prompt, 9, letter_ids(scheduler.tokenizer), seed=3, index=index)
            assert tokens_of(responses, index) == expected
        assert responses[-1].finished.usage.output_token_count == 45


async def test_an_end_token_ends_the_sequence_and_is_no_text() -> None:
    async with running_scheduler() as scheduler:
        ids = scheduler.tokenizer.encode("hello").ids
        scheduler.worker.scripts["r1"] = [*ids, EOS_TOKEN_ID]
        responses = await scheduler.generate(text="x", request_id="r1")
        assert text_of(responses) == "hello"
        output = last_output(responses)
        assert (output.finish_reason, output.stop_token_id) == (pb.FINISH_REASON_STOP, EOS_TOKEN_ID)
        assert tokens_of(responses) == [*ids, EOS_TOKEN_ID]


async def test_ignore_eos_goes_on() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.scripts["r1"] = [EOS_TOKEN_ID]
        sampling = pb.SamplingParams(max_tokens=5, ignore_eos=True)
        responses = await scheduler.generate(text="x", request_id="r1", sampling=sampling)
        assert len(tokens_of(responses)) == 5
        assert last_output(responses).finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_stop_string_across_tokens_ends_the_sequence_before_it() -> None:
    async with running_scheduler() as scheduler:
        letters = [scheduler.tokenizer.token_to_id(letter) for letter in "thecatsatonthemat"]
        scheduler.worker.scripts["r1"] = letters
        sampling = pb.SamplingParams(stop=["tsa", "zzz"], max_tokens=200)
        responses = await scheduler.generate(text="x", request_id="r1", sampling=sampling)
        assert text_of(responses) == "theca"
        output = last_output(responses)
        assert (output.finish_reason, output.stop) == (pb.FINISH_REASON_STOP, "tsa")
        assert tokens_of(responses) == letters[:8]
        assert responses[-1].finished.usage.output_token_count == 8
        await until(lambda: not scheduler.worker.sequences)
        assert len(scheduler.worker.steps) < 30


async def test_held_back_text_is_delivered_at_the_end() -> None:
    async with running_scheduler() as scheduler:
        scheduler.worker.scripts["r1"] = [scheduler.tokenizer.token_to_id(letter) for letter in "abc"]
        sampling = pb.SamplingParams(stop=["bcd"], max_tokens=3)
        assert text_of(await scheduler.generate(text="x", request_id="r1", sampling=sampling)) == "abc"


async def test_split_characters_come_whole() -> None:
    async with running_scheduler() as scheduler:
        ids = scheduler.tokenizer.encode("añ😀é").ids
        scheduler.worker.scripts["r1"] = ids
        sampling = pb.SamplingParams(max_tokens=len(ids))
        responses = await scheduler.generate(text="x", request_id="r1", sampling=sampling)
        assert text_of(responses) == "añ😀é"
        assert not any("\ufffd" in r.output.text for r in responses)


async def test_logprobs_come_with_each_token() -> None:
    async with running_scheduler() as scheduler:
        sampling = pb.SamplingParams(max_tokens=4, logprobs=2)
        responses = await scheduler.generate(text="x", sampling=sampling)
        logprobs = [entry for r in responses for entry in r.output.logprobs]
        assert [entry.sampled.token_id for entry in logprobs] == tokens_of(responses)
        assert all(len(entry.top) == 2 for entry in logprobs)


async def test_a_repeated_prompt_reports_its_cached_tokens() -> None:
    async with running_scheduler() as scheduler:
        fields = {"token_ids": pb.TokenIds(ids=list(range(10, 50))), "sampling": pb.SamplingParams(max_tokens=2)}
        assert (await scheduler.generate(**fields))[-1].finished.usage.cached_token_count == 0
        assert (await scheduler.generate(**fields))[-1].finished.usage.cached_token_count == 32


async def test_32_streams_of_all_kinds_each_end_once_and_leave_every_block_free() -> None:
    # 40 blocks for 8 sequences at a time: prompts are chunked, wait and are preempted.
    async with running_scheduler(num_blocks=40, max_model_len=256) as scheduler:
        free = scheduler.free_blocks()

        async def one(i: int) -> None:
            prompt = [10 + (i + j) % 200 for j in range(1 + 5 * i)]
            num = 3 + (7 * i) % 60
            n = 2 if i % 5 == 0 else 1
            sampling = pb.SamplingParams(max_tokens=num, seed=i, n=n, temperature=i / 10, min_tokens=i % 3)
            responses = await scheduler.generate(timeout=60, token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
            assert sum(r.HasField("finished") for r in responses) == 1
            for index in range(n):
                expected = expected_tokens(prompt, num, letter_ids(scheduler.tokenizer), seed=i, index=index)
                assert tokens_of(responses, index) == expected

        await asyncio.gather(*(one(i) for i in range(32)))
        await until(lambda: not scheduler.worker.sequences)
        assert scheduler.free_blocks() == free
        assert any(step.preempted_sequence_ids for step in scheduler.worker.steps)


async def test_a_slow_client_gets_merged_messages_and_delays_nobody() -> None:
    async with running_scheduler() as scheduler:
        # More than what gRPC takes in for a client that does not read.
        sampling = pb.SamplingParams(max_tokens=500, seed=1, logprobs=20, n=7)
        request = pb.GenerateRequest(text="x", sampling=sampling)
        call = scheduler.stub.Generate(request, timeout=30)
        first = await call.read()
        assert first.HasField("started")
        others = await scheduler.generate(text="y", sampling=pb.SamplingParams(max_tokens=500))
        assert len(tokens_of(others)) == 500
        await until(lambda: not scheduler.worker.sequences)
        responses = []
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
        outputs = [response.output for response in responses if response.HasField("output")]
        assert len(outputs) < 7 * 500
        for index in range(7):
            own = [output for output in outputs if output.sequence_index == index]
            assert sum(len(output.token_ids) for output in own) == 500
            assert sum(len(output.logprobs) for output in own) == 500
            assert [o.position for o in own] == [sum(len(o.token_ids) for o in own[:i]) for i in range(len(own))]


async def test_a_client_that_does_not_read_is_ended_before_its_output_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Less than what one step brings, so that no client is fast enough.
    monkeypatch.setattr("scheduler_service.engine.output.MAX_BACKLOG", 100)
    async with running_scheduler() as scheduler:
        free = scheduler.free_blocks()
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=500, seed=1, logprobs=20, n=16))
        call = scheduler.stub.Generate(request, timeout=60)
        assert (await call.read()).HasField("started")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(caught.value).reason == "CLIENT_TOO_SLOW"
        await until(lambda: scheduler.free_blocks() == free and not scheduler.worker.sequences)


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_a_dropped_stream_frees_its_blocks_with_the_next_step(how: str) -> None:
    async with running_scheduler() as scheduler:
        free = scheduler.free_blocks()
        channel = create_channel(scheduler.address, max_message_bytes=1 << 20)
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(n=2))
        call = InferenceServiceStub(channel).Generate(request, timeout=60)
        while not (await call.read()).HasField("output"):
            pass
        scheduler.worker.gate.clear()
        assert scheduler.free_blocks() < free
        if how == "cancel":
            call.cancel()
        await channel.close()
        await until(lambda: scheduler.free_blocks() == free)
        num_steps = len(scheduler.worker.steps)
        scheduler.worker.gate.set()
        await until(lambda: not scheduler.worker.sequences)
        # Two steps were in flight; the third one carries the ends.
        assert [len(step.finished_sequence_ids) for step in scheduler.worker.steps[num_steps:]] == [0, 0, 2]
        info = scheduler.engine.model_info()
        assert (info.num_running, info.num_waiting) == (0, 0)


async def test_models_are_listed_with_their_state() -> None:
    async with running_scheduler(num_blocks=100) as scheduler:
        (model,) = (await scheduler.stub.ListModels(pb.ListModelsRequest(), timeout=5)).models
        assert model == (await scheduler.stub.GetModel(pb.GetModelRequest(model=MODEL), timeout=5)).model
        assert (model.name, model.state, model.vocab_size) == (MODEL, pb.MODEL_STATE_READY, 320)
        assert (model.block_count, model.free_block_count, model.block_size) == (100, 100, 16)
        assert list(model.eos_token_ids) == [EOS_TOKEN_ID]
