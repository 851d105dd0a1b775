"""Other packages' Muons as small reference programs, made from their published rules: state in
fp32, products in fp64.

Each class says in `names` which source `convert_state_dict` takes it for, and in `arguments` what
its constructor was given that its state dict lacks. Groups and states have the keys of the
published source.
"""

from __future__ import annotations

import torch

from tests.test_peer_sets import POLAR_EXPRESS

# The numbers below are written here a second time on purpose, from the peers' sources, and are not
# taken from torch-ext/optimizer/state/peers/facts.py, so that the tests notice a wrong number there.
JORDAN = ((3.4445, -4.7750, 2.0315),)
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
EMERGING_SETS = {
    "simple": JORDAN,
    "quintic": YOU,
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    "deepseekv4": JORDAN * 8 + ((2.0, -1.5, 0.5),) * 2,
    "cubic5": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
}
TIMM_SETS = {
    "original": JORDAN,
    "quintic": YOU,
    "polar_express": (
        (8.237312490495555, -23.157747414558198, 16.680568411445915),
        (4.082441999064835, -2.893047735332586, 0.5252849256975648),
        (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
        (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
        (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        (1.8763805351440397, -1.2347896577722228, 0.35891887501668385),
        (1.8564423485617974, -1.2132449880935525, 0.3568003487825883),
        (1.8749994008682747, -1.2499988017229169, 0.3749994008546422),
    ),
    "polar_express_safer": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.0429299351667245, -2.808917465908704, 0.5000178451051299),
        (3.8916678022926563, -2.7724841532176825, 0.5060648178503389),
        (3.285753657755658, -2.3681294933425394, 0.46449024233003117),
        (2.3005307116270983, -1.6111665557258408, 0.3833374427545273),
        (1.8631210546382593, -1.2042160621002727, 0.3421879560523383),
        (1.8382572152247512, -1.1779263289537742, 0.3396513038637379),
        (1.8749999923301852, -1.2499999836060613, 0.374999991275876),
    ),
}


def newton_schulz(U: torch.Tensor, triples, divisor: float = 1.0) -> torch.Tensor:
    """The iteration on the last two dims of U / (divisor ||U||), in fp64."""
    X = U.double()
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * divisor)
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X
    for a, b, c in triples:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return (X.mT if tall else X).float()


def repeated(triples, steps: int) -> list:
    """The first `steps` triples; the last one again where there are fewer."""
    return [triples[min(i, len(triples) - 1)] for i in range(steps)]


def original(p: torch.Tensor) -> float:
    return max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5


def adamw(p, G, state, lr: float, betas, eps: float, decay: float) -> None:
    """AdamW with exp_avg, exp_avg_sq and step."""
    for key in ("exp_avg", "exp_avg_sq"):
        state.setdefault(key, torch.zeros_like(p))
    state["step"] = state.get("step", 0) + 1
    state["exp_avg"].lerp_(G, 1 - betas[0])
    state["exp_avg_sq"].lerp_(G.square(), 1 - betas[1])
    mean, square = (
        state[key] / (1 - beta ** state["step"])
        for key, beta in zip(("exp_avg", "exp_avg_sq"), betas)
    )
    p.mul_(1 - lr * decay).sub_(lr * mean / (square.sqrt() + eps))


def mean(p, G, state, mu: float, nesterov: bool) -> torch.Tensor:
    """M <- mu M + (1 - mu) G; what is orthogonalized."""
    M = state.setdefault("momentum_buffer", torch.zeros_like(p))
    M.lerp_(G, 1 - mu)
    return G.lerp(M, mu) if nesterov else M


def total(p, G, state, mu: float, nesterov: bool) -> torch.Tensor:
    """S <- mu S + G; what is orthogonalized."""
    S = state.setdefault("momentum_buffer", torch.zeros_like(p))
    S.mul_(mu).add_(G)
    return G + mu * S if nesterov else S


class Peer(torch.optim.Optimizer):
    """What the references have in common: `rule` for each parameter, given its group."""

    name = None
    sums = False  # the momentum is a sum
    ours = "Muon"  # the class here that goes on
    takes_rest = True  # it steps the parameters that are no matrices
    arguments: dict = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.rule(p, p.grad, self.state[p], group)


