"""Packed weights against other decodings (this test's own, bitsandbytes', transformers'), for every
byte value; packing; refusals."""

import math
import types

import packed_support
import pytest
import sonicmoe_cpp
import torch
from packed_support import FORMATS, decoded, make
from sonicmoe_cpp import PackedWeights, packed

SHAPES = ((2, 24, 128), (3, 40, 192), (1, 256, 256))


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", packed_support.DTYPES)
def test_every_byte_value(format, dtype):
    for shape in SHAPES:
        weights = make(format, shape, dtype)
        assert len(weights.codes.view(torch.uint8).unique()) >= 254
        assert same(weights.unpack(), decoded(weights))


def test_every_scale_of_mxfp4():
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255)[: 255 * 16 * 16]
    blocks = blocks.reshape(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 16)
    for dtype in packed_support.DTYPES:
        weights = packed.from_mxfp4(blocks, scales, dtype=dtype)
        assert same(weights.unpack(), decoded(weights))


def test_every_code_of_fp8():
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 2, 128).view(torch.float8_e4m3fn)
    scale = torch.tensor([[[1.5 * 2.0**-9]]])
    values = packed.from_fp8_blocks(codes, scale, dtype=torch.float32).unpack()
    assert same(values, codes.float() * scale)
    assert values.isnan().sum() == 2


# ---- others' decoding ----------------------------------------------------------------------------


