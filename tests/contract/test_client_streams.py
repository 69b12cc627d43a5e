"""How streams of both clients end early, over real gRPC."""

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from opentelemetry.trace import StatusCode as SpanStatus

from stepwire import AsyncClient, Client, StepwireError
from stepwire.telemetry import names
from tests.support.client_rig import SCRIPT, Rig, running


@pytest.fixture(params=["sync", "async"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with running(request.param) as rig:
        yield rig


def assert_span(span: ReadableSpan, method: str, code: str) -> None:
    assert span.name == f"stepwire.v1.InferenceService/{method}"
    assert span.kind is SpanKind.CLIENT
    assert span.attributes is not None
    assert span.attributes[names.RPC_STATUS] == code
    assert span.attributes[names.SERVER_ADDRESS] == "127.0.0.1"
    assert span.status.status_code is (SpanStatus.UNSET if code == "OK" else SpanStatus.ERROR)


@pytest.mark.parametrize("way", ["break", "never", "close", "with", "raise", "collected"])
async def test_dropping_a_stream_cancels_its_request(rig: Rig, way: str) -> None:
    rig.service.script, rig.service.hold = SCRIPT[:2], True
    gc.disable()  # But for "collected", reference counts alone must do.
    try:
        if rig.is_sync:
            await asyncio.to_thread(drop_sync, rig.client, way)
        else:
            await drop_async(rig, way)
        async with asyncio.timeout(20):
            await rig.service.left.wait()
    finally:
        gc.enable()
    assert_span(await rig.span(), "Generate", "CANCELLED")


def drop_sync(client: Client, way: str) -> None:
    if way == "break":
        for _ in client.generate("hi"):
            break
    elif way == "never":
        stream = client.generate("hi")
        time.sleep(0.05)  # The request goes out in the background.
        del stream
    elif way == "close":
        stream = client.generate("hi")
        next(stream)
        stream.close()
        stream.close()
        assert list(stream) == []
    elif way == "with":
        with client.generate("hi") as stream:
            next(stream)
    elif way == "raise":
        with pytest.raises(KeyError):
            for _ in client.generate("hi"):
                raise KeyError
    else:
        stream = client.generate("hi")
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()


async def drop_async(rig: Rig, way: str) -> None:
    client: AsyncClient = rig.client
    if way == "break":
        async for _ in client.generate("hi"):
            break
    elif way == "never":
        stream = client.generate("hi")
        await rig.service.reached.wait()
        del stream
    elif way == "close":
        stream = client.generate("hi")
        await anext(stream)
        stream.close()
        stream.close()
        assert [event async for event in stream] == []
    elif way == "with":
        async with aclosing(client.generate("hi")) as stream:
            await anext(stream)
    elif way == "raise":
        with pytest.raises(KeyError):
            async for _ in client.generate("hi"):
                raise KeyError
    else:
        stream = client.generate("hi")
        await anext(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        await asyncio.to_thread(gc.collect)  # In another thread than the loop's, as may happen.


async def test_a_task_that_is_cancelled_cancels_its_request() -> None:
    for method in ("complete", "tokenize"):
        async with running("async") as rig:
            rig.service.hold = True
            task = asyncio.create_task(getattr(rig.client, method)("hi"))
            await rig.service.reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(20):
                await rig.service.left.wait()
            assert (await rig.span()).status.status_code is SpanStatus.ERROR


async def test_closing_a_stream_that_another_task_reads_is_not_that_tasks_cancellation() -> None:
    async with running("async") as rig:
        rig.service.script, rig.service.hold = SCRIPT[:1], True
        stream = rig.client.generate("hi")
        await anext(stream)
        reader = asyncio.create_task(anext(stream))
        await rig.service.reached.wait()
        await asyncio.sleep(0.02)  # Let the reader wait for its message; no event says that it does.
        stream.close()
        with pytest.raises(StepwireError) as caught:
            await reader
        assert caught.value.reason == "CANCELLED"


async def test_closing_a_stream_that_another_thread_reads() -> None:
    async with running("sync") as rig:
        rig.service.script, rig.service.hold = SCRIPT[:1], True
        stream = rig.client.generate("hi")
        await asyncio.to_thread(next, stream)
        reader = asyncio.create_task(asyncio.to_thread(next, stream))
        await rig.service.reached.wait()
        await asyncio.sleep(0.02)
        await asyncio.to_thread(stream.close)
        with pytest.raises(StepwireError) as caught:
            await reader
        assert caught.value.reason == "CANCELLED"


async def test_closing_the_client_ends_its_calls(rig: Rig) -> None:
    rig.service.hold = True
    calls = [asyncio.create_task(rig.do("complete", "hi")), asyncio.create_task(rig.do("tokenize", "hi"))]
    async with asyncio.timeout(20):
        await rig.service.both_reached.wait()
    await rig.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [StepwireError, StepwireError]
    with pytest.raises(StepwireError, match="closed"):
        await rig.do("tokenize", "hi")


async def test_a_process_that_ends_in_the_middle_of_a_stream_is_quiet() -> None:
    async with running("sync") as rig:
        rig.service.script, rig.service.hold = SCRIPT[:1], True
        code = "import sys, stepwire; s = stepwire.Client(sys.argv[1]).generate('hi'); print(next(s).model)"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, rig.target, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, out, err) == (0, b"m\n", b"")
        async with asyncio.timeout(20):
            await rig.service.left.wait()
