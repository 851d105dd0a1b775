"""State of other Muons: small references of each, made from their formulas, hand over to this package."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.ranks import package, part, run_ranks
from tests.test_checkpoint_file import assert_equal
from tests.test_peer_sets import PUBLISHED

SHAPES = [(24, 16), (16, 24), (32, 8), (20, 20)]
REST = [(30, 6), (7,)]
STEPS = 4
ROUNDING = 2 ** -6  # torch.optim.Muon rounds every product to the 8 bits of bf16


def polar(U, name):
    """The polynomial of a Newton-Schulz iteration, in bf16 where the others are: on its way in and out."""
    X = U.bfloat16().double()
    divisor, _, triples = (
        PUBLISHED[name]
        if name in PUBLISHED
        else (1.0, 0.0, part("newton_schulz.orthogonalize").steps_of(name, 5).triples)
    )
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * divisor)
    for a, b, c in triples:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.bfloat16().float()


class Theirs(torch.optim.Optimizer):
    """What the references have in common: one rule for each group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            for p in group["params"]:
                self.rule(group)(p, p.grad, self.state[p], group)

    def rule(self, group):
        return self.muon if group["use_muon"] else self.adam

    def adam(self, p, G, state, group):
        m, v = (state.setdefault(key, torch.zeros_like(p)) for key in self.averages)
        state["step"] = state.get("step", 0) + 1
        betas, eps = (group[key] for key in self.adam_options)
        adam(p, G, m, v, state["step"], group["lr"], betas, eps, group["weight_decay"])


def adam(p, G, m, v, t, lr, betas, eps, weight_decay):
    m.lerp_(G, 1 - betas[0])
    v.lerp_(G.square(), 1 - betas[1])
    p.mul_(1 - lr * weight_decay)
    p.sub_(lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps))


class KellerJordan(Theirs):
    """EMA, Nesterov, lr sqrt(max(1, R/C)); MuonWithAuxAdam where groups say use_muon."""
    averages, adam_options = ("exp_avg", "exp_avg_sq"), ("betas", "eps")

    def __init__(self, matrices, rest):
        super().__init__([{"params": matrices, "use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1},
                          {"params": rest, "use_muon": False, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10,
                           "weight_decay": 0.2}], {})

    def muon(self, p, G, state, group):
        M = state.setdefault("momentum_buffer", torch.zeros_like(p))
        M.lerp_(G, 1 - group["momentum"])
        update = polar(G.lerp(M, group["momentum"]), "jordan") * max(1, p.size(-2) / p.size(-1)) ** 0.5
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


class Motif(Theirs):
    """Sum, lr 0.2 sqrt(max(R, C)); AdamW's averages are `moment1` and `moment2`."""
    coefficients, averages, adam_options = "quintic", ("moment1", "moment2"), ("adamw_betas", "adamw_eps")

    def __init__(self, matrices, rest, **more):
        super().__init__([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}],
                         {"lr": 0.03, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5,
                          "adamw_betas": (0.85, 0.9), "adamw_eps": 1e-9, "none_grad": True, **more})

    def muon(self, p, G, state, group):
        S = state.setdefault("momentum_buffer", torch.zeros_like(p))
        S.mul_(group["momentum"]).add_(G)
        U = G + group["momentum"] * S if group["nesterov"] else S
        update = polar(U, self.coefficients) * 0.2 * max(p.shape[-2:]) ** 0.5
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


class Dion(Theirs):
    """Sum, lr sqrt(R / C) or 0.2 sqrt(max(R, C)), steps counted by groups; NorMuon's rows in `variance_neuron`."""
    ours, coefficients = "Muon", "polar_express_dion"

    def __init__(self, matrices, rest, algorithm="muon", adjust_lr="spectral_norm", nesterov=False, **more):
        defaults = {"lr": 0.03, "mu": 0.9, "beta1": 0.85, "beta2": 0.9, "weight_decay": 0.1, "cautious_wd": False,
                    "algorithm": algorithm, "step": 0, "epsilon": 1e-9, "nesterov": nesterov, "flatten": False,
                    "adjust_lr": adjust_lr, **more}
        super().__init__([{"params": matrices}, {"params": rest, "algorithm": "adamw"}], defaults)

    def rule(self, group):
        return self.adam if group["algorithm"] == "adamw" else self.muon

    def muon(self, p, G, state, group):
        S = state.setdefault("momentum", torch.zeros_like(p))
        S.mul_(group["mu"]).add_(G)
        U = G + group["mu"] * S if group["nesterov"] else S
        update = self.normalized(polar(U, self.coefficients), state, group)
        R, C = p.shape[-2:]
        scale = (R / C) ** 0.5 if group["adjust_lr"] == "spectral_norm" else 0.2 * max(R, C) ** 0.5
        scale = 1.0 if group["adjust_lr"] is None else scale
        self.decay(p, update, group)
        p.sub_(group["lr"] * scale * update)

    def decay(self, p, update, group):
        keeps = torch.sign(p * update) < 0 if group["cautious_wd"] else torch.zeros_like(p, dtype=torch.bool)
        p.mul_(torch.where(keeps, 1.0, 1 - group["lr"] * group["weight_decay"]))

    def normalized(self, update, state, group):
        return update

    def adam(self, p, G, state, group):
        m, v = (state.setdefault(key, torch.zeros_like(p)) for key in ("momentum", "variance"))
        self.decay(p, m.lerp(G, 1 - group["beta1"]), group)
        adam(p, G, m, v, group["step"], group["lr"], (group["beta1"], group["beta2"]), group["epsilon"], 0.0)


