"""A trace collector that takes all and keeps nothing, as a process of its own: prints its address.

A line of input, or the end of it, ends it.
"""

import asyncio
import sys
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


class _Sink(trace_service_pb2_grpc.TraceServiceServicer):
    async def Export(
        self,
        request: pb.ExportTraceServiceRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.ExportTraceServiceResponse:
        return pb.ExportTraceServiceResponse()


async def _serve() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Sink(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve())