class Emerging(Peer):
    """Emerging-Optimizers fd77292, Muon: no option but lr, momentum and decay is in its groups."""

    name, takes_rest = "emerging_optimizers", False

    def __init__(self, matrices, rest, keys=(), **arguments):
        self.arguments = arguments
        super().__init__(matrices, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, **dict(keys)})

    def rule(self, p, G, state, group):
        given = {
            "nesterov": False,
            "coefficient_type": "quintic",
            "num_ns_steps": 5,
            "scale_mode": "spectral",
            "extra_scale_factor": 1.0,
            "weight_decay_method": "decoupled",
            **self.arguments,
        }
        rates = {"decoupled": group["lr"], "independent": 1.0, "palm": group["lr"] ** 2}
        p.mul_(1 - rates[given["weight_decay_method"]] * group["weight_decay"])
        U = mean(p, G, state, group["momentum"], given["nesterov"])
        triples, steps = EMERGING_SETS[given["coefficient_type"]], given["num_ns_steps"]
        if given["coefficient_type"] in ("polar_express", "cans", "deepseekv4"):
            triples = repeated(triples, steps)
        else:
            triples = [triples[i % len(triples)] for i in range(steps)]
        R, C = p.shape[-2:]
        scale = {"spectral": max(R, C), "shape_scaling": max(1, R / C), "unit_rms_norm": R / C}[
            given["scale_mode"]
        ]
        p.sub_(group["lr"] * given["extra_scale_factor"] * scale**0.5 * newton_schulz(U, triples))


class Megatron(Emerging):
    """Megatron-LM d98e8a6, TensorParallelMuon on one rank: the same rule, groups with keys of its
    schedules.
    """

    name = "megatron"

    def __init__(self, matrices, rest, **arguments):
        keys = {
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "max_lr": 0.02,
            "min_lr": 0.0,
            "is_expert_parallel": False,
            "default_config": True,
        }
        super().__init__(matrices, rest, keys, **arguments)
        self.arguments = {"split_qkv": False, **arguments}


class Timm(Peer):
    """timm 1.0.31: one group for all, the kind of each parameter in its state; AdamW at
    fallback_lr_scale * lr.
    """

    name = "timm"

    def __init__(self, matrices, rest, groups=None, **options):
        self.takes_rest = bool(rest)
        defaults = {
            "lr": 0.02,
            "weight_decay": 0.1,
            "momentum": 0.9,
            "nesterov": False,
            "ns_steps": 5,
            "ns_coefficients": "quintic",
            "eps": 1e-7,
            "safety_factor": 1.0,
            "adjust_lr_fn": "match_rms_adamw",
            "conv_mode": "flatten",
            "normalize_spatial": True,
            "fallback_lr_scale": 1.0,
            "betas": (0.9, 0.95),
            "algo": "muon",
            "scale_eps": False,
            "capturable": False,
            "verbose": False,
            **options,
        }
        mixed = [
            p
            for pair in zip(matrices, [*rest, *[None] * len(matrices)])
            for p in pair
            if p is not None
        ]
        super().__init__(groups(matrices, rest) if groups else mixed, defaults)

    def rule(self, p, G, state, group):
        flag = (
            not group["use_fallback"]
            if "use_fallback" in group
            else p.ndim > 1 and min(p.shape) > 6
        )
        if not state.setdefault("use_muon", flag):
            lr = group["lr"] * group["fallback_lr_scale"]
            return adamw(p, G, state, lr, group["betas"], group["eps"], group["weight_decay"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        U = mean(p, G, state, group["momentum"], group["nesterov"])
        triples = group["ns_coefficients"]
        triples = TIMM_SETS[triples] if isinstance(triples, str) else triples
        triples = triples if isinstance(triples[0], tuple) else [triples]
        R, C = p.shape
        scale = {
            "original": max(1, R / C) ** 0.5,
            "match_rms_adamw": 0.2 * max(R, C) ** 0.5,
            "rms_to_rms": (R / C) ** 0.5,
        }[group["adjust_lr_fn"]]
        p.sub_(
            group["lr"]
            * scale
            * newton_schulz(U, repeated(triples, group["ns_steps"]), group["safety_factor"])
        )


class Nanochat(Peer):
    """nanochat 3a5e0bc, Muon: no weight decay."""

    name, takes_rest = "nanochat", False
    triples, divisor = JORDAN, 1.0

    def __init__(self, matrices, rest, **more):
        super().__init__(
            matrices, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "ns_steps": 5, **more}
        )
        self.arguments = {}

    def rule(self, p, G, state, group):
        U = mean(p, G, state, group["momentum"], group["nesterov"])
        update = newton_schulz(U, repeated(self.triples, group["ns_steps"]), self.divisor)
        p.sub_(group["lr"] * original(p) * update)


class NanochatExpress(Nanochat):
    """nanochat 2c4473d, Muon without its variance and its decay: Polar Express, the norm times
    1.02.
    """

    triples, divisor = POLAR_EXPRESS, 1.02

    def __init__(self, matrices, rest, **more):
        super().__init__(matrices, rest, beta2=None, weight_decay=0.0, **more)


class DeepSpeed(Peer):
    """deepspeed 0.19.8, SingleDeviceMuonWithAuxAdam."""

    name = "deepspeed"

    def __init__(self, matrices, rest, **more):
        groups = [
            {
                "params": matrices,
                "use_muon": True,
                "lr": 0.02,
                "momentum": 0.9,
                "weight_decay": 0.1,
                "ns_method": "gram",
                "name": "muon-params",
                **more,
            },
            {
                "params": rest,
                "use_muon": False,
                "lr": 0.01,
                "betas": (0.8, 0.95),
                "eps": 1e-10,
                "weight_decay": 0.2,
                "name": "adam-params",
            },
        ]
        super().__init__(groups, {})

    def rule(self, p, G, state, group):
        lr, decay = group["lr"], group["weight_decay"]
        if not group["use_muon"]:
            return adamw(p, G, state, lr, group["betas"], group["eps"], decay)
        update = newton_schulz(mean(p, G, state, group["momentum"], True), JORDAN * 5)
        p.mul_(1 - lr * decay).sub_(lr * original(p) * update)


class DeepSpeedAlone(DeepSpeed):
    """deepspeed 0.19.8, SingleDeviceMuon: without `use_muon`."""

    takes_rest = False

    def __init__(self, matrices, rest):
        Peer.__init__(
            self, matrices, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "ns_method": "gram"}
        )

    def rule(self, p, G, state, group):
        super().rule(p, G, state, {**group, "use_muon": True})