class DionHeads(Dion):
    """Dion's `num_heads`: views (heads, rows, C) of weight, momentum and row state take the step."""

    def muon(self, p, G, state, group):
        if not state:
            Dion.muon(self, p.detach().clone(), G, state, group)  # makes the state
            for tensor in state.values():
                tensor.zero_()
        count = group["num_heads"]
        for part_of in zip(*(t.view(count, -1, t.shape[1]) for t in (p, G, *state.values()))):
            super().muon(*part_of[:2], dict(zip(state, part_of[2:])), group)


class DionBlocks(Dion):
    """Dion's `split_sizes`: blocks are orthogonalized and scaled, to their own rate over that of the matrix, first."""

    def blocks(self, group, *tensors):
        return zip(*(t.split(list(group["split_sizes"])) for t in tensors))

    def muon(self, p, G, state, group):
        S = state.setdefault("momentum", torch.zeros_like(p))
        S.mul_(group["mu"]).add_(G)
        U = G + group["mu"] * S if group["nesterov"] else S

        def rate(R, C):
            return (R / C) ** 0.5 if group["adjust_lr"] == "spectral_norm" else 0.2 * max(R, C) ** 0.5

        scaled = [polar(block, self.coefficients) * rate(*block.shape) / rate(*p.shape)
                  for block, in self.blocks(group, U)]
        update = self.normalized(torch.cat(scaled), state, group)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * rate(*p.shape) * update)


class DionNorMuon(Dion):
    ours = "NorMuon"

    def __init__(self, matrices, rest, **more):
        super().__init__(matrices, rest, "normuon", muon_beta2=0.8, **more)

    def normalized(self, update, state, group):
        V = state.setdefault("variance_neuron", torch.zeros_like(update[..., :1]))
        V.lerp_(update.square().mean(-1, keepdim=True), 1 - group["muon_beta2"])
        scaled = update / (V.sqrt() + 1e-8)
        return scaled * update.norm() / scaled.norm()


class DionNorMuonHeads(DionHeads, DionNorMuon):
    pass


class DionNorMuonBlocks(DionBlocks, DionNorMuon):
    def normalized(self, update, state, group):
        V = state.setdefault("variance_neuron", torch.zeros_like(update[..., :1]))
        parts = [super(DionNorMuonBlocks, self).normalized(block, {"variance_neuron": rows}, group)
                 for block, rows in self.blocks(group, update, V)]
        return torch.cat(parts)


