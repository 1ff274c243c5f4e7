"""Packed weights for the tests: all formats with random codes, and another decoding of them."""

import sonicmoe_cpp
import torch
from sonicmoe_cpp import packed

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMATS = ("nf4", "nf4_nested", "mxfp4", "fp8_blocks")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_codes(shape, generator):
    """Bytes with every value, if there are at least 256."""
    codes = torch.randint(256, torch.Size(shape), generator=generator, dtype=torch.uint8)
    first = codes.view(-1)[:256]
    first.copy_(torch.randperm(256, generator=generator)[: first.numel()])
    return codes


def make(format, shape, dtype=torch.bfloat16, seed=0, block=64):
    """Packed weights (E, out, in) whose values are about as large as those of a layer."""
    experts, rows, columns = shape
    random = torch.Generator().manual_seed(seed)

    def scales(*size):
        return torch.rand(size, generator=random) * 0.1 + 0.01

    if format == "mxfp4":
        codes = random_codes((experts, rows, columns // 32, 16), random)
        exponents = torch.randint(120, 126, codes.shape[:3], generator=random).to(torch.uint8)
        return packed.from_mxfp4(codes, exponents, dtype=dtype)
    if format == "fp8_blocks":
        codes = random_codes(shape, random)
        codes[codes % 128 == 127] = 3  # NaN
        grid = (experts, -(-rows // 128), -(-columns // 128))
        fp8 = codes.view(torch.float8_e4m3fn)
        return packed.from_fp8_blocks(fp8, scales(*grid) * 0.01, dtype=dtype)
    codes = random_codes((experts, rows, columns // 2), random)
    blocks = experts * rows * columns // block
    if format == "nf4":
        return packed.from_nf4(codes, scales(blocks), shape, block=block, dtype=dtype)
    nested = (torch.linspace(-1, 1, 256), scales(-(-blocks // 256)), torch.tensor([0.2]))
    absmax = random_codes((blocks,), random)
    return packed.from_nf4(codes, absmax, shape, block=block, nested=nested, dtype=dtype)


def decoded(weights):
    """The values of packed weights, by tables and definitions of this file."""
    experts, rows, columns = weights.shape
    scales = weights.scales
    if weights.format == "fp8_blocks":
        grid = (experts, -(-rows // 128), -(-columns // 128))
        each = scales.reshape(grid).repeat_interleave(128, 1).repeat_interleave(128, 2)
        return (weights.codes.float() * each[:, :rows, :columns]).to(weights.dtype)
    flat = weights.codes.flatten()
    if weights.format == "mxfp4":
        table = torch.tensor(E2M1 + tuple(-v for v in E2M1))
        both = table[torch.stack((flat & 15, flat >> 4), 1).long()]
        exponents = scales.flatten().int() - 127
        each = torch.ldexp(torch.ones(exponents.shape), exponents)
        return (both.reshape(-1, 32) * each[:, None]).reshape(weights.shape).to(weights.dtype)
    if weights.nested_map is not None:
        groups = weights.nested_scales.repeat_interleave(256)[: scales.numel()]
        scales = weights.nested_map[scales.long()] * groups + weights.nested_offset
    both = torch.tensor(packed.NF4)[torch.stack((flat >> 4, flat & 15), 1).long()]
    values = both.reshape(-1, weights.block) * scales[:, None]
    return values.reshape(weights.shape).to(weights.dtype)


class Problem:
    """Inputs of a layer with T tokens, on a device."""

    def __init__(self, device="cpu", dtype=torch.bfloat16, sizes=(40, 128, 64, 4, 2), seed=0):
        self.T, self.d, self.n, self.E, self.K = sizes
        self.device, self.dtype = device, dtype
        random = torch.Generator().manual_seed(seed)

        def normal(*size, scale=1.0):
            return (torch.randn(size, generator=random) * scale).to(device, dtype)

        self.x, self.dout = normal(self.T, self.d), normal(self.T, self.d)
        self.ids = torch.rand(self.T, self.E, generator=random).topk(self.K).indices.to(device)
        self.scores = torch.rand(self.T, self.K, generator=random).to(device)
        self.b_up, self.b_down = normal(self.E, 2 * self.n), normal(self.E, self.d)
        r = 8
        self.factors = [
            normal(self.E, r, self.d, scale=self.d**-0.5),
            normal(self.E, 2 * self.n, r, scale=0.1),
            normal(self.E, r, self.n, scale=self.n**-0.5),
            normal(self.E, self.d, r, scale=0.1),
        ]

    def weights(self, format, order="K"):
        """Packed (w_up, w_down), with codes in the order (E, out, in) or (E, in, out)."""
        shapes = ((self.E, 2 * self.n, self.d), (self.E, self.d, self.n))
        found = []
        for seed, (experts, out, inner) in enumerate(shapes):
            if order == "K":
                made = make(format, (experts, out, inner), self.dtype, seed)
            else:
                made = make(format, (experts, inner, out), self.dtype, seed).mT
            found.append(made.to(self.device))
        return found

    def pairs(self):
        token = torch.arange(self.T, device=self.device).repeat_interleave(self.K)
        return token.int(), self.ids.flatten().int(), self.scores.flatten()

    def run(self, form, w_up, w_down, *, biases=False, lora=False, wrap=None, **options):
        """The output and all gradients of a form of the layer, as a list of tensors."""
        x = self.x.clone().requires_grad_()
        leaves = [x]
        if biases:
            options["b_up"], options["b_down"] = (
                b.clone().requires_grad_(not lora) for b in (self.b_up, self.b_down)
            )
            leaves += [options["b_up"], options["b_down"]]
        if lora:
            f = [t.clone().requires_grad_() for t in self.factors]
            leaves += f
            options["up"] = sonicmoe_cpp.LowRank(f[0], f[1], 0.5)
            options["down"] = sonicmoe_cpp.LowRank(f[2], f[3], 2.0)
        prefix = "lora_moe" if lora else "moe"
        wrap = wrap or (lambda call: call)
        if form == "grouped":
            offsets = torch.linspace(0, self.T, self.E + 1).long().to(self.device)
            scores = self.scores[:, 0].clone().requires_grad_()
            call = wrap(getattr(sonicmoe_cpp, f"{prefix}_grouped"))
            out = call(x, offsets, w_up, w_down, row_weights=scores, **options)
        elif form == "pairs":
            token, expert, scores = self.pairs()
            scores = scores.clone().requires_grad_()
            call = wrap(getattr(sonicmoe_cpp, f"{prefix}_pairs"))
            out = call(x, (token, expert, scores), w_up, w_down, **options)
        else:
            scores = self.scores.clone().requires_grad_()
            out = wrap(getattr(sonicmoe_cpp, prefix))(x, self.ids, scores, w_up, w_down, **options)
        out.backward(self.dout)
        return [out.detach(), scores.grad, *(t.grad for t in leaves if t.requires_grad)]


def same_bits(a, b):
    """Whether two lists of tensors have the same bits."""
    return len(a) == len(b) and all(
        s.dtype == t.dtype and s.shape == t.shape and torch.equal(s, t)
        for s, t in zip(a, b, strict=True)
    )