class Muonium(Peer):
    """muonium 0.2.0, Muon with AdamW: decays by its lr times the scale of the shape; a tensor for
    lr.
    """

    name, sums = "muonium", True
    algorithm = "muon"

    def __init__(self, matrices, rest, **options):
        group = {
            "params": matrices,
            "algorithm": self.algorithm,
            "use_muon": True,
            "lr": torch.tensor(0.02),
            "wd": 0.0,
            "use_cautious_wd": True,
            "momentum": 0.9,
            "nesterov": True,
            "ns_steps": 5,
            "orthogonalization_strategy": "polar_express",
            "maximize": False,
            "flatten": False,
            "split_sizes": None,
            "foreach": False,
            **options,
        }
        adam = {
            "params": rest,
            "algorithm": "adamw",
            "use_muon": False,
            "lr": 0.01,
            "wd": 0.2,
            "amsgrad": False,
            "betas": (0.8, 0.95),
            "eps": 1e-9,
            "decoupled_weight_decay": True,
            "fused": None,
            "foreach": None,
            "maximize": False,
            "has_complex": False,
        }
        super().__init__([group, adam] if rest else [group], {"differentiable": False})

    def rule(self, p, G, state, group):
        if not group["use_muon"]:
            return adamw(p, G, state, group["lr"], group["betas"], group["eps"], group["wd"])
        state["step"] = state.get("step", 0) + 1
        state["lr_ratio"] = torch.tensor(original(p))
        U = total(p, G, state, group["momentum"], group["nesterov"])
        express = group["orthogonalization_strategy"] == "polar_express"
        triples = repeated(POLAR_EXPRESS if express else JORDAN, group["ns_steps"])
        update = self.normalized(newton_schulz(U, triples, 1.02 if express else 1.0), state, group)
        p.sub_(float(group["lr"]) * original(p) * (update + group["wd"] * p))

    def normalized(self, update, state, group):
        return update


class MuoniumNorMuon(Muonium):
    ours, algorithm = "NorMuon", "normuon"

    def __init__(self, matrices, rest):
        super().__init__(matrices, rest, muon_beta2=0.8)

    def normalized(self, update, state, group):
        V = state.setdefault("variance_neuron", torch.zeros_like(update[..., :1]))
        V.lerp_(update.square().mean(-1, keepdim=True), 1 - group["muon_beta2"])
        scaled = update / (V.sqrt() + 1e-8)
        return scaled * update.norm() / scaled.norm()
