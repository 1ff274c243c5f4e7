"""The layer as a module whose experts are divided among ranks."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _checks
from .._call import score_dtype
from ..fp8 import Request, request_of
from ..lora import refuse_second
from ..module import MoE, MoEAux
from ..routing import Pairs, counted, expert_choice, token_round
from ._group import GRADIENTS, ROUTING
from ._memory import number_of
from .begun import Begun, begin
from .buffers import is_capturing
from .layer import TIMEOUT, Place, make_transport, run
from .lora import DividedLoRA, divide, divided_state, local
from .peer import Limits
from .routing import AllTokens, group_losses, group_sequence_losses

EXPERTS = ("w_up", "w_down", "b_up", "b_down")
_SEED_BITS = 62
# Attributes that must be equal on all ranks.
_EQUAL = (
    *("num_experts", "top_k", "hidden_size", "intermediate_size", "gate_layout", "routing"),
    *("tile", "rounding", "seed", "shared_experts", "balance", "precision", "keep_h"),
)
_OPTIONS_BYTES = 4096  # of the values of all options as text


def _device(group, device):
    """The device of a module's parameters. With a mesh it has the mesh's type, because DTensors
    move their local tensors there; on the meta device tensors have no memory to move."""
    if not isinstance(group, DeviceMesh):
        return device
    if device is None:
        return "meta" if torch.get_default_device().type == "meta" else group.device_type
    if torch.device(device).type not in (group.device_type, "meta"):
        raise ValueError(
            f"device is {device}, must be meta or of the type of the group's mesh, which is "
            f"{group.device_type}"
        )
    return device


class ExpertParallelMoE(MoE):
    """A MoE whose E experts are divided among the W ranks of a group: rank r holds the experts
    r*E/W to (r+1)*E/W - 1. Every rank calls it with its own tokens, any number of them.

    The result equals the result of one MoE with all experts and all ranks' tokens, except that each
    rank rounds its partial sum of a token to the dtype before it sends the sum. Losses,
    tokens_per_expert, token rounding and expert choice use the tokens of all ranks.

    group: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks. With a mesh,
    `device` defaults to the type of the mesh, and must be of this type or meta.
    timeout: seconds after which waiting ranks raise ExpertParallelError.
    transport: "all_to_all" is torch.distributed's all-to-all. With "peer" the GPUs of one host
    write rows into each other's memory while products are computed; if this is not possible, a call
    raises RuntimeError or NotImplementedError. "auto" uses "peer" if it serves the group, else
    "all_to_all".
    max_tokens, for peer memory: the largest number of tokens that any rank has in any call. More
    tokens raise ValueError. Without it, and always in token rounding and expert choice, the ranks
    exchange their sizes in each forward, and the host waits.
    capacity, for peer memory: a rank's experts may get at most capacity * max_tokens * top_k rows.
    If they get more, the step fails (ExpertParallelError). Without it the host reads the number of
    rows in each forward.
    keep_rows: for backward a rank keeps the rows of x that it has received. Otherwise all ranks
    send them again. By all-to-all a rank keeps d elements of each row, and all ranks send rows
    again if any rank does not keep its rows. Over peer memory a rank keeps W * T * d elements,
    where T is the number of tokens for which the buffer has room, and keep_rows must be equal on
    all ranks.
    precision="auto": the ranks choose together, by the rows of all ranks.
    The other arguments are those of MoE.

    Parameters have the names and shapes of MoE. w_up, w_down, b_up and b_down are DTensors, sharded
    in dimension 0. Every rank has a whole copy of the other parameters, whose gradients contain
    only the terms of the rank's own tokens; sum_replicated_gradients() sums them over ranks. The
    whole loss is the sum of the ranks' losses. Every rank adds the auxiliary losses to its own
    loss, and they still count once.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        transport: str = "auto",
        timeout: float = TIMEOUT,
        max_tokens: int | None = None,
        capacity: float | None = None,
        keep_rows: bool = False,
        **options,
    ):
        _checks.integer("num_experts", num_experts)
        # nn.Module accepts plain attributes before its own constructor has run.
        limits = Limits(timeout, max_tokens, capacity, top_k, keep_rows)
        self.transport = make_transport(transport, group, limits)
        self.group = self.transport.group
        if num_experts % self.group.size != 0:
            raise ValueError(
                f"num_experts is {num_experts}, must be a multiple of the group's "
                f"{self.group.size} ranks"
            )
        options["device"] = _device(group, options.get("device"))
        self._compared = False  # whether the ranks have compared their options
        self._mesh = group if isinstance(group, DeviceMesh) else None
        self._process_group = group
        super().__init__(num_experts, top_k, hidden_size, intermediate_size, **options)
        del self._mesh, self._process_group  # copies of the module need neither
        self.place = Place.of_module(self.transport)

    # ---- parameters ------------------------------------------------------------------------------

    def _held_experts(self) -> int:
        return self.num_experts // self.group.size

    def _make_parameters(self, bias, router_dtype, shared_experts: int, where: dict) -> None:
        super()._make_parameters(bias, router_dtype, shared_experts, where)
        mesh = self._mesh
        if mesh is None:
            kind = self.w_up.device.type
            group = self._process_group or dist.group.WORLD
            if kind == "meta":
                by_gloo = dist.get_backend(group) == "gloo"
                kind = "cuda" if torch.cuda.is_available() and not by_gloo else "cpu"
            mesh = DeviceMesh.from_group(group, kind)
        divide(self, EXPERTS, mesh)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *others) -> None:
        """As nn.Module. Also accepts whole tensors with all experts, as MoE has them."""
        given = divided_state(self, EXPERTS, state_dict, prefix)
        super()._load_from_state_dict(given, prefix, *others)

    def _local(self, name: str) -> Tensor | None:
        """This rank's part of a parameter of the experts."""
        return local(getattr(self, name))

    def reset_parameters(self) -> None:
        """As in MoE, but every expert has its own seed, computed from a seed of rank 0. So the
        weights do not depend on the number of ranks. All ranks must call it; the host waits for
        them. On the meta device it does nothing."""
        device = self._local("w_up").device
        if device.type == "meta":
            return
        self.group.check_device("the module", device)
        seed = int(torch.randint(2**_SEED_BITS, (), device="cpu"))
        with self.group.call():
            seed = self._compare_options(seed, device)
        generator = torch.Generator(device)

        def fill(weight: Tensor, number: int) -> None:
            generator.manual_seed((seed + number) % 2**_SEED_BITS)
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)

        with torch.no_grad():
            for number, weight in enumerate((self.router.weight, *self._shared())):
                fill(weight, number)
            first = 3 + 2 * self.group.rank * self._held_experts()
            for which, name in enumerate(("w_up", "w_down")):
                for e, weight in enumerate(self._local(name)):
                    fill(weight, first + 2 * e + which)
            for name in ("b_up", "b_down"):
                if getattr(self, name) is not None:
                    self._local(name).zero_()
            if self.selection_bias is not None:
                self.selection_bias.zero_()
            if self.lora is not None:
                self.lora.fill(seed + 3 + 2 * self.num_experts)

    def _options(self) -> dict[str, str]:
        """The arguments that must be equal on all ranks, as text. `timeout` may differ, and by
        all-to-all `keep_rows`."""
        _, max_tokens, capacity, _, keep_rows = self.transport.limits_as_numbers()
        values = {
            **{name: getattr(self, name) for name in _EQUAL},
            **self.route_options,
            "scale": float(self.route_options["scale"]),
            "lb_coef": float(self.lb_coef),
            "z_coef": float(self.z_coef),
            "activation": tuple(self.activation),
            "bias": self.b_up is not None,
            "selection_bias": self.selection_bias is not None,
            "router_dtype": self.router.compute_dtype,
            "dtype": self.w_up.dtype,
            "device": self._local("w_up").device.type,
            "fake_quantize": self.fake_quantize,
            "transport": self.transport.name,
            "max_tokens": max_tokens or None,
            "capacity": capacity or None,
            "lora": None if self.lora is None else self.lora.options(),
            "keep_rows": self.transport.name != "all_to_all" and bool(keep_rows),
        }
        return {name: str(value) for name, value in values.items()}

    def _compare_options(self, number: int, device) -> int:
        """Compares the options of all ranks. Returns rank 0's `number`."""
        options = self._options()
        mine = [0, number, number_of(str(options))]
        found = self.group.read_all(ROUTING, mine, device, self.transport.timeout)
        if any(row[2] != mine[2] for row in found):
            self._name_the_option(options, device)
        self._compared = True
        return found[0][1]

    def _name_the_option(self, options: dict[str, str], device) -> None:
        """Raises an error that names an option that differs between ranks, and the ranks."""
        sent = json.dumps(list(options.values())).encode()[:_OPTIONS_BYTES].ljust(_OPTIONS_BYTES)
        sent = torch.tensor(list(sent), dtype=torch.uint8, device=device)
        received = self.group.all_gather(sent, self.transport.timeout).tolist()
        of_ranks = [json.loads(bytes(row)) for row in received]
        self.group.agree(tuple(options), tuple(options.values()), of_ranks)

    def replicated_parameters(self) -> list[nn.Parameter]:
        """The parameters of which every rank has a whole copy: router, shared experts, and the
        factors that add_lora(share_outer=True) makes for all experts."""
        of_lora = () if self.lora is None else self.lora.names
        divided = {*EXPERTS, *(f"lora.{name}" for name in of_lora)}
        return [p for name, p in self.named_parameters() if name not in divided]

    @torch.no_grad()
    def sum_replicated_gradients(self) -> None:
        """Sums the gradients of replicated_parameters() over the ranks. Call it once an optimizer
        step, after the last backward, unless DDP or FSDP2 reduces these gradients over the same
        ranks. If some ranks have no gradient of a parameter, their part counts as 0; if no rank has
        one, it stays None. The host waits for the device."""
        timeout, parameters = self.transport.timeout, self.replicated_parameters()
        with self.group.call():
            have = sum(1 << i for i, p in enumerate(parameters) if p.grad is not None)
            device = self._local("w_up").device
            of_ranks = self.group.read_all(GRADIENTS, [have], device, timeout)
            self.transport.check()  # the host has just waited for the step
            for i, parameter in enumerate(parameters):
                if not any(row[0] >> i & 1 for row in of_ranks):
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = parameter.grad
                part = local(gradient)
                values = part.to(score_dtype(part))
                total, *others = self.group.all_gather(values, timeout).unbind()
                for other in others:
                    total = total + other
                part.copy_(total)

    def add_lora(self, rank: int, alpha: float, *, dtype=None, share_outer: bool = False) -> None:
        """As MoE. All ranks must call it, before fully_shard; the host waits for them. The factors
        have the names and shapes of MoE's, and are DTensors as the experts. Their values do not
        depend on the number of ranks. torch.compile runs the layer eagerly."""
        refuse_second(self)
        if len(self.w_up.placements) > 1:
            raise ValueError("add_lora must come before fully_shard of the layer")
        seed = int(torch.randint(2**_SEED_BITS, (), device="cpu"))
        first = self.group.rank * self._held_experts()
        factors = DividedLoRA((self.w_up, self.w_down), rank, alpha, dtype, share_outer, first)
        self.lora = factors
        device = self._local("w_up").device
        if device.type != "meta":
            with self.group.call():
                factors.fill(self._compare_options(seed, device))
        self._freeze_experts()

    # ---- forward ---------------------------------------------------------------------------------

    def _biases(self) -> dict:
        return {name: self._local(name) for name in ("b_up", "b_down")}

    def _weights(self) -> tuple:
        return self._local("w_up"), self._local("w_down")

    def _started(self) -> dict:
        # Shared experts run between begin and finish: while rows of x travel, in backward of dO.
        # That costs time of the host, which a CUDA graph does not spend.
        apart = self.shared_experts > 0 and not torch.compiler.is_compiling() and is_capturing()
        return {"start": begin if apart else run}

    def _come(self, out: Tensor | Begun) -> Tensor:
        return out.finish() if isinstance(out, Begun) else out

    def _experts(self, form: str, rows, routing: tuple, experts: dict, lists: int = 1):
        style = experts["activation"], experts["gate_layout"]
        weights = (*self._operands(), experts["b_up"], experts["b_down"])
        rest = rows, routing, weights, style, experts.get("grad_accum")
        request = request_of(*map(experts.get, Request._fields))
        more = {"factors": None if self.lora is None else self.lora(), "before": experts["losses"]}
        return experts["start"](self.place, form, *rest, request=request, lists=lists, **more)

    def _moe(self, rows, ids, weights, experts: dict) -> Tensor:
        return self._experts("ids", rows, (ids, None, weights), experts)

    def _moe_pairs(self, rows, pairs: Pairs, experts: dict) -> Tensor:
        # Every rank has the list of all ranks' tokens (AllTokens).
        return self._experts("pairs", rows, tuple(pairs[:3]), experts, lists=self.group.size)

    def _all_tokens(self, logits: Tensor, seed: int) -> AllTokens:
        rest = (logits.device, self.transport.timeout)
        return AllTokens(self.group, logits.shape[0], seed, *rest)

    def _rounded(self, logits: Tensor, options: dict) -> Pairs | None:
        if not self.training or self.routing != "token_rounding":
            return None
        return self._rounded_by_all(logits, options)

    @torch.compiler.disable
    def _rounded_by_all(self, logits: Tensor, options: dict) -> Pairs | None:
        with self.group.call():  # compiled code calls this outside of forward's group.call()
            tokens = self._all_tokens(logits, int(self._seed()))
            if not self._rounds(tokens.total):
                return None
            rule = {"tile": self.tile, "mode": self.rounding, **options}
            seed = torch.tensor(tokens.number, device="cpu")
            return tokens.pairs(logits, lambda t: token_round(t, self.top_k, seed=seed, **rule))

    @torch.compiler.disable
    def _chosen(self, logits: Tensor) -> Pairs:
        with self.group.call():
            tokens = self._all_tokens(logits, 0)
            capacity = self._capacity(tokens.total)
            return tokens.pairs(logits, lambda t: expert_choice(t, capacity))

    def _with_losses(self, losses) -> dict:
        """The ranks gather the sums of the losses when all arguments of the layer are checked, and
        before they exchange rows: run() keeps this order in every graph. A module from the meta
        device whose weights were loaded compares its options now."""

        def before() -> Tensor:
            if not torch.compiler.is_compiling() and not self._compared:
                self._compare_options(0, self._local("w_up").device)
            return losses()

        return {"losses": before}

    def _group_losses(self, logits, expert: Tensor, slots: int | None, score: str, padding):
        counts = counted(expert.long().flatten(), self.num_experts)
        timeout = self.transport.timeout
        return group_losses(self.group, logits, counts, slots, score, padding, timeout)

    def _losses(
        self, logits: Tensor, ids: Tensor, options: dict, padding: Tensor | None, shape: tuple
    ) -> tuple:
        padding = None if padding is None else padding[:, None]
        if self.balance == "sequence":
            rest = (padding, shape, self.transport.timeout)
            return group_sequence_losses(self.group, logits, ids, options["score"], *rest)
        return self._group_losses(logits, ids, self.top_k, options["score"], padding)

    def _losses_of_choice(self, logits: Tensor, pairs: Pairs, padding: Tensor | None) -> tuple:
        return self._group_losses(logits, pairs.expert, None, "softmax_before_topk", padding)

    def forward(self, x: Tensor, **options):
        """As MoE. x (..., d) and aux.logits belong to this rank's tokens."""
        if self.lora is not None:
            return self._forward_eagerly(x, **options)
        if torch.compiler.is_compiling():
            return super().forward(x, **options)
        with self.group.call():
            return super().forward(x, **options)

    @torch.compiler.disable
    def _forward_eagerly(self, x: Tensor, **options):
        with self.group.call():
            return super().forward(x, **options)

    @torch.compiler.disable
    def begin(
        self,
        x: Tensor,
        *,
        selection_bias: Tensor | None = None,
        padding_mask: Tensor | None = None,
        grad_accum: tuple | None = None,
    ) -> BegunMoE:
        """Begins a call with the arguments of forward: routes and sends rows of x. finish() of what
        it returns gives forward's result, with the same bits. What runs between them, and in
        backward what ran between them, runs while rows travel. All ranks call begin() and finish()
        in the same order, and between them no other call of the group. Hooks of the module do not
        run, so the layer itself must not be under fully_shard; its block may be."""
        if hasattr(self, "unshard"):
            raise TypeError(
                "begin() is called on a layer under fully_shard, which gathers parameters only for "
                "forward(): call forward(), or fully_shard the block alone"
            )
        options = (selection_bias, padding_mask, grad_accum)
        with self.group.call():
            return BegunMoE(self, self._begin(x, *options, {"start": begin}))


class BegunMoE:
    """A call of an ExpertParallelMoE that begin() has begun."""

    def __init__(self, layer: ExpertParallelMoE, begun: tuple):
        self._layer, self._begun = layer, begun
        self._step: Begun = begun[0]

    @torch.compiler.disable
    def compute(self) -> None:
        """Computes this rank's experts and sends partial sums: what runs from here to finish() runs
        while these travel. Optional, but all ranks make the same calls."""
        self._step.compute()

    @torch.compiler.disable
    def finish(self) -> tuple[Tensor, MoEAux]:
        """Computes shared experts, waits for the partial sums of all ranks, and returns what
        forward returns. RuntimeError if it is called twice."""
        if self._begun is None:
            raise RuntimeError("finish() is called twice, must be called once after begin()")
        with self._layer.group.guarded(self._step):
            found = self._layer._end(*self._begun)
        self._begun = None
        return found
