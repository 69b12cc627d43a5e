"""How a quantised weight is stored: which tensors stand for it, and which part of each a rank needs.

Pure functions; imports no torch. The layouts are those of shared/reference/loading_facts.md, section 2. A rank whose
share ends inside a word takes that word, and inside a group or a block its scale: the rank that shares it takes it
too, so any share can be had. The group of each input (g_idx) is taken whole: only the whole tells whether it orders
anything, and with such an order an input may belong to any group, so all scales are taken too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod

from loader.gguf_format import GGML_TYPES
from loader.quantised.activations import Activation
from loader.shares import Share
from loader.tensors import WeightSlice

WORD_BITS = 32
FORM_BYTES = 64
"""What is kept of a packed weight beside its tensors, see `packed.flatten`."""
SCALE_DTYPES = ("F16", "BF16", "F32")
_WORDS = ("I32",)
_INDEX = ("I32",)


def unit_of(bits: int) -> int:
    """Values after which the packing of `bits` each into words of 32 bits begins anew."""
    return WORD_BITS // gcd(WORD_BITS, bits)


def num_words(num_values: int, bits: int) -> int:
    """Words that hold so many values, the last one padded."""
    return -(-num_values * bits // WORD_BITS)


def num_groups(size: int, group_size: int) -> int:
    """Groups of `group_size`, the last one maybe smaller; 0 stands for one group of all."""
    return -(-size // group_size) if group_size else 1


def group_share(share: Share, group_size: int) -> Share:
    """The groups that hold the elements of a share."""
    if not group_size:
        return Share(1, 0, 1)
    return Share(num_groups(share.size, group_size), share.start // group_size, -(-share.stop // group_size))


def word_share(share: Share, bits: int) -> Share:
    """The words that hold the elements of a share, in whole units."""
    unit = unit_of(bits)
    words = unit * bits // WORD_BITS
    total = num_words(share.size, bits)
    return Share(total, share.start // unit * words, min(-(-share.stop // unit) * words, total))


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """GPTQ: qweight [in · bits / 32, out], packed along the inputs, qzeros [groups, out · bits / 32], packed along the
    outputs, scales [groups, out] and maybe g_idx [in].

    `group_size` 0 stands for one group. `zero_offset` is what the config says has to be added to the stored zero
    points: 1 for the first version of the format, 0 for the second. `symmetric` weights have the middle as their zero
    point, so their stored ones tell the version.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool
    zero_offset: int
    has_g_idx: bool = True
    scale_bytes: int = 2

    def parts(self, name: str, outputs: Share, inputs: Share) -> Iterator[WeightSlice]:
        """What a rank with these shares needs, as stored."""
        groups = group_share(inputs, self.group_size)
        if self.act_order:
            groups = Share(groups.size, 0, groups.size)
        words = word_share(outputs, self.bits)
        yield stored_slice(f"{name}.qweight", (word_share(inputs, self.bits), outputs), _WORDS)
        yield stored_slice(f"{name}.qzeros", (groups, words), _WORDS)
        yield stored_slice(f"{name}.scales", (groups, outputs), SCALE_DTYPES)
        if self.has_g_idx:
            yield _whole_slice(f"{name}.g_idx", (inputs.size,), _INDEX)

    def resident_bytes(self, outputs: Share, inputs: Share) -> int:
        """Bytes in memory once packed."""
        return _grouped_bytes(self, outputs, inputs)


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """AWQ in its "gemm" version: qweight [in, out / 8] and qzeros [groups, out / 8], both packed along the outputs in
    the order 0 2 4 6 1 3 5 7, scales [groups, out]; 4 bits."""

    group_size: int
    scale_bytes: int = 2
    bits: int = 4
    symmetric: bool = False
    act_order: bool = False

    def parts(self, name: str, outputs: Share, inputs: Share) -> Iterator[WeightSlice]:
        """What a rank with these shares needs, as stored."""
        groups, words = group_share(inputs, self.group_size), word_share(outputs, self.bits)
        yield stored_slice(f"{name}.qweight", (inputs, words), _WORDS)
        yield stored_slice(f"{name}.qzeros", (groups, words), _WORDS)
        yield stored_slice(f"{name}.scales", (groups, outputs), SCALE_DTYPES)

    def resident_bytes(self, outputs: Share, inputs: Share) -> int:
        """Bytes in memory once packed."""
        return _grouped_bytes(self, outputs, inputs)