@pytest.mark.parametrize("block", (32, 64, 128))
@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("dtype", packed_support.DTYPES)
def test_bitsandbytes(block, nested, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(block)
    shape = (3, 40, 256)
    weights = torch.randn(shape).to(dtype)
    codes, state = functional.quantize_4bit(
        weights, blocksize=block, quant_type="nf4", compress_statistics=nested
    )
    every = torch.arange(256, dtype=torch.uint8).repeat(codes.numel() // 256 + 1)
    for given in (codes, every[: codes.numel()].reshape(codes.shape)):
        theirs = functional.dequantize_4bit(given, state).reshape(shape)
        ours = packed.from_bitsandbytes(given, state)
        assert (ours.nested_map is not None) == nested and ours.dtype == dtype
        assert torch.equal(ours.unpack(), theirs)


def test_bitsandbytes_parameters():
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(1)
    weights = torch.randn(2 * 64, 128).bfloat16()
    made = bnb.nn.Params4bit(weights, quant_type="nf4", requires_grad=False).to("cpu")
    ours = packed.from_bitsandbytes(made, made.quant_state, (2, 64, 128))
    assert type(ours.codes) is torch.Tensor
    theirs = bnb.functional.dequantize_4bit(made, made.quant_state)
    assert torch.equal(ours.unpack().reshape(128, 128), theirs)


@pytest.mark.parametrize("nested", (False, True))
def test_bitsandbytes_reads_what_we_pack(nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(1)
    weights = torch.randn(3, 40, 256).bfloat16()
    ours = packed.pack_nf4(weights, nested=nested)
    rest = {}
    if nested:
        state2 = functional.QuantState(
            ours.nested_scales, blocksize=256, code=ours.nested_map, dtype=torch.float32
        )
        rest = {"offset": ours.nested_offset[0], "state2": state2}
    state = functional.QuantState(
        ours.scales.flatten(),
        shape=weights.shape,
        dtype=weights.dtype,
        blocksize=64,
        quant_type="nf4",
        code=torch.tensor(packed.NF4),
        **rest,
    )
    theirs = functional.dequantize_4bit(ours.codes.reshape(-1, 1), state).reshape(weights.shape)
    assert torch.equal(ours.unpack(), theirs)
    if not nested:
        codes, _ = functional.quantize_4bit(weights, blocksize=64, quant_type="nf4")
        differ = (codes.flatten() != ours.codes.flatten()).float().mean()
        assert differ < 1e-3  # values in the middle between two codes


def test_transformers_mxfp4():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    weights = make("mxfp4", (2, 48, 256))
    theirs = mxfp4._convert_moe_packed_tensors(weights.codes, weights.scales)
    # transformers has the weights as (E, in, out).
    assert torch.equal(weights.unpack(), theirs.transpose(1, 2))
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16).repeat(1, 1, 250, 1)
    scales = torch.arange(1, 251, dtype=torch.uint8).expand(1, 16, 250)
    theirs = mxfp4._convert_moe_packed_tensors(blocks, scales)
    ours = packed.from_mxfp4(blocks, scales).unpack()
    assert torch.equal(ours, theirs.transpose(1, 2))


def test_transformers_fp8():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weights = make("fp8_blocks", (2, 256, 384))
    grid = weights.scales.reshape(2, 2, 3)
    # As transformers decodes at load. In its own backward it rounds scales to the dtype first.
    at_load = fp8.Fp8Dequantize(None)
    theirs = [
        at_load._dequantize_one(*each, torch.bfloat16)
        for each in zip(weights.codes, grid, strict=True)
    ]
    assert torch.equal(weights.unpack(), torch.stack(theirs))
    weights = weights.to(dtype=torch.float32)
    theirs = fp8._dequantize_fp8_weight(weights.codes, grid, (128, 128), torch.float32)
    assert torch.equal(weights.unpack(), theirs)


# ---- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ("nf4", "mxfp4"))
@pytest.mark.parametrize("dtype", packed_support.DTYPES)
def test_packing_twice_changes_nothing(format, dtype):
    torch.manual_seed(2)
    weights = torch.randn(2, 40, 128).to(dtype)
    weights[0, 0, :64] = 0.0
    once = packed.pack(weights, format)
    values = once.unpack()
    assert once.dtype == dtype and torch.equal(values[0, 0, :64], weights[0, 0, :64])
    assert torch.equal(packed.pack(values, format).unpack(), values)


def test_packing_takes_the_nearest_code():
    torch.manual_seed(2)
    weights = torch.randn(1, 8, 256)
    nf4 = packed.pack_nf4(weights).unpack()
    blocks = weights.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    table = torch.tensor(packed.NF4)
    nearest = (blocks[..., None] - table * largest[..., None]).abs().amin(-1)
    assert torch.allclose((nf4 - weights).abs().reshape(-1, 64), nearest, atol=1e-6)

    mxfp4 = packed.pack_mxfp4(weights)
    blocks = weights.reshape(-1, 32)
    scale = 2.0 ** (blocks.abs().amax(1, keepdim=True).log2().floor() - 2)
    table = torch.tensor(packed_support.E2M1)
    nearest = ((blocks / scale).abs()[..., None] - table).abs().amin(-1)
    ours = (mxfp4.unpack().reshape(-1, 32) / scale - blocks / scale).abs()
    assert torch.allclose(ours, nearest, atol=1e-6)
    assert (nf4 - weights).norm() < 0.1 * weights.norm()


def test_mxfp4_rounds_to_even_and_saturates():
    row = torch.zeros(1, 1, 32)
    row[0, 0, :9] = torch.tensor([7.9, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0, -0.0])
    values = packed.pack_mxfp4(row).unpack()[0, 0]
    assert values[:9].tolist() == [6.0, 0.0, 1.0, 1.0, -2.0, 2.0, 4.0, 4.0, 0.0]
    assert math.copysign(1.0, values[8].item()) == -1.0


def test_nested_absmax_is_close():
    torch.manual_seed(2)
    weights = torch.randn(4, 64, 1024)
    plain, nested = packed.pack_nf4(weights), packed.pack_nf4(weights, nested=True)
    assert (nested.unpack() - plain.unpack()).norm() < 0.01 * plain.unpack().norm()
    assert nested.nbytes() < 0.93 * plain.nbytes()
    constant = packed.pack_nf4(torch.ones(1, 1, 64), nested=True)
    assert torch.equal(constant.unpack(), torch.ones(1, 1, 64))


# ---- refusals ------------------------------------------------------------------------------------


def nf4(**changed):
    given = {"codes": torch.zeros(512, dtype=torch.uint8), "absmax": torch.ones(16)}
    given |= {"shape": (2, 4, 128)} | changed
    return packed.from_nf4(**given)


MAP, NESTED, OFFSET = torch.zeros(256), torch.ones(1), torch.zeros(1)
CODED = torch.zeros(16, dtype=torch.uint8)


@pytest.mark.parametrize(
    "changed, error, sentence",
    (
        ({"codes": None}, ValueError, "codes is missing, must have 512 bytes: two elements a byte"),
        ({"codes": [1]}, TypeError, "codes is list, must be a torch.Tensor"),
        ({"codes": torch.zeros(511, dtype=torch.uint8)}, ValueError, "codes has 511 bytes, must"),
        ({"absmax": None}, ValueError, "absmax is missing, must have 16 values: one for 64 elem"),
        ({"absmax": torch.ones(8)}, ValueError, "absmax has 8 values, must have 16: one for 64"),
        ({"absmax": CODED}, TypeError, "absmax has dtype uint8, must be bfloat16, float16"),
        (
            {"absmax": torch.full((16,), float("nan"))},
            ValueError,
            "absmax has NaN or infinite values, must be finite",
        ),
        (
            {"shape": (4, 128)},
            ValueError,
            r"shape is \(4, 128\), must be \(E, out, in\) with sizes",
        ),
        ({"shape": (0, 4, 128)}, ValueError, r"shape is \(0, 4, 128\), must be \(E, out, in\)"),
        ({"block": 48}, ValueError, "block is 48, must be one of: 32, 64, 128, 256"),
        (
            {"block": 256},
            ValueError,
            r"shape is \(2, 4, 128\) with block 256: `in` must be a multi",
        ),
        ({"dtype": torch.float64}, TypeError, "dtype is torch.float64, must be one of: bfloat16"),
        ({"nested": (MAP, NESTED)}, ValueError, r"nested has 2 parts, must be \(map, scales, offs"),
        ({"nested": (MAP, NESTED, OFFSET)}, ValueError, "absmax has 64 bytes, must have 16"),
        (
            {"absmax": CODED, "nested": (MAP[:16], NESTED, OFFSET)},
            ValueError,
            "nested map has 16 values, must have 256",
        ),
        (
            {"absmax": CODED, "nested": (MAP, torch.ones(2), OFFSET)},
            ValueError,
            "nested scales has 2 values, must have 1: one for 256 blocks",
        ),
        (
            {"absmax": CODED, "nested": (MAP, NESTED, None)},
            ValueError,
            "nested offset is missing, must have 1 values",
        ),
        (
            {"absmax": CODED, "nested": (MAP, NESTED * float("inf"), OFFSET)},
            ValueError,
            "nested scales has NaN or infinite values, must be finite",
        ),
        ({"absmax": torch.ones(16, device="meta")}, ValueError, "scales is on meta, must be on co"),
    ),
)
def test_refusals_of_nf4(changed, error, sentence):
    with pytest.raises(error, match=sentence):
        nf4(**changed)


def test_refusals_of_other_formats():
    blocks = torch.zeros(2, 4, 3, 16, dtype=torch.uint8)
    scales = torch.full((2, 4, 3), 127, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"blocks has shape \(2, 4, 48\), must be \(E, out, in/32"):
        packed.from_mxfp4(blocks.flatten(2), scales)
    with pytest.raises(ValueError, match=r"scales has shape \(2, 4\), must be \(E, out, in/32\)"):
        packed.from_mxfp4(blocks, scales[..., 0])
    with pytest.raises(TypeError, match="scales is NoneType, must be a"):
        packed.from_mxfp4(blocks, None)
    with pytest.raises(ValueError, match=r"scales has the value 255 \(NaN\), must be at most 254"):
        packed.from_mxfp4(blocks, scales + 128)
    codes = torch.zeros(2, 200, 128).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="codes has dtype uint8, must be float8_e4m3fn"):
        packed.from_fp8_blocks(codes.view(torch.uint8), torch.ones(2, 2, 1))
    with pytest.raises(
        ValueError, match=r"scale_inv has shape \(2, 1, 1\), must be .* = \(2, 2, 1"
    ):
        packed.from_fp8_blocks(codes, torch.ones(2, 1, 1))
    with pytest.raises(ValueError, match="scale_inv has NaN or infinite values, must be finite"):
        packed.from_fp8_blocks(codes, torch.full((2, 2, 1), float("nan")))
    state = types.SimpleNamespace(quant_type="fp4")
    with pytest.raises(ValueError, match='quant_type is "fp4", must be "nf4"'):
        packed.from_bitsandbytes(codes, state)
    state = types.SimpleNamespace(quant_type="nf4", code=torch.zeros(16))
    with pytest.raises(ValueError, match="another table than NF4's"):
        packed.from_bitsandbytes(codes, state)


def test_refusals_of_packing():
    weights = torch.zeros(1, 2, 64)
    weights[0, 1, 3] = float("nan")
    for format in ("nf4", "mxfp4"):
        with pytest.raises(ValueError, match="weights has NaN or infinite values, must be finite"):
            packed.pack(weights, format)
    with pytest.raises(
        ValueError, match=r"weights has shape \(1, 2, 48\), `in` must be a multiple"
    ):
        packed.pack_nf4(torch.zeros(1, 2, 48))
    with pytest.raises(ValueError, match='format is "fp4", must be one of: nf4, mxfp4'):
        packed.pack(weights, "fp4")


def test_refusals_of_calls():
    problem = packed_support.Problem()
    w_up, w_down = problem.weights("nf4")
    x, ids, scores = problem.x, problem.ids, problem.scores

    def refused(error, sentence, *weights, **options):
        with pytest.raises(error, match=sentence):
            sonicmoe_cpp.moe(x, ids, scores, *weights, **options)

    plain = w_down.unpack()
    refused(TypeError, "w_down is Tensor, must be PackedWeights as the other weight", w_up, plain)
    refused(TypeError, "w_up is Tensor, must be PackedWeights as the other", plain, w_down)
    refused(
        TypeError, r"w_up is a pair \(gate, up\), must be one PackedWeights", (w_up, w_up), w_down
    )
    main = (torch.zeros(w_up.shape), torch.zeros(w_down.shape))
    sentence = "grad_accum is given, must be None: packed weights are frozen"
    refused(ValueError, sentence, w_up, w_down, grad_accum=main)
    refused(ValueError, r"w_down has shape \(4, 64, 128\), must be \(E, d, n\)", w_up, w_down.mT)
    other = w_down.to(dtype=torch.float16)
    refused(TypeError, "w_down has dtype float16, must be x's bfloat16", w_up, other)
    quantised = sonicmoe_cpp.Fp8Weights(torch.zeros(1, dtype=torch.uint8), 4, 2, 64, 128)
    sentence = "fp8_weights is given, must be None: the weights are packed"
    refused(ValueError, sentence, w_up, w_down, precision="fp8", fp8_weights=quantised)
    with pytest.raises(ValueError, match="packed weights are frozen and have no gradient"):
        w_up.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: sonicmoe_cpp.moe(x, ids, scores, w_up, w_down).sum())(x)
    with pytest.raises(ValueError, match=r"out has strides .*, must be contiguous"):
        w_up.unpack(torch.empty(4, 128, 128, dtype=torch.bfloat16).mT)
    with pytest.raises(TypeError, match="out has dtype float32, must be bfloat16"):
        w_up.unpack(torch.empty(4, 128, 128))


def test_refusals_of_modules():
    module = sonicmoe_cpp.MoE(4, 2, 128, 64)
    module.pack("nf4")
    with pytest.raises(ValueError, match="w_up is packed already"):
        module.pack("nf4")
    with pytest.raises(ValueError, match="w_up is packed, must be a parameter to be reset"):
        module.reset_parameters()


def test_the_type_is_immutable():
    weights = make("nf4", (1, 4, 64))
    with pytest.raises(AttributeError):
        weights.dtype = torch.float16
    assert isinstance(weights, PackedWeights) and not weights.requires_grad
    assert weights.requires_grad_(False) is weights
    assert "nf4, shape=(1, 4, 64)" in repr(weights)
    assert weights.nbytes() == 128 + 4 * 4
