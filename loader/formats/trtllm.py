"""TensorRT-LLM's own checkpoints: config.json, and a rankN.safetensors for each rank they were converted for.

The layout is that of its converters (tensorrt_llm/models/llama/convert.py, mapping.py): ranks are numbered stage by
stage, the layers of each stage from 0; query, key and value rows of a rank are fused in that order, with key and value
heads repeated where there are fewer than ranks; `mlp.fc` is what is activated (Hugging Face's gate_proj), `mlp.gate`
what it is multiplied by (up_proj); the rows of the head are padded so that the ranks divide them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loader.checkpoint import Checkpoint, fingerprint
from loader.completeness import check_tensors, wrong_shape
from loader.config import ModelConfig
from loader.errors import CheckpointError
from loader.files import read_json_object
from loader.formats.pieces import join_pieces
from loader.formats.safetensors import file_facts, read_configs, refuse_foreign_types
from loader.formats.trtllm_config import RankMapping, huggingface_fields, rank_mapping
from loader.hf_config import read_hf_config
from loader.safetensors_format import SafetensorsFile, read_safetensors_file
from loader.shares import Share, even_share, grouped_share
from loader.tensors import Piece, TensorInfo, rows_of

_CONVERT_AGAIN = "convert the model again, unquantised, or use its Hugging Face form"
_EMBEDDING, _HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"
_GLOBAL_NAMES = {
    _EMBEDDING: "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_LAYER = re.compile(r"transformer\.layers\.(\d{1,5})\.([a-z_.]+)\.(weight|bias)")
# Their name -> ours, and along which dimension ranks hold parts; None where each has all of it.
_LAYER_NAMES: Mapping[str, tuple[str, int | None]] = {
    "attention.dense": ("self_attn.o_proj", 1),
    "attention.q_layernorm": ("self_attn.q_norm", None),
    "attention.k_layernorm": ("self_attn.k_norm", None),
    "mlp.fc": ("mlp.gate_proj", 0),
    "mlp.gate": ("mlp.up_proj", 0),
    "mlp.proj": ("mlp.down_proj", 1),
    "input_layernorm": ("input_layernorm", None),
    "post_layernorm": ("post_attention_layernorm", None),
}


class TensorRtLlmFormat:
    """A folder with TensorRT-LLM's config.json and rank0.safetensors."""

    name = "tensorrt-llm"

    def recognises(self, path: Path) -> bool:
        """Whether there is a rank0.safetensors and a config.json that speaks of ranks."""
        if not (path / "rank0.safetensors").exists():
            return False
        try:
            return isinstance(read_json_object(path / "config.json").get("mapping"), dict)
        except CheckpointError:
            return False

    def open(self, path: Path) -> Checkpoint:
        """Reads config and headers, and joins what the ranks hold. Raises CheckpointError."""
        content = read_json_object(path / "config.json")
        mapping = rank_mapping(path / "config.json", content)
        files = _read_ranks(path, mapping)
        has_head = any(tensor.name == _HEAD for file in files for tensor in file.tensors)
        fields = huggingface_fields(path / "config.json", content, tie=not has_head)
        config = read_hf_config(path, "bfloat16", fields)
        try:
            tensors = _join(files, _Layout(config, mapping))
        except ValueError as error:
            text = f"{path / 'config.json'}: {error}, as its mapping says"
            raise CheckpointError("invalid", text, _CONVERT_AGAIN, file=path / "config.json") from error
        check_tensors(path, config, tensors)
        refuse_foreign_types(tensors)
        return Checkpoint(
            path=path,
            format=self.name,
            config=config,
            tensors=tensors,
            total_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
            fingerprint=fingerprint(map(file_facts, files), read_configs(path)),
            gguf_metadata={},
        )