def torchs(matrices, rest):
    return torch.optim.Muon(matrices, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw", ns_steps=4)


SOURCES = {
    "torch": (torchs, {}), "Keller Jordan": (KellerJordan, {}), "Motif": (Motif, {}),
    "Motif, no Nesterov": (Motif, {"nesterov": False}), "Dion": (Dion, {}),
    "Dion, Nesterov, rms": (Dion, {"nesterov": True, "adjust_lr": "rms_norm"}), "Dion's NorMuon": (DionNorMuon, {}),
    "Dion, cautious": (Dion, {"cautious_wd": True}),
    "Dion's NorMuon, cautious": (DionNorMuon, {"cautious_wd": True}),
    "Dion, no factor": (Dion, {"adjust_lr": None}),
}


def drawn(*lists):
    """Parameters of the shapes in each list, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [[nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes] for shapes in lists]


def problem(source):
    matrices, rest = drawn(SHAPES, REST)
    make, options = SOURCES[source]
    return matrices if make is torchs else matrices + rest, make(matrices, rest, **options)


def train(optimizer, params, numbers):
    """Gradients with a common part, so that the momentum has a direction, and rows of different size."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for i, p in enumerate(params):
            common = torch.randn(p.shape, generator=torch.Generator().manual_seed(50 + i))
            p.grad = torch.randn(p.shape, generator=generator) + common
            p.grad.mul_(torch.logspace(0, 1, len(p)).view(-1, *[1] * (p.ndim - 1)))
        optimizer.step()


def heir_of(theirs, params):
    """Ours on copies of their parameters. Coefficients, which the state dicts of some lack, are theirs; little else."""
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    groups = [{"params": copies[:len(SHAPES)]}, {"params": copies[len(SHAPES):], "use_muon": False}]
    make = getattr(package(), getattr(theirs, "ours", "Muon"))
    coefficients = getattr(theirs, "coefficients", "polar_express")
    optimizer = make([g for g in groups if g["params"]], lr=9.0, momentum=0.5, ns_coefficients=coefficients)
    return copies, optimizer


def assert_next_step_is_theirs(theirs, params, ours, optimizer, number=STEPS, moved=1e-3, apart=ROUNDING):
    """Step `number` moves an element of each of our parameters by more than `moved`, and each parameter to where theirs
    is, but for a part `apart` of its way.
    """
    before = [p.detach().clone() for p in ours]
    train(theirs, params, [number])
    train(optimizer, ours, [number])
    for old, a, b in zip(before, ours, params):
        assert (b - old).abs().max() > moved
        assert (a - b).norm() < apart * (b - old).norm()


@pytest.mark.parametrize("source", SOURCES)
def test_the_next_step_is_theirs(source):
    params, theirs = problem(source)
    train(theirs, params, range(STEPS))
    saved = theirs.state_dict()
    kept = copy.deepcopy(saved)
    ours, optimizer = heir_of(theirs, params)
    optimizer.load_state_dict(package().convert_state_dict(saved))
    assert repr(saved) == repr(kept)
    # The sign of an update near 0 is that of its rounding: such an element may decay on one side only
    apart = 0.04 if "cautious" in source else ROUNDING
    assert_next_step_is_theirs(theirs, params, ours, optimizer, apart=apart)


@pytest.mark.parametrize("source", SOURCES)
def test_the_state_is_a_mean_in_our_names(source):
    params, theirs = problem(source)
    train(theirs, params, range(STEPS))
    ours, optimizer = heir_of(theirs, params)
    optimizer.load_state_dict(package().convert_state_dict(theirs.state_dict()))
    for p, q in zip(ours[:len(SHAPES)], params):
        state = theirs.state[q]
        momentum = state.get("momentum_buffer", state.get("momentum"))
        scale = 1.0 if isinstance(theirs, (KellerJordan, torch.optim.Muon)) else 1 - 0.9
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], momentum * scale, rtol=1e-6, atol=0)
    for p in ours[len(SHAPES):]:
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} and optimizer.state[p]["step"] == STEPS
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in theirs.param_groups]


@pytest.mark.parametrize("source", SOURCES)
def test_what_schedulers_keep_in_the_groups_comes_along(source):
    params, theirs = problem(source)
    torch.optim.lr_scheduler.OneCycleLR(theirs, 0.1, total_steps=10, cycle_momentum=False)
    train(theirs, params, range(STEPS))
    _, optimizer = heir_of(theirs, params)
    optimizer.load_state_dict(package().convert_state_dict(theirs.state_dict()))
    for key in ("initial_lr", "max_lr", "min_lr"):
        assert [group[key] for group in optimizer.param_groups] == [group[key] for group in theirs.param_groups]


