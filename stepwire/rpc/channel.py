"""Builds gRPC channels.

There are no client interceptors: in grpc.aio they keep a cancelled call running on the server.
Whoever traces a call makes its span and metadata itself.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

Options = list[tuple[str, int]]


def create_channel(
    target: str, *, max_message_bytes: int, key: str | None = None, max_backoff_ms: int = 1_000
) -> grpc.aio.Channel:
    """A channel to "host:port", in the clear, that notices a dead peer within about 15 s.

    `max_message_bytes` bounds messages in both directions; every call carries `key`, if given. A peer that does not
    answer is tried again, for later calls, after at most `max_backoff_ms`. Calls are never retried. Connects at the
    first call. Needs a running event loop.
    """
    channel = grpc.aio.insecure_channel(target, options=channel_options(max_message_bytes, max_backoff_ms))
    return channel if key is None else _KeyedChannel(channel, key)


def create_sync_channel(target: str, *, max_message_bytes: int) -> grpc.Channel:
    """The same for threads; a key is passed with each call, see `key_metadata`."""
    return grpc.insecure_channel(target, options=channel_options(max_message_bytes))


def key_metadata(key: str) -> tuple[str, str]:
    """The metadata entry that carries a key."""
    return ("authorization", f"Bearer {key}")


def channel_options(max_message_bytes: int, max_backoff_ms: int = 1_000) -> Options:
    """gRPC options of every Stepwire channel."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A peer that starts, or comes back, is found soon.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", max_backoff_ms),
        # Neither a proxy for the web nor a DNS record may come between a scheduler and its workers.
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.enable_retries", 0),
    ]


class _KeyedChannel(grpc.aio.Channel):
    """Adds a key to the metadata of every call, and returns gRPC's own call objects."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._channel = channel
        self._entry = key_metadata(key)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._keyed(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._keyed(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._keyed(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._keyed(self._channel.stream_stream(*args, **kwargs))

    def _keyed(self, multi_callable: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return multi_callable(*args, metadata=(*(metadata or ()), self._entry), **kwargs)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> "_KeyedChannel":
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self._channel.close()
