"""A model with its weights, by the means that suit model, type and device best."""

from collections.abc import Mapping
from typing import Protocol, cast

import torch

from loader.adapters.load import LoraFactors
from loader.config import ModelConfig
from loader.shares import RankPlace
from worker_service.kernels.paged.choose import Trial, choose_kernel
from worker_service.kernels.paged.problem import Rule
from worker_service.kernels.torch_products.choose import ProductChooser
from worker_service.kernels.torch_products.product import Target
from worker_service.models.lora import AdapterFactors, Factors
from worker_service.models.registry import build_model
from worker_service.runtime.adapters import PackedAdapter
from worker_service.runtime.decode_graphs import CudaRecorder
from worker_service.runtime.executor import Executor, Paging, TorchExecutor, context_bytes
from worker_service.runtime.group import RankGroup
from worker_service.runtime.held_tensors import replace_tensors
from worker_service.runtime.kv_cache import CacheShape, KvCache


class Engine(Protocol):
    """This rank's part of a model.

    Its weights come in two steps, so that what the first makes can be kept for a restart: `pack` brings what was
    read into the layout that computes best, `attach` takes what was packed into use.
    """

    @property
    def layout(self) -> str:
        """Names the layout that `pack` makes: equal for equal bytes."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token needs on this rank."""
        ...

    def pack(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Takes the tensors of `loader.layout.weight_slices` out of `tensors`, and answers contiguous ones by name."""
        ...

    def attach(self, packed: dict[str, torch.Tensor]) -> int:
        """Computes with these from now on, which may be mapped read-only; answers the bytes that it holds.

        May take them out of `packed`, so that what is laid out anew is not held twice.
        """
        ...

    def executor(self, num_blocks: int, block_size: int, max_model_len: int) -> Executor:
        """The model with a new KV cache. Raises RuntimeFailure "out_of_memory", or "invalid" for a size that
        cannot be."""
        ...

    def pack_adapter(self, factors: Mapping[str, LoraFactors]) -> PackedAdapter:
        """An adapter's factors, in the model's type and in host memory, as the engine computes with them. Reads nothing
        that changes: any thread may call it."""
        ...

    def attach_adapter(self, packed: PackedAdapter) -> object:
        """Brings what was packed to the device; answers what the executors take as `ResidentAdapter.weights`."""
        ...

    def move_weights(self, device: torch.device) -> None:
        """Holds its weights on a device from now on: in host memory, or where it computes. Its executors are gone."""
        ...

    def context_bytes(self, context: int) -> int:
        """Most bytes that a step takes more than one of fresh prompts when contexts are up to `context` long."""
        ...


class TorchEngine:
    """Plain torch, on any device."""

    layout = "plain"

    def __init__(
        self,
        config: ModelConfig,
        place: RankPlace,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
        *,
        stored: torch.dtype | None = None,
        records: bool = True,
    ) -> None:
        """`group` is that of the place, where it is not the only one. Keys and values are rounded to `stored`, where
        that is given. On CUDA, decodes are recorded as graphs where that can be and `records` allows.

        Raises CheckpointError for a config that is not computed, ValueError for one that cannot be split.
        """
        self._model = build_model(config, place, group if place.tensor_parallel_size > 1 else None)
        self._dtype = dtype
        self._device = device
        self._group = group if place.num_ranks > 1 else None
        self._stored = stored
        self._records = records

    @property
    def kv_bytes_per_token(self) -> int:
        """See Engine. For sure from `attach` on."""
        return self._shape.bytes_per_token

    @property
    def _shape(self) -> CacheShape:
        model = self._model
        return CacheShape(len(model.layers), model.num_kv_heads, model.config.head_dim, self._dtype, self._stored)

    def pack(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as they are: what oneDNN packs can be neither stored nor mapped."""
        packed = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        tensors.clear()
        return packed

    def attach(self, packed: dict[str, torch.Tensor]) -> int:
        """See Engine. On CUDA quantised weights are computed by torch's own products, where those are right."""
        if self._device.type != "cuda":
            return self._model.place_weights(packed)
        capability = torch.cuda.get_device_capability(self._device)
        chooser = ProductChooser(Target(self._device.type, capability, self._dtype))
        return self._model.place_weights(packed, chooser) + chooser.added_bytes

    def executor(self, num_blocks: int, block_size: int, max_model_len: int) -> Executor:
        """See Engine."""
        paging = self._paging(block_size) if self._device.type == "cuda" else None
        num_spare = int(paging is not None and paging.recorder is not None)
        cache = KvCache(self._shape, num_blocks, block_size, self._device, num_spare=num_spare)
        self._model.prepare(max_model_len, dtype=self._dtype, device=self._device)
        return TorchExecutor(
            self._model,
            cache,
            max_model_len=max_model_len,
            device=self._device,
            dtype=self._dtype,
            group=self._group,
            paging=paging,
        )

    def _paging(self, block_size: int) -> Paging | None:
        model, shape = self._model, self._shape
        config = model.config
        rules = {Rule(how, window) for how, window in zip(model.scores, model.windows, strict=True)}
        share = config.num_heads // config.num_kv_heads
        kernel = choose_kernel(
            Trial(
                num_heads=share * shape.num_kv_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                block_size=block_size,
                dtype=shape.dtype,
                device=self._device,
                stored=shape.stored,
                rules=tuple(rules),
            )
        )
        if kernel is None:
            return None
        # A mixture asks the device which experts were chosen, others' definitions whatever they like, and collectives
        # wait for other ranks.
        can_record = config.experts is None and config.family != "transformers" and self._group is None
        return Paging(kernel, CudaRecorder(self._device) if self._records and can_record else None)

    def pack_adapter(self, factors: Mapping[str, LoraFactors]) -> PackedAdapter:
        """See Engine."""
        plain = {name: Factors(each.a, each.b, each.scaling) for name, each in factors.items()}
        return PackedAdapter(plain, sum(each.a.nbytes + each.b.nbytes for each in plain.values()))

    def attach_adapter(self, packed: PackedAdapter) -> object:
        """See Engine."""
        plain = cast(AdapterFactors, packed.weights)
        return {
            name: Factors(each.a.to(self._device), each.b.to(self._device), each.scaling)
            for name, each in plain.items()
        }

    def move_weights(self, device: torch.device) -> None:
        """See Engine."""
        replace_tensors(self._model, lambda tensor: tensor.to(device))

    def context_bytes(self, context: int) -> int:
        """See Engine."""
        return context_bytes(self._shape, context)