def test_names_in_place_of_numbers():
    """As get_optimizer_state_dict gives them, of a model under any wrapper."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    params, theirs = problem("Dion's NorMuon")
    train(theirs, params, range(STEPS))
    ours, optimizer = heir_of(theirs, params)
    old, new = nn.ParameterList(params), nn.ParameterList(ours)
    converted = package().convert_state_dict(get_optimizer_state_dict(old, theirs))
    set_optimizer_state_dict(new, optimizer, converted)
    assert_next_step_is_theirs(theirs, params, ours, optimizer)


def test_ours_is_returned_as_it_is():
    params, _ = problem("Dion")
    optimizer = package().NorMuon(params[:4], lr=0.1)
    train(optimizer, params[:4], range(2))
    saved = optimizer.state_dict()
    assert package().convert_state_dict(saved) is saved


def states_of(make, **options):
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 4))]
    optimizer = make(params, **options)
    train(optimizer, params, range(1))
    return optimizer.state_dict()


@pytest.mark.parametrize(("make", "options"), [
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_no_muon_is_refused(make, options):
    with pytest.raises(ValueError, match="no Muon that is known.*known are torch.optim.Muon"):
        package().convert_state_dict(states_of(make, **options))


def saved_by(source):
    """The state dict of a few steps, to be changed."""
    params, theirs = problem(source)
    train(theirs, params, range(STEPS))
    return copy.deepcopy(theirs.state_dict())


@pytest.mark.parametrize(("number", "key", "value", "message"), [
    (0, "adjust_lr", "rms", "group 0 has adjust_lr='rms', .* set adjust_lr='spectral_norm'"),
    (0, "algorithm", "dion2", "group 0 is stepped by 'dion2'"),
])
def test_options_without_a_counterpart_are_refused(number, key, value, message):
    saved = saved_by("Dion")
    saved["param_groups"][number][key] = value
    with pytest.raises(NotImplementedError, match=message):
        package().convert_state_dict(saved)


BLOCKS = (14, 6, 4)
SPLITS_OF_DION = {
    "heads": ({"num_heads": 4}, {"heads": 4}), "blocks": ({"split_sizes": BLOCKS}, {"rows": list(BLOCKS)}),
    "blocks, rms": ({"split_sizes": BLOCKS, "adjust_lr": "rms_norm"}, {"rows": list(BLOCKS)}),
}


@pytest.mark.parametrize("name", SPLITS_OF_DION)
@pytest.mark.parametrize("rule", ["Muon", "NorMuon"])
def test_splits_of_dion_are_ours(rule, name):
    """The group says them, and the state fits: row state of blocks was taken of scaled updates."""
    theirs_say, form = SPLITS_OF_DION[name]
    kind = "Heads" if "num_heads" in theirs_say else "Blocks"
    make = globals()[f"Dion{'NorMuon' if rule == 'NorMuon' else ''}{kind}"]
    matrices, rest = drawn([(24, 16), (24, 8)], REST)
    theirs = make(matrices, rest, **theirs_say)
    params = matrices + rest
    train(theirs, params, range(STEPS))
    saved = theirs.state_dict()
    kept = copy.deepcopy(saved)
    converted = package().convert_state_dict(saved)
    assert_equal(saved, kept)
    assert converted["param_groups"][0]["split"] == form and "split" not in converted["param_groups"][1]
    ours = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = getattr(package(), rule)([{"params": ours[:2], "split": form}, {"params": ours[2:], "use_muon": False}],
                                         ns_coefficients="polar_express_dion")
    optimizer.load_state_dict(converted)
    assert optimizer.param_groups[0]["split"] == form
    assert_next_step_is_theirs(theirs, params, ours, optimizer)


def test_splits_of_dion_do_not_depend_on_the_default_device():
    """The count of steps of Dion's AdamW may be a number of the group."""
    matrices, rest = drawn([(24, 16)], REST)
    theirs = DionNorMuonBlocks(matrices, rest, split_sizes=BLOCKS)
    train(theirs, matrices + rest, range(STEPS))
    saved, converted = theirs.state_dict(), package().convert_state_dict
    for state in saved["state"].values():
        state.pop("step_dev", None)
    expected = converted(copy.deepcopy(saved))["state"]
    with torch.device("meta"):
        found = converted(saved)["state"]
    for number, state in expected.items():
        assert all(torch.equal(torch.as_tensor(found[number][key]), torch.as_tensor(state[key])) for key in state)


def sharded_rows(rank, world):
    """Row state in DTensors: each rank divides its own rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    matrices, rest = drawn([(24, 16)], REST)
    theirs = DionNorMuonBlocks(matrices, rest, split_sizes=BLOCKS)
    train(theirs, matrices + rest, range(STEPS))
    whole = package().convert_state_dict(theirs.state_dict())
    mesh = init_device_mesh("cpu", (world,))
    saved = copy.deepcopy(theirs.state_dict())
    saved["state"][0] = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in saved["state"][0].items()}
    cut = package().convert_state_dict(saved)
    for key, value in whole["state"][0].items():
        assert torch.equal(cut["state"][0][key].full_tensor(), value), key
    return True


def test_splits_of_dion_in_dtensors():
    assert all(run_ranks(2, sharded_rows))


@pytest.mark.parametrize(("options", "message"), [
    ({"num_heads": 2, "split_sizes": (8, 16)}, "num_heads=2 and split_sizes=.* exclude each other"),
    ({"num_heads": 2.5}, "in group 0, in num_heads or split_sizes: .*heads must be a positive integer"),
    ({"split_sizes": (8, -8)}, "in group 0, in num_heads or split_sizes: .*must be a list of positive integers"),
    ({"split_sizes": (8, 8)}, r"split_sizes=\[8, 8\], which add up to 16 rows, and a parameter of 24 rows")])
def test_wrong_splits_of_dion_are_refused(options, message):
    saved = saved_by("Dion")
    saved["param_groups"][0].update(options)
    with pytest.raises(ValueError, match=message):
        package().convert_state_dict(saved)


@pytest.mark.parametrize(("number", "key", "value"), [
    (0, "num_heads", None), (0, "num_heads", 1), (0, "split_sizes", None), (1, "num_heads", 4), (1, "adjust_lr", None)])
def test_options_without_effect_are_not(number, key, value):
    """One head is the whole parameter, and Dion's AdamW knows neither heads nor a scale."""
    saved = saved_by("Dion")
    expected = package().convert_state_dict(copy.deepcopy(saved))
    saved["param_groups"][number][key] = value
    assert_equal(package().convert_state_dict(saved), expected)


