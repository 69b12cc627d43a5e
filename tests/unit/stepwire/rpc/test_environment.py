"""What programs give gRPC before they import it, tried in a process of its own."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from stepwire.supervisor.ports import free_port

_CLIENT = """
import sys, time
from stepwire.rpc.environment import prepare_grpc
prepare_grpc()
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from stepwire.rpc.channel import create_sync_channel
with create_sync_channel(sys.argv[1], max_message_bytes=1 << 20) as channel:
    stub = health_pb2_grpc.HealthStub(channel)
    is_told = False
    while True:
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
            break
        except grpc.RpcError:
            time.sleep(0.02)
        if not is_told:
            is_told = True
            print("nobody", flush=True)
print(time.monotonic(), flush=True)
"""


def test_a_server_that_comes_after_its_client_is_found_soon() -> None:
    address = f"127.0.0.1:{free_port()}"
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    with subprocess.Popen([sys.executable, "-c", _CLIENT, address], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None and client.stdout.readline() == "nobody\n"
        time.sleep(0.5)
        server.add_insecure_port(address)
        server.start()
        began = time.monotonic()
        found = float(client.stdout.readline())
    server.stop(None)
    # The channel waits up to a second between two attempts; gRPC's own clock for this poller has five.
    assert found - began < 3.0
