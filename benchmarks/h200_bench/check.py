"""Compares every result of one forward and backward with torch, before anything is timed."""

from __future__ import annotations

import torch

from .layer import Data

# Limits of a row's error over the root mean square norm of all rows: the largest and the mean
# error. bf16 rounds H, A, Y, dH and the result, each by up to 2^-9, and with few rows an expert
# some rows of dW are much larger than the mean. A row that is zero or swapped has an error of about
# 1.
LARGEST, MEAN = 1.2e-1, 1e-2


def stable_topk(logits, k):
    """The K largest, the lower index on ties."""
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def reference(data: Data, token, weight, counts):
    """out, dx, dw_up, dw_down, dweight of rows (token, weight) grouped by expert, expert by expert.

    Matmuls in bf16 with fp32 sums, everything between them in fp32.
    """
    s = data.shape
    out = torch.zeros(s.T, s.d, device=data.device)
    dx = torch.zeros_like(out)
    dweight = torch.zeros_like(weight)
    dw_up, dw_down = torch.zeros_like(data.w_up), torch.zeros_like(data.w_down)
    begin = 0
    for e, count in enumerate(counts):
        rows = slice(begin, begin + count)
        begin += count
        if count == 0:
            continue
        t, score = token[rows], weight[rows, None]
        x, dout = data.x[t], data.dout[t]
        h = x @ data.w_up[e].T
        gate, up = h[:, : s.n].float(), h[:, s.n :].float()
        sigmoid = gate.sigmoid()
        a = gate * sigmoid * up
        out.index_add_(0, t, (a.bfloat16() @ data.w_down[e].T).float() * score)
        da = (dout @ data.w_down[e]).float()
        dweight[rows] = (da * a).sum(-1)
        dw_down[e] = dout.T @ (a * score).bfloat16()
        da = da * score
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        dh = torch.cat([da * up * slope, da * gate * sigmoid], -1).bfloat16()
        dw_up[e] = dh.T @ x
        dx.index_add_(0, t, (dh @ data.w_up[e]).float())
    return {"out": out, "dx": dx, "dw_up": dw_up, "dw_down": dw_down, "dweight": dweight}


def row_errors(got, want):
    """Error of each row over the rms row norm; in parts, because dw_up does not fit twice in
    fp32."""
    got, want = got.reshape(-1, got.shape[-1]), want.reshape(-1, want.shape[-1])
    parts = list(zip(got.split(1 << 18), want.split(1 << 18), strict=True))
    scale = sum(w.float().square().sum() for _, w in parts) / want.shape[0]
    return torch.cat([(g.float() - w.float()).norm(dim=-1) for g, w in parts]) / scale.sqrt()


def require_close(what, got, want):
    errors = row_errors(got, want)
    largest, mean = errors.max().item(), errors.mean().item()
    if not (largest <= LARGEST and mean <= MEAN):
        raise SystemExit(f"{what} is wrong: error of a row {largest:.1e} at most, {mean:.1e} mean")
    return largest


class Checker:
    """The results of torch for one sample of the data."""

    def __init__(self, data: Data):
        self.data, s = data, data.shape
        chosen, self.ids = stable_topk(data.logits, s.K)
        self.weights = chosen.softmax(-1)
        order = self.ids.flatten().argsort(stable=True)
        counts = self.ids.flatten().bincount(minlength=s.E).tolist()
        self.want = reference(data, order // s.K, self.weights.flatten()[order], counts)
        dweights = torch.empty_like(self.weights).flatten()
        dweights[order] = self.want.pop("dweight")
        self.want["dweights"] = dweights = dweights.view(s.T, s.K)
        inner = (dweights * self.weights).sum(-1, keepdim=True)
        dlogits = torch.zeros(s.T, s.E, device=data.device)
        dlogits.scatter_(1, self.ids, self.weights * (dweights - inner))
        self.want["dlogits"] = dlogits

    def check_ours(self, label):
        """Checks the results that the library wrote into the data's tensors."""
        if not torch.equal(self.data.ids, self.ids):
            raise SystemExit(f"{label}: ids differ from a stable sort's")
        require_close(f"{label}: weights", self.data.weights, self.weights)
        return {k: require_close(f"{label}: {k}", getattr(self.data, k), v)
                for k, v in self.want.items()}  # fmt: skip

    def check_autograd(self, label, out, grads):
        """Checks out and the gradients of x, logits, w_up, w_down (or None); ties may differ."""
        results = {"out": out}
        if grads is not None:
            results |= zip(("dx", "dlogits", "dw_up", "dw_down"), grads, strict=True)
        for name, got in results.items():
            error = row_errors(got, self.want[name]).square().mean().sqrt()
            if not error <= 5e-2:
                raise SystemExit(f"{label}: {name} is wrong: relative error {error:.1e}")