def _read_ranks(folder: Path, mapping: RankMapping) -> list[SafetensorsFile]:
    paths = [folder / f"rank{rank}.safetensors" for rank in range(mapping.num_ranks)]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            "not_found",
            f"{len(missing)} of the files of {mapping.num_ranks} ranks are missing: {missing[0].name}",
            "copy the missing files",
            file=missing[0],
            expected=f"{mapping.num_ranks} files",
            found=f"{mapping.num_ranks - len(missing)} files",
        )
    return [read_safetensors_file(path) for path in paths]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the tensors of the ranks make up those of the model."""

    config: ModelConfig
    mapping: RankMapping

    def parts(self, stored: TensorInfo, tensor_rank: int, first_layer: int) -> Iterator[tuple[str, Piece]]:
        """The Hugging Face tensors that a rank's tensor holds some of, and which part."""
        if stored.name == _EMBEDDING:
            dim = self.mapping.embedding_dim
            yield from (
                self._vocabulary(stored, tensor_rank)
                if dim == 0
                else self._plain(stored, _GLOBAL_NAMES[stored.name], dim, tensor_rank)
            )
        elif stored.name == _HEAD:
            yield from self._vocabulary(stored, tensor_rank)
        elif stored.name in _GLOBAL_NAMES:
            yield from self._plain(stored, _GLOBAL_NAMES[stored.name], None, tensor_rank)
        else:
            match = _LAYER.fullmatch(stored.name)
            prefix = f"model.layers.{first_layer + int(match[1])}" if match else ""
            if match is not None and match[2] == "attention.qkv":
                yield from self._qkv(stored, f"{prefix}.self_attn", match[3], tensor_rank)
            elif match is not None and match[2] in _LAYER_NAMES:
                name, dim = _LAYER_NAMES[match[2]]
                # The bias of a product whose inputs are divided is whole on every rank.
                dim = None if match[3] == "bias" and dim == 1 else dim
                yield from self._plain(stored, f"{prefix}.{name}.{match[3]}", dim, tensor_rank)
            else:
                raise _no_place(stored)

    def _plain(self, stored: TensorInfo, name: str, dim: int | None, rank: int) -> Iterator[tuple[str, Piece]]:
        if not stored.shape or (dim or 0) >= len(stored.shape):
            raise _no_place(stored)
        if dim is None:
            yield name, Piece(0, 0, stored.shape[0], rows_of(stored, name, 0, stored.shape[0]))
            return
        width = stored.shape[dim]
        yield name, Piece(dim, width * rank, width * (rank + 1), rows_of(stored, name, 0, stored.shape[0]))

    def _vocabulary(self, stored: TensorInfo, rank: int) -> Iterator[tuple[str, Piece]]:
        size, name = self.config.vocab_size, _GLOBAL_NAMES[stored.name]
        width = -(-size // self.mapping.tensor_parallel_size)
        if stored.shape != (width, self.config.hidden_size):
            raise wrong_shape(stored, (width, self.config.hidden_size))
        start, stop = width * rank, min(width * (rank + 1), size)
        if start < stop:
            yield name, Piece(0, start, stop, rows_of(stored, name, 0, stop - start))

    def _qkv(self, stored: TensorInfo, prefix: str, kind: str, rank: int) -> Iterator[tuple[str, Piece]]:
        config, size = self.config, self.mapping.tensor_parallel_size
        key_value = grouped_share(config.num_kv_heads, rank, size).scaled(config.head_dim)
        query = even_share(config.num_heads, rank, size, what="the number of heads").scaled(config.head_dim)
        rows = len(query) + 2 * len(key_value)
        shape = (rows, config.hidden_size) if kind == "weight" else (rows,)
        if stored.shape != shape:
            raise wrong_shape(stored, shape)
        position = 0
        shares: tuple[tuple[str, Share], ...] = (("q", query), ("k", key_value), ("v", key_value))
        for letter, share in shares:
            name = f"{prefix}.{letter}_proj.{kind}"
            part = rows_of(stored, name, position, position + len(share))
            yield name, Piece(0, share.start, share.stop, part)
            position += len(share)


def _join(files: list[SafetensorsFile], layout: _Layout) -> dict[str, TensorInfo]:
    size = layout.mapping.tensor_parallel_size
    pieces: dict[str, list[Piece]] = {}
    first_layer = 0
    for stage in range(layout.mapping.pipeline_parallel_size):
        ranks = files[stage * size : (stage + 1) * size]
        for tensor_rank, file in enumerate(ranks):
            for stored in file.tensors:
                for name, piece in layout.parts(stored, tensor_rank, first_layer):
                    pieces.setdefault(name, []).append(piece)
        first_layer += _num_layers(ranks[0])
    return {name: join_pieces(name, parts, max(part.stop for part in parts)) for name, parts in pieces.items()}


def _num_layers(file: SafetensorsFile) -> int:
    matches = filter(None, (_LAYER.fullmatch(tensor.name) for tensor in file.tensors))
    return 1 + max((int(match[1]) for match in matches), default=-1)


def _no_place(stored: TensorInfo) -> CheckpointError:
    return CheckpointError(
        "unsupported",
        f"{stored.file} holds tensor {stored.name!r} of {stored.dtype} {list(stored.shape)}, which none of the models "
        "that we read from TensorRT-LLM has",
        _CONVERT_AGAIN,
        file=stored.file,
        tensor=stored.name,
    )