@dataclass(frozen=True, slots=True)
class PackScheme:
    """compressed-tensors' pack-quantized: weight_packed [out, in · bits / 32], packed along the inputs, each value
    raised by half of the range; weight_scale [out, groups] or one; weight_zero_point [out · bits / 32, groups],
    packed along the outputs, where not symmetric; maybe weight_shape [2] and weight_g_idx [in].

    `group_size` 0 stands for a scale a row. `scale_rank` is the number of dimensions of a scale for the whole tensor,
    None where each row has its own.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool
    scale_rank: int | None = None
    has_shape: bool = True
    scale_bytes: int = 2

    def parts(self, name: str, outputs: Share, inputs: Share) -> Iterator[WeightSlice]:
        """What a rank with these shares needs, as stored."""
        groups = group_share(inputs, self.group_size)
        if self.act_order:
            groups = Share(groups.size, 0, groups.size)
        yield stored_slice(f"{name}.weight_packed", (outputs, word_share(inputs, self.bits)), _WORDS)
        if self.scale_rank is not None:
            yield _whole_slice(f"{name}.weight_scale", (1,) * self.scale_rank, SCALE_DTYPES)
        else:
            yield stored_slice(f"{name}.weight_scale", (outputs, groups), SCALE_DTYPES)
        if not self.symmetric:
            yield stored_slice(f"{name}.weight_zero_point", (word_share(outputs, self.bits), groups), _WORDS)
        if self.has_shape:
            yield _whole_slice(f"{name}.weight_shape", (2,), ("I64", "I32"))
        if self.act_order:
            yield _whole_slice(f"{name}.weight_g_idx", (inputs.size,), _INDEX)

    def resident_bytes(self, outputs: Share, inputs: Share) -> int:
        """Bytes in memory once packed."""
        return _grouped_bytes(self, outputs, inputs)


@dataclass(frozen=True, slots=True)
class GridScheme:
    """8-bit values [out, in], each block of which is multiplied by its scale: int8 or float8 e4m3.

    A block has `block_rows` x `block_columns` values; 0 stands for all, so (0, 0) is one scale for the tensor and
    (1, 0) one a row. `scale_rank` is the number of dimensions in which the scales are stored. With a static
    activation there is also an input_scale of `input_scale_rank` dimensions.
    """

    dtype: str
    block_rows: int
    block_columns: int
    activation: Activation | None = None
    scale_name: str = "weight_scale"
    scale_rank: int = 2
    input_scale_rank: int = 0
    scale_bytes: int = 4

    def parts(self, name: str, outputs: Share, inputs: Share) -> Iterator[WeightSlice]:
        """What a rank with these shares needs, as stored."""
        yield stored_slice(f"{name}.weight", (outputs, inputs), (self.dtype,))
        grid = (group_share(outputs, self.block_rows), group_share(inputs, self.block_columns))
        scale = f"{name}.{self.scale_name}"
        if self.block_rows == 0 and self.block_columns == 0:
            yield _whole_slice(scale, (1,) * self.scale_rank, SCALE_DTYPES)
        else:
            yield stored_slice(scale, grid[: self.scale_rank], SCALE_DTYPES)
        if self.activation is not None and self.activation.is_static:
            yield _whole_slice(f"{name}.input_scale", (1,) * self.input_scale_rank, SCALE_DTYPES)

    def resident_bytes(self, outputs: Share, inputs: Share) -> int:
        """Bytes in memory once packed."""
        grid = len(group_share(outputs, self.block_rows)) * len(group_share(inputs, self.block_columns))
        static = self.activation is not None and self.activation.is_static
        return len(outputs) * len(inputs) + grid * self.scale_bytes + 4 * static + FORM_BYTES


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A GGUF type of blocks: integers of up to 4 or 8 `bits`, which is how they are kept, in groups of `group_size`
    inputs.

    Each group has a scale, and a minimum where the type `has_minima`; of others `zero` is taken away from the integers.
    In types `with_factors` a block has one scale, and one minimum, and a group a byte for each that multiplies it.
    """

    bits: int
    group_size: int
    zero: int = 0
    has_minima: bool = False
    with_factors: bool = False