@pytest.mark.parametrize(("source", "gone", "message"), [
    ("Keller Jordan", (1, 3), r"group 0 lacks the momentum of 2 of its 4 parameters \(1, 3\)\. .*gather the states"),
    ("Keller Jordan", (0, 1, 2, 3), r"lacks the momentum of 4 of its 4 parameters \(0, 1, 2, \.\.\.\)\."),
    ("Motif", (2,), r"group 0 lacks the momentum of 1 of its 4 parameters \(2\)\."),
    ("Dion's NorMuon", (0,), r"group 0 lacks the momentum of 1 of its 4 parameters \(0\)\."),
])
@pytest.mark.parametrize("leave", [dict.pop, lambda states, number: states[number].clear()], ids=["gone", "empty"])
def test_the_state_of_one_rank_is_refused(source, gone, message, leave):
    """Keller Jordan's distributed Muon keeps a momentum on its owner's rank; some own none."""
    saved = saved_by(source)
    for number in gone:
        leave(saved["state"], number)
    with pytest.raises(ValueError, match=message):
        package().convert_state_dict(saved)
    saved["param_groups"][0]["param_names"] = ["up", "down", "gate", "out"]
    with pytest.raises(ValueError, match=rf"parameters \({('up', 'down', 'gate', 'out')[gone[0]]}[,)]"):
        package().convert_state_dict(saved)


@pytest.mark.parametrize("source", SOURCES)
def test_an_optimizer_that_was_never_stepped_has_no_state(source):
    params, theirs = problem(source)
    ours, optimizer = heir_of(theirs, params)
    optimizer.load_state_dict(package().convert_state_dict(theirs.state_dict()))
    assert not optimizer.state
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in theirs.param_groups]


@pytest.mark.parametrize(("source", "empty"), [
    ("Keller Jordan", (4,)), ("Motif", (4,)), ("Motif", range(4)), ("Dion", (4,)), ("Dion's NorMuon", range(4))])
def test_empty_states_stay_empty(source, empty):
    """Of frozen parameters, of which Keller Jordan's Muon has none."""
    saved = saved_by(source)
    expected = package().convert_state_dict(copy.deepcopy(saved))
    for number in empty:
        saved["state"][number] = expected["state"][number] = {}
    assert_equal(package().convert_state_dict(saved), expected)


def test_flattened_convolutions_are_refused():
    params = [nn.Parameter(torch.randn(4, 3, 2, 2))]
    saved = Dion([nn.Parameter(torch.randn(4, 3))], [nn.Parameter(torch.randn(3))], flatten=True).state_dict()
    saved["state"][0] = {"momentum": torch.zeros_like(params[0])}
    with pytest.raises(NotImplementedError, match="group 0 has 4-D parameters"):
        package().convert_state_dict(saved)


def test_a_flattened_state_dict_is_refused():
    with pytest.raises(ValueError, match="this one has nothing: "):
        package().convert_state_dict({})
    with pytest.raises(ValueError, match="without flatten_optimizer_state_dict"):
        package().convert_state_dict({"state.a.momentum": torch.zeros(2)})
    with pytest.raises(ValueError, match="this is a NoneType: "):
        package().convert_state_dict(None)


@pytest.mark.parametrize("source", ["Motif", "Dion", "Dion's NorMuon"])
def test_unconverted_state_is_refused_with_what_to_do(source):
    params, theirs = problem(source)
    train(theirs, params, range(1))
    ours, optimizer = heir_of(theirs, params)
    with pytest.raises(ValueError, match="convert_state_dict"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state
