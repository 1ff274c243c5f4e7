"""Packed weights: frozen experts of 4 or 8 bits, as checkpoints store them (docs/packed.md).

moe(), lora_moe() and their other forms take PackedWeights in place of w_up and w_down. They give
the same bits as with packed.unpack().
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from . import _checks, _packed_ops
from ._names import PACKED
from ._packed_ops import DTYPES, limit_buffers, release_buffers

__all__ = [
    "PackedExperts",
    "PackedWeights",
    "from_bitsandbytes",
    "from_fp8_blocks",
    "from_mxfp4",
    "from_nf4",
    "limit_buffers",
    "pack",
    "pack_mxfp4",
    "pack_nf4",
    "pack_parameters",
    "release_buffers",
]

FORMATS = tuple(PACKED)
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK = 256
MX_BLOCK = 32
FP8_BLOCK = 128
# The values of the codes of NF4.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeights:
    """Frozen weights of all experts, (E, out, in). Make one by the from_* and pack_* functions.

    The tensors are kept as given, not copied. A change of them in place (copy_(),
    load_state_dict()) is seen by the next call; a change through `.data` between a forward and its
    backward is not.
    """

    format: str  # "nf4", "mxfp4", "fp8_blocks"
    shape: torch.Size  # (E, out, in) of the unpacked tensor
    dtype: torch.dtype  # of the unpacked tensor: bf16, fp16 or fp32
    codes: Tensor  # uint8; fp8_blocks: float8_e4m3fn
    # nf4: absmax of each block, fp32, or with nested_map uint8; mxfp4: uint8; fp8_blocks: fp32
    scales: Tensor
    block: int = 0  # nf4: elements that share an absmax
    nested_map: Tensor | None = None  # nf4, optional: (256,) fp32
    nested_scales: Tensor | None = None  # with nested_map: fp32, one for 256 blocks
    nested_offset: Tensor | None = None  # with nested_map: (1,) fp32
    transposed: bool = False  # the codes are those of the transposed weights (E, in, out)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def requires_grad(self) -> bool:
        return False

    def requires_grad_(self, requires_grad: bool = True) -> PackedWeights:
        if requires_grad:
            raise ValueError(
                "packed weights are frozen and have no gradient: train low-rank factors on them "
                "(lora_moe), or the result of unpack()"
            )
        return self

    @property
    def mT(self) -> PackedWeights:
        """The same weights with `out` and `in` exchanged, for a checkpoint that stores
        (E, in, out). No codes are moved: unpack() then returns a transposed view."""
        experts, out, inner = self.shape
        shape = torch.Size((experts, inner, out))
        return dataclasses.replace(self, shape=shape, transposed=not self.transposed)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        named = {name: getattr(self, name) for name in _packed_ops.PARTS}
        return {name: t for name, t in named.items() if t is not None}

    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def to(self, device=None, dtype: torch.dtype | None = None) -> PackedWeights:
        """On another device; with `dtype`, unpacked in another dtype. Codes and scales keep their
        own dtypes."""
        moved = {} if device is None else {n: t.to(device) for n, t in self.tensors().items()}
        if dtype is not None:
            _check_dtype(dtype)
            moved["dtype"] = dtype
        return dataclasses.replace(self, **moved)

    def unpack(self, out: Tensor | None = None) -> Tensor:
        """The weights (E, out, in) as a tensor: value of the code times scale, multiplied in fp32
        and rounded to `dtype`. Contiguous; after mT a transposed view of a contiguous tensor. With
        `out`, of this shape, order and dtype, it is written and returned."""
        _checks.supported(self.device)
        stored = _packed_ops.stored_shape(self.form())
        if out is None:
            target = torch.empty(stored, dtype=self.dtype, device=self.device)
        else:
            _checks.tensor("out", out)
            _checks.dtype("out", out, (self.dtype,))
            _checks.shape("out", out, "(E, out, in)", tuple(self.shape))
            _checks.on_device("out", out, self)
            target = out.transpose(1, 2) if self.transposed else out
            if not target.is_contiguous():
                raise ValueError(
                    f"out has strides {out.stride()}, must be contiguous"
                    + (" after transpose(1, 2)" if self.transposed else "")
                )
        _packed_ops.unpack(self, target)
        if out is not None:
            return out
        return target.transpose(1, 2) if self.transposed else target

    def form(self) -> tuple[int, ...]:
        """The numbers of _packed_ops.FORM."""
        number = DTYPES.index(self.dtype)
        return PACKED[self.format], self.block, number, int(self.transposed), *self.shape

    def like(self, dtype: torch.dtype) -> Tensor:
        """A tensor with the shape and device of the unpacked weights and no memory of its own, for
        checks of shapes."""
        return torch.empty((1, 1, 1), dtype=dtype, device=self.device).expand(self.shape)

    def __repr__(self) -> str:
        text = f"PackedWeights({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}"
        if self.format == "nf4":
            text += f", block={self.block}, nested={self.nested_map is not None}"
        return f"{text}, device={self.device})"


# ---- from the tensors of a checkpoint ------------------------------------------------------------


def _check_dtype(dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}, must be one of: {_checks.names(DTYPES)}")


def _check_finite(name: str, value: Tensor) -> None:
    """Refuses NaN and infinities; waits for the device. Such scales come from broken files."""
    if value.device.type != "meta" and not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} has NaN or infinite values, must be finite")


def _taken(name: str, value) -> Tensor:
    """`value` without its history, as a plain contiguous tensor: bitsandbytes' parameters are of a
    class of their own."""
    _checks.tensor(name, value)
    _checks.plain(name, value)
    return value.detach().as_subclass(Tensor).contiguous()


def _fp32(name: str, value, count: int, meaning: str) -> Tensor:
    """`value` as `count` contiguous fp32 numbers; other float dtypes are converted."""
    if value is None:
        raise ValueError(f"{name} is missing, must have {count} values: {meaning}")
    _checks.tensor(name, value)
    _checks.dtype(name, value)
    if value.numel() != count:
        raise ValueError(f"{name} has {value.numel()} values, must have {count}: {meaning}")
    _check_finite(name, value)
    return _taken(name, value).to(torch.float32)


def _bytes(name: str, value, count: int, meaning: str) -> Tensor:
    if value is None:
        raise ValueError(f"{name} is missing, must have {count} bytes: {meaning}")
    value = _taken(name, value)
    if value.dim() == 0:
        value = value.reshape(1)
    value = value.view(torch.uint8)
    if value.numel() != count:
        raise ValueError(f"{name} has {value.numel()} bytes, must have {count}: {meaning}")
    return value


def _one_device(packed: PackedWeights) -> PackedWeights:
    for name, value in packed.tensors().items():
        if value.device != packed.device:
            raise ValueError(
                f"{name} is on {value.device}, must be on codes' device {packed.device}"
            )
    return packed


def _sizes(shape) -> torch.Size:
    if len(shape) != 3 or any(int(size) < 1 for size in shape):
        raise ValueError(f"shape is {tuple(shape)}, must be (E, out, in) with sizes of at least 1")
    return torch.Size(int(size) for size in shape)


def from_nf4(
    codes: Tensor,
    absmax: Tensor,
    shape,
    *,
    block: int = 64,
    nested: tuple[Tensor, Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> PackedWeights:
    """NF4 as bitsandbytes stores it.

    codes: E*out*in/2 bytes in any shape and storage dtype; the high 4 bits of a byte are the even
    element. absmax: one for each `block` elements, fp32, or uint8 with `nested`. shape: (E, out,
    in), where `block` (32, 64, ... 4096) divides `in`. nested: (map (256,), scales of 256 blocks,
    offset (1,)), all fp32: absmax = map[code] * scale + offset. Waits for the device, because
    scales that are not finite are refused.
    """
    shape = _sizes(shape)
    _check_dtype(dtype)
    if block not in BLOCKS:
        raise ValueError(f"block is {block}, must be one of: {', '.join(map(str, BLOCKS))}")
    if shape[2] % block:
        raise ValueError(
            f"shape is {tuple(shape)} with block {block}: `in` must be a multiple of the block"
        )
    elements = math.prod(shape)
    codes = _bytes("codes", codes, elements // 2, "two elements a byte")
    blocks = elements // block
    if nested is None:
        absmax = _fp32("absmax", absmax, blocks, f"one for {block} elements")
        return _one_device(PackedWeights("nf4", shape, dtype, codes, absmax, block))
    if len(nested) != 3:
        raise ValueError(f"nested has {len(nested)} parts, must be (map, scales, offset)")
    absmax = _bytes("absmax", absmax, blocks, f"one for {block} elements")
    groups = -(-blocks // NESTED_BLOCK)
    values = _fp32("nested map", nested[0], 256, "one for each byte of absmax")
    scales = _fp32("nested scales", nested[1], groups, "one for 256 blocks")
    offset = _fp32("nested offset", nested[2], 1, "added to every absmax").reshape(1)
    packed = PackedWeights("nf4", shape, dtype, codes, absmax, block, values, scales, offset)
    return _one_device(packed)


def from_bitsandbytes(codes: Tensor, quant_state, shape=None) -> PackedWeights:
    """NF4 codes with their bitsandbytes QuantState; shape: (E, out, in), default: the state's."""
    state = quant_state
    if state.quant_type != "nf4":
        raise ValueError(f'quant_type is "{state.quant_type}", must be "nf4"')
    table = torch.tensor(NF4, device=state.code.device)
    if not torch.equal(state.code.float(), table):
        raise ValueError("quant_state.code is another table than NF4's")
    nested = None
    if state.nested:
        if state.state2.blocksize != NESTED_BLOCK:
            raise ValueError(f"the nested blocksize is {state.state2.blocksize}, must be 256")
        nested = (state.state2.code, state.state2.absmax, state.offset)
    shape = state.shape if shape is None else shape
    options = {"block": state.blocksize, "nested": nested, "dtype": state.dtype}
    return from_nf4(codes, state.absmax, shape, **options)