BLOCK_FORMS: Mapping[str, BlockForm] = {
    "Q4_0": BlockForm(4, 32, zero=8),
    "Q4_1": BlockForm(4, 32, has_minima=True),
    "Q5_0": BlockForm(8, 32, zero=16),
    "Q5_1": BlockForm(8, 32, has_minima=True),
    "Q8_0": BlockForm(8, 32, zero=128),
    "Q2_K": BlockForm(4, 16, has_minima=True, with_factors=True),
    "Q3_K": BlockForm(4, 16, zero=4, with_factors=True),
    "Q4_K": BlockForm(4, 32, has_minima=True, with_factors=True),
    "Q5_K": BlockForm(8, 32, has_minima=True, with_factors=True),
    "Q6_K": BlockForm(8, 16, zero=32, with_factors=True),
}
"""By storage type. All numbers of blocks are float16."""
_BLOCK_SIZES = {name: block_values for name, block_values, _ in GGML_TYPES.values()}


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """A weight [out, in] in blocks of a GGUF type along the inputs.

    A rank whose share ends inside a block takes all of it.
    """

    dtype: str

    @property
    def form(self) -> BlockForm:
        """What a block is made of."""
        return BLOCK_FORMS[self.dtype]

    @property
    def block_size(self) -> int:
        """Inputs of a block."""
        return _BLOCK_SIZES[self.dtype]

    def whole_blocks(self, inputs: Share) -> Share:
        """The inputs of all blocks that hold some of a share."""
        size = self.block_size
        return Share(inputs.size, inputs.start // size * size, -(-inputs.stop // size) * size)

    def parts(self, name: str, outputs: Share, inputs: Share) -> Iterator[WeightSlice]:
        """What a rank with these shares needs, as stored."""
        yield stored_slice(f"{name}.weight", (outputs, self.whole_blocks(inputs)), (self.dtype,))

    def resident_bytes(self, outputs: Share, inputs: Share) -> int:
        """Bytes in memory once packed."""
        form, num_values = self.form, 1 + self.form.has_minima
        wide = len(self.whole_blocks(inputs))
        scales = 2 * num_values * wide // self.block_size
        factors = num_values * wide // form.group_size if form.with_factors else 0
        return len(outputs) * (-(-len(inputs) * form.bits // 8) + scales + factors) + FORM_BYTES


Scheme = GptqScheme | AwqScheme | PackScheme | GridScheme | BlockScheme


def stored_slice(name: str, shares: tuple[Share, ...], dtypes: tuple[str, ...]) -> WeightSlice:
    """The part of a tensor that the shares of its dimensions cut out; at most one of them is not whole.

    Raises ValueError where two are.
    """
    shape = tuple(share.size for share in shares)
    cut = [dim for dim, share in enumerate(shares) if not share.is_whole]
    if len(cut) > 1:
        raise ValueError(f"{name} is cut along more than one dimension")
    if not cut:
        return _whole_slice(name, shape, dtypes)
    share = shares[cut[0]]
    return WeightSlice(name, shape, cut[0], share.start, share.stop, as_stored=True, dtypes=dtypes)


def _whole_slice(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> WeightSlice:
    return WeightSlice(name, shape, None, 0, prod(shape[:1]), as_stored=True, dtypes=dtypes)


def _grouped_bytes(scheme: GptqScheme | AwqScheme | PackScheme, outputs: Share, inputs: Share) -> int:
    """Packed values, a scale a group, a byte a zero point, and four for the group of each input."""
    groups = group_share(inputs, scheme.group_size)
    scales = len(outputs) * (groups.size if scheme.act_order else len(groups))
    unit = {2: 4, 3: 8, 4: 2, 8: 1}[scheme.bits]
    row = -(-len(inputs) // unit) * unit * scheme.bits // 8
    group_bytes = scheme.scale_bytes + (not scheme.symmetric)
    index_bytes = 4 * len(inputs) if scheme.act_order else 0
    return len(outputs) * row + scales * group_bytes + index_bytes + FORM_BYTES
