"""Models whose products are torch's own, as they would be on CUDA, against those that make weights whole."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loader.checkpoint import open_checkpoint
from loader.needs import rank_needs
from loader.quantised.load import load_rank
from loader.quantised.packed import Packed
from loader.shares import RankPlace
from tests.support import int4_operator
from tests.support.tiny_quantised_models import ROUNDED_INPUTS, WEIGHT_ONLY, make_tiny_quantised
from tests.support.tiny_runner import Driver, make_runner, one_thread
from worker_service.kernels.linear import LinearKernel
from worker_service.kernels.quantised import MakeLinear, make_joined_linear
from worker_service.kernels.torch_products.choose import ProductChooser
from worker_service.kernels.torch_products.fp8 import Fp8Product
from worker_service.kernels.torch_products.int4 import Int4Product
from worker_service.kernels.torch_products.int8 import Int8Product, WidenedProduct
from worker_service.kernels.torch_products.product import Target
from worker_service.models.decoder import Decoder
from worker_service.models.registry import build_model
from worker_service.runtime.engine import TorchEngine
from worker_service.runtime.held_tensors import replace_tensors

PROMPTS = ([5, 9, 200, 31], [7] * 11, [300, 4, 18, 77, 120, 66])
PRODUCTS: dict[str, type] = {
    "w8a8": Int8Product,
    "fp8_tensor": Fp8Product,
    "fp8_static": Fp8Product,
    "fp8_by_token": Fp8Product,
    "int8_weights": WidenedProduct,
    "gptq": Int4Product,
    "gptq_asymmetric": Int4Product,
    "gptq_ordered": Int4Product,
    "gptq_one_group": Int4Product,
    "gptq_with_its_output_layer": Int4Product,
    "awq": Int4Product,
    "packed": Int4Product,
    "packed_ordered": Int4Product,
}


@pytest.fixture(autouse=True)
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    int4_operator.install(monkeypatch)


def chooser(dtype: torch.dtype) -> ProductChooser:
    return ProductChooser(Target("cpu", (9, 0), dtype))


def placed(folder: Path, make: MakeLinear, dtype: torch.dtype, place: RankPlace | None = None) -> tuple[Decoder, int]:
    """This rank's model, and the bytes of its weights as they were read."""
    checkpoint, place = open_checkpoint(folder), place or RankPlace()
    model = build_model(checkpoint.config, place, None)
    tensors = load_rank(checkpoint, place, dtype=dtype, progress=lambda _: None, cancelled=lambda: False)
    num_bytes = model.place_weights(tensors, make)
    assert not tensors
    assert isinstance(model, Decoder)
    return model, num_bytes


def made(folder: Path, form: str, **llama: Any) -> Path:
    return make_tiny_quantised(folder, {**WEIGHT_ONLY, **ROUNDED_INPUTS}[form], **llama)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_product_of_every_rank_is_one_and_computes_what_the_reference_does(
    tmp_path: Path, form: str, num_ranks: int
) -> None:
    folder, generator = made(tmp_path, form), torch.Generator().manual_seed(0)
    choose, found = chooser(torch.bfloat16), []

    def checked(
        weights: Sequence[torch.Tensor | Packed], biases: Sequence[torch.Tensor | None], *, is_shared: bool = False
    ) -> LinearKernel:
        product, reference = choose(weights, biases, is_shared=is_shared), make_joined_linear(weights, biases)
        x = torch.randn(5, weights[0].shape[1], generator=generator).bfloat16()
        expected = reference(x).float()
        assert float((product(x).float() - expected).abs().max()) < 0.02 * float(expected.abs().max())
        # What each weight orders by itself is joined as results.
        is_one = not inspect.isfunction(product)
        kernels = [product] if is_one else inspect.getclosurevars(product).nonlocals["kernels"]
        assert is_one or "ordered" in form
        found.extend(type(kernel) for kernel in kernels)
        return product

    for rank in range(num_ranks):
        with one_thread():
            placed(folder, checked, torch.bfloat16, RankPlace(rank, num_ranks))
    assert found and set(found) == {PRODUCTS[form]}


def test_products_of_rounded_integers_give_the_reference_s_tokens(tmp_path: Path) -> None:
    folder, tokens = made(tmp_path, "w8a8"), []
    for make in (make_joined_linear, chooser(torch.float32)):
        with one_thread():
            model, _ = placed(folder, make, torch.float32)
            runner, cache = make_runner(model)
            driver = Driver(runner, cache)
            driven = [driver.add(number, prompt) for number, prompt in enumerate(PROMPTS, 1)]
            driver.run(12)
        tokens.append([sequence.output for sequence in driven])
    assert tokens[0] == tokens[1]
    assert len({token for output in tokens[0] for token in output}) > 3


def test_the_engine_has_them_on_cuda_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are where a CPU has them: what is asked of the device is its capability alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    checkpoint, place, held = open_checkpoint(made(tmp_path, "awq")), RankPlace(), {}
    for kind in ("cpu", "cuda"):
        engine = TorchEngine(checkpoint.config, place, torch.bfloat16, torch.device(kind))
        tensors = load_rank(checkpoint, place, dtype=torch.bfloat16, progress=lambda _: None, cancelled=lambda: False)
        held[kind] = engine.attach(tensors)
        assert not tensors
        layers: Any = engine._model.layers
        assert isinstance(layers[0]._qkv._linear, Int4Product) == (kind == "cuda")
    assert held["cpu"] < held["cuda"] < 1.1 * held["cpu"]


def logits(model: Decoder) -> torch.Tensor:
    """Of the head, for what the layers' MLPs make of some hidden states."""
    layers: Any = model.layers
    hidden = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    for layer in layers:
        qkv = layer._qkv(hidden)
        hidden = hidden + layer._output(qkv[:, : hidden.shape[1]].contiguous())
        hidden = hidden + layer._mlp(hidden)
    return model.logits(hidden)


@pytest.mark.parametrize("form", ["w8a8", "fp8_static", "int8_weights", "gptq_ordered", "awq"])
def test_all_that_a_product_holds_can_be_moved(tmp_path: Path, form: str) -> None:
    """As to the host and back: copies in place of all tensors, and the same results."""
    model, _ = placed(made(tmp_path, form), chooser(torch.bfloat16), torch.bfloat16)
    with one_thread(), torch.inference_mode():
        before, originals = logits(model), []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is not torch.strided:
                return tensor  # A packed one of oneDNN, which is on a CPU alone.
            originals.append(tensor)
            return tensor.clone()

        replace_tensors(model, copied)
        for tensor in originals:
            tensor.view(torch.uint8).zero_() if tensor.dim() else tensor.zero_()
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("form", PRODUCTS)
def test_bytes_are_nearly_those_that_headers_tell(tmp_path: Path, form: str) -> None:
    folder, choose = made(tmp_path, form, hidden_size=256, intermediate_size=512), chooser(torch.bfloat16)
    _, num_bytes = placed(folder, choose, torch.bfloat16)
    needs = rank_needs(open_checkpoint(folder), RankPlace(), "bfloat16")
    # A group of 32 values of 4 bits may have a zero now, and a row of 256 the scale that all had in common.
    share = 0.09 if PRODUCTS[form] is Int4Product else 0.02
    assert abs(num_bytes + choose.added_bytes - needs.weight_bytes) < share * needs.weight_bytes