def from_mxfp4(
    blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> PackedWeights:
    """MXFP4 as gpt-oss stores it: blocks (E, out, in/32, 16) uint8, where the low 4 bits of a byte
    are the even element, and scales (E, out, in/32) uint8, 2^(s - 127).

    The rows keep their order: those of gpt-oss' gate_up_proj alternate, so pass
    gate_layout="interleaved". Waits for the device, because scales of 255 (NaN) are refused.
    """
    _check_dtype(dtype)
    _checks.tensor("blocks", blocks)
    _checks.dtype("blocks", blocks, (torch.uint8,))
    _checks.shape("blocks", blocks, "(E, out, in/32, 16)", (None, None, None, 16))
    shape = _sizes((*blocks.shape[:2], blocks.shape[2] * MX_BLOCK))
    _checks.given("scales", scales)
    _checks.dtype("scales", scales, (torch.uint8,))
    _checks.shape("scales", scales, "(E, out, in/32)", tuple(blocks.shape[:3]))
    if scales.device.type != "meta" and bool((scales == 255).any()):
        raise ValueError("scales has the value 255 (NaN), must be at most 254")
    parts = _taken("blocks", blocks), _taken("scales", scales)
    return _one_device(PackedWeights("mxfp4", shape, dtype, *parts))


def from_fp8_blocks(
    codes: Tensor, scale_inv: Tensor, *, dtype: torch.dtype = torch.bfloat16
) -> PackedWeights:
    """FP8 as DeepSeek-V3 and Qwen3 store it: codes (E, out, in) float8_e4m3fn, scale_inv (E,
    out/128, in/128), rounded up, one for 128 x 128 elements: weight = code * scale_inv. Waits for
    the device, because scales that are not finite are refused."""
    _check_dtype(dtype)
    _checks.tensor("codes", codes)
    _checks.dtype("codes", codes, (torch.float8_e4m3fn,))
    _checks.shape("codes", codes, "(E, out, in)", (None, None, None))
    shape = _sizes(codes.shape)
    _checks.given("scale_inv", scale_inv)
    grid = (shape[0], -(-shape[1] // FP8_BLOCK), -(-shape[2] // FP8_BLOCK))
    _checks.shape("scale_inv", scale_inv, "(E, out/128, in/128)", grid)
    scales = _fp32("scale_inv", scale_inv, math.prod(grid), "one for 128 x 128 elements")
    codes = _taken("codes", codes)
    return _one_device(PackedWeights("fp8_blocks", shape, dtype, codes, scales))


# ---- packing -------------------------------------------------------------------------------------


def _check_weights(weights: Tensor, block: int) -> torch.Size:
    _checks.tensor("weights", weights)
    _checks.dtype("weights", weights, DTYPES)
    shape = _sizes(weights.shape)
    if shape[2] % block:
        raise ValueError(
            f"weights has shape {tuple(shape)}, `in` must be a multiple of the block {block}"
        )
    return shape


def _blocks_of(expert: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The elements (blocks, block) of an expert in fp32, and their largest magnitudes (blocks,)."""
    values = expert.detach().to(torch.float32).reshape(-1, block)
    return values, values.abs().amax(1)


def _joined(codes: Tensor, first: int) -> Tensor:
    """Two codes in a byte; `first` is the shift of the even one."""
    return codes[..., 0::2] << first | codes[..., 1::2] << (4 - first)


def _nested(absmax: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Codes of absmax, and (map, scales, offset). The map is linear: absmax of one tensor differ
    little, so their differences from the mean need no finer steps near 0."""
    offset = absmax.mean().reshape(1)
    differences = absmax - offset
    padded = torch.nn.functional.pad(differences, (0, -absmax.numel() % NESTED_BLOCK))
    groups = padded.reshape(-1, NESTED_BLOCK)
    scales = groups.abs().amax(1)
    steps = groups / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = (steps * 127.0).round().to(torch.int16) + 128
    values = (torch.arange(256, dtype=torch.float32, device=absmax.device) - 128) / 127.0
    return codes.to(torch.uint8).flatten()[: absmax.numel()], (values, scales, offset)


@torch.inference_mode(False)  # backward may read the codes
@torch.no_grad()
def pack_nf4(weights: Tensor, *, block: int = 64, nested: bool = False) -> PackedWeights:
    """Weights (E, out, in) in bf16, fp16 or fp32 to the nearest NF4 codes; `block` divides `in`.
    nested: absmax takes one byte for `block` elements instead of four. Experts are packed one by
    one, so that no fp32 copy of all weights is made. Weights that are NaN or infinite are refused.
    """
    shape = _check_weights(weights, block)
    if block not in BLOCKS:
        raise ValueError(f"block is {block}, must be one of: {', '.join(map(str, BLOCKS))}")
    experts, rows, columns = shape
    codes = weights.new_empty((experts, rows, columns // 2), dtype=torch.uint8)
    absmax = weights.new_empty((experts, rows, columns // block), dtype=torch.float32)
    table = torch.tensor(NF4, device=weights.device)
    middles = (table[1:] + table[:-1]) / 2
    for e in range(experts):
        values, largest = _blocks_of(weights[e], block)
        scaled = values / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        found = torch.bucketize(scaled, middles).to(torch.uint8)
        codes[e] = _joined(found, 4).reshape(rows, columns // 2)
        absmax[e] = largest.reshape(rows, columns // block)
    _check_finite("weights", absmax)
    if not nested:
        return from_nf4(codes, absmax, shape, block=block, dtype=weights.dtype)
    coded, rest = _nested(absmax.flatten())
    coded = coded.reshape(absmax.shape)
    return from_nf4(codes, coded, shape, block=block, nested=rest, dtype=weights.dtype)


@torch.inference_mode(False)  # backward may read the codes
@torch.no_grad()
def pack_mxfp4(weights: Tensor) -> PackedWeights:
    """Weights (E, out, in) in bf16, fp16 or fp32 to MXFP4; 32 divides `in`. The scale is the power
    of two for which the largest element of a block is in [4, 8); elements are rounded to nearest
    even, those above 6 to 6. Weights that are NaN or infinite are refused."""
    experts, rows, columns = _check_weights(weights, MX_BLOCK)
    shape = (experts, rows, columns // MX_BLOCK)
    codes = weights.new_empty((*shape, MX_BLOCK // 2), dtype=torch.uint8)
    scales = weights.new_empty(shape, dtype=torch.uint8)
    largest_of_all = weights.new_empty(experts, dtype=torch.float32)
    for e in range(experts):
        values, largest = _blocks_of(weights[e], MX_BLOCK)
        largest_of_all[e] = largest.amax()
        exponents = (torch.frexp(largest).exponent - 3).clamp(-127, 127)
        scaled = torch.ldexp(values, -exponents[:, None])
        a = scaled.abs()
        found = (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
        found = found + (a > 2.5) + (a >= 3.5) + (a > 5.0) + 8 * torch.signbit(scaled)
        codes[e] = _joined(found.to(torch.uint8), 0).reshape(codes.shape[1:])
        scales[e] = (exponents + 127).to(torch.uint8).reshape(shape[1:])
    _check_finite("weights", largest_of_all)
    return from_mxfp4(codes, scales, dtype=weights.dtype)


def pack(weights: Tensor, format: str, **options) -> PackedWeights:
    """pack_nf4() or pack_mxfp4(), by the name of the format."""
    makers = {"nf4": pack_nf4, "mxfp4": pack_mxfp4}
    _checks.one_of("format", format, makers)
    return makers[format](weights, **options)


# ---- in modules ----------------------------------------------------------------------------------


def _kinds(tensors: dict[str, Tensor]) -> str:
    """The names, dtypes and shapes of the tensors of a format."""
    return ", ".join(
        f"{name} {_checks.names([t.dtype])} {tuple(t.shape)}" for name, t in tensors.items()
    )


class PackedExperts(nn.Module):
    """Holds PackedWeights in a module, as buffers: state_dict() has codes and scales under the
    names of PackedWeights. Calling it returns the PackedWeights.

    Casts of the module (bfloat16(), to(dtype)) change the dtype of the unpacked weights, never
    codes or scales.
    """

    def __init__(self, weights: PackedWeights):
        super().__init__()
        self.weights_without_tensors = dataclasses.replace(
            weights, **dict.fromkeys(_packed_ops.PARTS)
        )
        for name in _packed_ops.PARTS:
            self.register_buffer(name, getattr(weights, name))

    def forward(self) -> PackedWeights:
        tensors = {name: getattr(self, name) for name in _packed_ops.PARTS}
        return dataclasses.replace(self.weights_without_tensors, **tensors)

    def _apply(self, fn, recurse=True):
        # `fn` casts tensors of float dtypes. Bytes have none, so they are only moved.
        for name, value in self._buffers.items():
            if value is not None:
                self._buffers[name] = fn(value.view(torch.uint8)).view(value.dtype)
        dtype = fn(torch.empty((0,), dtype=self.dtype, device=self.device)).dtype
        if dtype in DTYPES:
            weights = dataclasses.replace(self.weights_without_tensors, dtype=dtype)
            self.weights_without_tensors = weights
        return self

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ):
        # Refuses another format as a whole. torch would copy the tensors that fit, and NF4's codes
        # with scales of another file are weights, too.
        name = prefix[:-1]
        parts = {n: state_dict[prefix + n] for n in _packed_ops.PARTS if prefix + n in state_dict}
        own = {n: t for n, t in self._buffers.items() if t is not None}
        if name in unexpected:
            unexpected[:] = [key for key in unexpected if key != name]
            errors.append(
                f"{name} of the state dict is not packed, must have {_kinds(own)}: load it before "
                "it is packed"
            )
        elif parts and _kinds(parts) != _kinds(own):
            errors.append(
                f"{name} of the state dict has {_kinds(parts)}, must have {_kinds(own)}: pack it "
                "in the format and blocks of the state dict"
            )
        else:
            super()._load_from_state_dict(
                state_dict, prefix, metadata, strict, missing, unexpected, errors
            )

    @property
    def shape(self) -> torch.Size:
        return self.weights_without_tensors.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weights_without_tensors.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def requires_grad(self) -> bool:
        return False

    def extra_repr(self) -> str:
        weights = self.weights_without_tensors
        return f"{weights.format}, shape={tuple(weights.shape)}, dtype={weights.dtype}"


def pack_parameters(module: nn.Module, names, format: str, **options) -> None:
    """Replaces parameters (E, out, in) of a module by PackedExperts of the same names: pack() of
    each with `format` and `options`. If one is refused, the module does not change."""
    found = {}
    for name in names:
        weights = getattr(module, name)
        if isinstance(weights, PackedExperts):
            raise ValueError(f"{name} is packed already")
        _checks.tensor(name, weights)
        found[name] = PackedExperts(pack(weights, format, **options))
    for name, packed in found.items():
        delattr(module, name)
        setattr(module, name, packed)


# ---- in calls ------------------------------------------------------------------------------------


def of_experts(w_up, w_down) -> tuple[PackedWeights, PackedWeights] | None:
    """The weights of a call if they are packed, None if they are tensors."""
    if isinstance(w_up, Tensor) and isinstance(w_down, Tensor):  # in most calls
        return None
    if isinstance(w_up, (tuple, list)) and any(isinstance(w, PackedWeights) for w in w_up):
        raise TypeError("w_up is a pair (gate, up), must be one PackedWeights with gate and up")
    packed = [isinstance(w, PackedWeights) for w in (w_up, w_down)]
    if not any(packed):
        return None
    if not all(packed):
        name, value = ("w_down", w_down) if packed[0] else ("w_up", w_up)
        raise TypeError(
            f"{name} is {type(value).__name__}, must be PackedWeights as the other weight"
        )
    return w_up, w_down


def refuse_unpacked_options(grad_accum, fp8_weights) -> None:
    if grad_accum is not None:
        raise ValueError("grad_accum is given, must be None: packed weights are frozen")
    if fp8_weights is not None:
        raise ValueError("fp8_weights is given, must be None: the weights are packed")
