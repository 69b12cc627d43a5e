"""What the arrangements that `protocol_cost` compares have in common. Imports neither gRPC nor torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import Request


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits, the same for all arrangements."""

    max_sequences: int = 32
    max_step_tokens: int = 512
    block_size: int = 16
    num_blocks: int = 1024
    max_model_len: int = 512
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """For the core."""
        return SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_running=self.max_sequences,
            max_step_tokens=self.max_step_tokens,
            prefix_caching=False,
        )

    @property
    def serve_flags(self) -> list[str]:
        """For `stepwire serve`."""
        names = {
            "max_sequences": "max-num-seqs",
            "max_step_tokens": "max-num-batched-tokens",
            "num_blocks": "num-kv-blocks",
        }
        flags = [f"--{names.get(key, key.replace('_', '-'))}={value}" for key, value in asdict(self).items()]
        return [*flags, "--no-prefix-caching"]


def request(request_id: str, prompt: Sequence[int], max_tokens: int, sampling: object) -> Request:
    """A request of one sequence."""
    return Request(request_id, prompt, max_tokens, sampling=sampling)
