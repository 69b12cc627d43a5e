"""The demo: serves the demo model, asks it a question, and shows the trace of the answer.

Everything it starts has ended when it ends. Exits with 0 when the answer was right and the trace whole.
"""

import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from fetch_demo_model import model_path
from rich.console import Console

from stepwire.client import AsyncClient, Message, Output
from stepwire.supervisor.ports import free_port
from stepwire.telemetry import names
from stepwire.telemetry.setup import Telemetry
from stepwire.traces import Trace, TraceStore, render_waterfall, serve_receiver

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
SERVICES = {names.SERVICE_CLIENT, names.SERVICE_SCHEDULER, names.SERVICE_WORKER}
READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
TRACE_TIMEOUT_S = 20.0
END_TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def serve(port: int, otlp_endpoint: str, log_dir: str) -> AsyncIterator[None]:
    """`stepwire serve` in a process of its own, which ends here with status 0."""
    arguments = ["serve", "--model", str(model_path()), "--port", str(port), "--otlp-endpoint", otlp_endpoint]
    options = ["--log-dir", log_dir, "--log-level", "warning"]
    # A session of its own, so that Ctrl-C reaches this process alone and the end below is the only one.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stepwire.cli.main", *arguments, *options, start_new_session=True
    )
    body = asyncio.current_task()
    watch = asyncio.create_task(process.wait())
    watch.add_done_callback(lambda _: body.cancel() if body and not ending else None)
    ending = False
    try:
        yield
    except asyncio.CancelledError:
        if process.returncode is not None:
            raise SystemExit(f"demo: stepwire serve ended with status {process.returncode}; see above") from None
        raise
    finally:
        ending = True
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        status = await asyncio.wait_for(watch, END_TIMEOUT_S)
    if status != 0:
        raise SystemExit(f"demo: stepwire serve ended with status {status}")


async def ask(client: AsyncClient) -> str:
    """Streams the answer to the terminal and returns it."""
    print(f"\n> {QUESTION}\n")
    parts = []
    messages = [Message("user", QUESTION)]
    stream = client.generate(messages, temperature=0.0, max_tokens=64, timeout=ANSWER_TIMEOUT_S)
    async for event in stream:
        if isinstance(event, Output):
            parts.append(event.text)
            print(event.text, end="", flush=True)
    print("\n")
    return "".join(parts)


def is_whole(trace: Trace) -> bool:
    """Whether the spans of all services are there, and all parents."""
    known = {span.span_id for span in trace.spans}
    orphans = [span for span in trace.spans if span.parent_id and span.parent_id not in known]
    is_decoded = any(span.name == names.SPAN_WORKER_DECODE for span in trace.spans)
    return set(trace.services) >= SERVICES and is_decoded and not orphans


async def demo() -> None:
    """Runs the demo; raises SystemExit when it went wrong."""
    store = TraceStore()
    receiver = await serve_receiver(store, port=0)
    telemetry = Telemetry.start(names.SERVICE_CLIENT, otlp_endpoint=receiver.endpoint)
    began, port = time.monotonic(), free_port()
    try:
        with tempfile.TemporaryDirectory(prefix="stepwire-demo-") as log_dir:
            async with serve(port, receiver.endpoint, log_dir):
                async with AsyncClient(f"127.0.0.1:{port}", tracer_provider=telemetry.tracer_provider) as client:
                    await client.wait_ready(timeout=READY_TIMEOUT_S)
                    print(f"demo: ready after {time.monotonic() - began:.1f} s", file=sys.stderr)
                    answer = await ask(client)
                await asyncio.to_thread(telemetry.shutdown)
                trace = await store.wait_for(is_whole, TRACE_TIMEOUT_S)
    finally:
        await asyncio.to_thread(telemetry.shutdown)
        await receiver.stop()
    Console().print(render_waterfall(trace))
    if EXPECTED not in answer:
        raise SystemExit(f"demo: the answer does not contain {EXPECTED}")
    print(f"\ndemo: one trace, {trace.trace_id}, of {len(trace.spans)} spans: {', '.join(trace.services)}")


def main() -> None:
    """Entry point."""
    if not Path(model_path()).is_file():
        sys.exit("demo: the demo model is missing; run `make setup`")
    try:
        asyncio.run(demo())
    except TimeoutError:
        sys.exit("demo: timed out; see the messages above")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
