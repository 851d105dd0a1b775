"""Facts about the Muons of other packages: keys of their state dicts, arguments and coefficients.

`PEERS`: the packages. `candidates`: which packages may have written a state dict. `check_source`
refuses groups of other packages at loading. Conversion is in convert.py, loading in state_dict.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...newton_schulz.coefficients import NANOCHAT, SETS, Triple
from ...params.checks.group_keys import SCHEDULED
from ...params.errors import shortened

SHARED = frozenset(("params", "param_names", "lr", "weight_decay", *SCHEDULED))  # keys of any group
# Keys that change no step: labels, and choices of an implementation with equal results
IGNORED = frozenset(("name", "group_name", "lr_scale", "foreach", "fused", "differentiable"))
TORCH = frozenset(("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"))


@dataclass(frozen=True)
class Peer:
    """A Muon of another package.

    `title`: name in messages. `keys`: keys of parameter groups besides SHARED. `marks`,
    `state_marks`: keys of groups and of state written by no other peer and no torch optimizer.
    `arguments`: constructor arguments with influence on a step but missing from the state dict,
    with defaults. `steps_all`: steps parameters without gradient too.
    """

    title: str
    keys: frozenset[str] = frozenset()
    marks: frozenset[str] = frozenset()
    state_marks: frozenset[str] = frozenset()
    arguments: dict = field(default_factory=dict)
    steps_all: bool = False


def _keys(text: str) -> frozenset[str]:
    """Return the set of words in `text`."""
    return frozenset(text.split())


# Arguments of Emerging-Optimizers' constructor and their defaults
EMERGING = {
    "nesterov": False,
    "weight_decay_method": "decoupled",
    "coefficient_type": "quintic",
    "num_ns_steps": 5,
    "scale_mode": "spectral",
    "extra_scale_factor": 1.0,
}

PEERS: dict[str, Peer] = {
    # KellerJordan/Muon 857d1ad: Muon, SingleDeviceMuon; with `use_muon` the classes with AuxAdam
    "keller_jordan": Peer(
        "Keller Jordan's Muon", _keys("momentum use_muon betas eps"), steps_all=True
    ),
    # Motif-Technologies/optimizer
    "motif": Peer(
        "Motif's Muon",
        _keys("momentum nesterov ns_steps adamw_betas adamw_eps none_grad use_muon names"),
        marks=_keys("adamw_betas adamw_eps none_grad"),
    ),
    # microsoft/dion 0a059a4: Muon and NorMuon
    "dion": Peer(
        "Dion's Muon and NorMuon",
        _keys(
            "mu beta1 beta2 muon_beta2 cautious_wd algorithm step epsilon nesterov flatten "
            "adjust_lr num_heads split_sizes"
        ),
        marks=_keys("mu cautious_wd adjust_lr"),
        arguments={"use_polar_express": None},
    ),
    # NVIDIA-NeMo/Emerging-Optimizers fd77292: Muon
    "emerging_optimizers": Peer(
        "Emerging-Optimizers' Muon",
        _keys("momentum beta2 eps"),
        state_marks=_keys("moment2_buffer"),
        arguments=EMERGING,
    ),
    # NVIDIA/Megatron-LM d98e8a6: TensorParallelMuon, with the defaults of OptimizerConfig
    "megatron": Peer(
        "Megatron-LM's Muon",
        _keys(
            "momentum wd_mult lr_mult is_expert_parallel is_decoupled_lr default_config "
            "pre_wd_mult pre_lr_mult start_wd end_wd optimizer beta2 eps"
        ),
        marks=_keys("is_expert_parallel is_decoupled_lr default_config pre_wd_mult pre_lr_mult"),
        arguments={
            **{key: EMERGING[key] for key in EMERGING if key != "weight_decay_method"},
            "use_decoupled_weight_decay": True,
            "split_qkv": True,
            "tp_mode": "duplicated",
        },
    ),
    # timm 1.0.31: timm.optim.Muon
    "timm": Peer(
        "timm's Muon",
        _keys(
            "momentum nesterov ns_steps ns_coefficients eps safety_factor adjust_lr_fn conv_mode "
            "use_muon normalize_spatial fallback_lr_scale adamw_lr betas algo scale_eps "
            "capturable verbose use_fallback"
        ),
        marks=_keys("conv_mode normalize_spatial safety_factor fallback_lr_scale scale_eps"),
    ),
    # karpathy/nanochat 3a5e0bc (Muon, DistMuon) to 92d63d4 (MuonAdamW)
    "nanochat": Peer(
        "nanochat's Muon",
        _keys("momentum nesterov ns_steps zero_buffer beta2 kind betas eps chunk_size"),
        marks=_keys("zero_buffer"),
        state_marks=_keys("second_momentum_buffer"),
        steps_all=True,
    ),
    # KellerJordan/modded-nanogpt f411b3d: NorMuonAndAdam; NorMuon of the medium track
    "modded_nanogpt": Peer(
        "modded-nanogpt's NorMuon",
        _keys("momentum beta2 chunk_size"),
        marks=_keys("param_lr_cpu param_wd_cpu momentum_buffer second_momentum_buffer"),
    ),
    # deepspeed 0.19.8: MuonWithAuxAdam and its parents
    "deepspeed": Peer(
        "DeepSpeed's Muon",
        _keys("momentum use_muon ns_method betas eps bias_correction amsgrad adam_w_mode moe"),
        marks=_keys("ns_method"),
        arguments={"adam_w_mode": True, "muon_num_heads": None},
        steps_all=True,
    ),
    # muonium 0.2.0
    "muonium": Peer(
        "muonium's Muon",
        _keys(
            "algorithm use_muon wd use_cautious_wd momentum nesterov ns_steps "
            "orthogonalization_strategy maximize flatten split_sizes muon_beta2 amsgrad betas eps "
            "decoupled_weight_decay has_complex"
        ),
        marks=_keys("orthogonalization_strategy use_cautious_wd has_complex"),
        state_marks=_keys("lr_ratio"),
    ),
}
# "torch": torch.optim.Muon and this package, whose state dicts need no conversion
SOURCES = ("torch", *PEERS)

# Checkpoints that contain a state dict: keys found in no state dict -> (peer, advice)
WHOLES: dict[frozenset[str], tuple[str, str]] = {
    _keys("fp32_from_fp16_params"): (
        "megatron",
        "pass its 'optimizer', and copy the fp32 weights into the model",
    ),
    _keys("param_states param_cfgs"): (
        "modded_nanogpt",
        "its rule (cautious weight decay, rows or columns by shape, banks of matrices) has no "
        "counterpart here: start with new state",
    ),
    _keys("single_partition_of_fp32_groups"): (
        "deepspeed",
        "ZeRO keeps flat partitions, which hold no matrices: start with new state",
    ),
    _keys("fp32_flat_groups"): (
        "deepspeed",
        "ZeRO keeps flat partitions, which hold no matrices: start with new state",
    ),
}

# Coefficients of Emerging-Optimizers, with four decimals. After the last triple the sets of
# EMERGING_REPEAT_LAST repeat the last triple; other sets start again with the first.
EMERGING_SETS: dict[str, tuple[Triple, ...]] = {
    "simple": SETS["jordan"],
    "quintic": SETS["quintic"],
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
    "deepseekv4": SETS["deepseek_v4"],
    "cubic5": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
}
EMERGING_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")

# Coefficients of timm, before its safety factor
TIMM_SETS: dict[str, tuple[Triple, ...]] = {
    "original": SETS["jordan"],
    "quintic": SETS["quintic"],
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
        NANOCHAT[0],
        (4.0429299351667245, -2.808917465908704, 0.5000178451051299),
        (3.8916678022926563, -2.7724841532176825, 0.5060648178503389),
        (3.285753657755658, -2.3681294933425394, 0.46449024233003117),
        (2.3005307116270983, -1.6111665557258408, 0.3833374427545273),
        (1.8631210546382593, -1.2042160621002727, 0.3421879560523383),
        (1.8382572152247512, -1.1779263289537742, 0.3396513038637379),
        (1.8749999923301852, -1.2499999836060613, 0.374999991275876),
    ),
}


def marked(keys: Iterable[str], state_keys: Iterable[str] = ()) -> list[str]:
    """Return the names of peers identified by a key of a group or of state."""
    keys = set(keys)
    state_keys = set(state_keys)
    return [
        name for name, peer in PEERS.items() if peer.marks & keys or peer.state_marks & state_keys
    ]


def candidates(keys: Iterable[str], state_keys: Iterable[str]) -> list[str]:
    """Return the names of all sources that write a state dict with the given keys of groups and
    state.
    """
    keys = frozenset(keys)
    own = keys - SHARED - IGNORED
    if names := marked(keys, state_keys):
        return names
    if TORCH <= keys and ("use_muon" in keys or own <= TORCH):
        return ["torch"]
    if "kind" in own and own <= PEERS["nanochat"].keys:
        return ["nanochat"]
    if "use_muon" in own and own <= PEERS["keller_jordan"].keys:
        return ["keller_jordan"]
    # Two peers write equal keys: the caller has to ask the user
    if own == {"momentum"}:
        return ["keller_jordan", "emerging_optimizers"]
    if own in (_keys("momentum nesterov ns_steps"), _keys("momentum nesterov ns_steps beta2")):
        return ["keller_jordan", "nanochat"] if "beta2" not in own else ["nanochat"]
    return []


def going_on_from_adamw(keys: Iterable[str], key: str) -> str:
    """Return advice, the end of a message, if the keys of state or of all groups are those of an
    AdamW that stepped all parameters; else "". `key`: "exp_avg" of state, or "betas" of groups.
    """
    others = {"exp_avg": "exp_avg_sq", "betas": "eps"}  # Lion has no other
    has_both = key in keys and others[key] in keys
    if not has_both or any("momentum" in str(other) for other in keys):
        return ""
    return ". AdamW's averages can become momentum: docs/migration.md, From AdamW"


def listed(keys: Iterable) -> str:
    """Return sorted keys as text for a message, shortened."""
    return shortened(", ".join(sorted(map(str, keys)))) or "nothing"


def check_source(number: int, group: dict, saved: dict) -> None:
    """Raise ValueError for a group saved by a Muon of another package or by SGD, NAdam or RAdam,
    whose state or options have a different meaning. Keys of the own group identify no package.
    """
    where = f"parameter group {number} was saved by"
    convert = "pass the state dict through convert_state_dict first, which says more"
    if names := marked(set(saved) - set(group)):
        raise ValueError(
            f"{where} {PEERS[names[0]].title} (keys {listed(saved)}), which scales its "
            f"state or its steps differently: {convert}"
        )
    if "dampening" in set(saved) - set(group):
        raise ValueError(
            f"{where} torch.optim.SGD, whose weight decay is part of the gradient. Its "
            "momentum_buffer is momentum_sum here if dampening is 0: rename the key and remove "
            "dampening from the group, or begin the momentum anew"
        )
    # Adam and AdamW write amsgrad, too: the group is NAdam's or RAdam's, with averages as AdamW's,
    # but another step
    if "decoupled_weight_decay" in set(saved) - set(group) and "amsgrad" not in saved:
        name = "NAdam" if "momentum_decay" in saved else "RAdam"
        raise ValueError(
            f"{where} torch.optim.{name}, whose step from these averages is another one than "
            "AdamW's. To go on with AdamW all the same, remove decoupled_weight_decay from the "
            "group"
        )
    # A state dict of an older version of this package may lack one of the two marks
    own_marks = {"adjust_lr_fn", "ns_coefficients"}
    if group["use_muon"] and "momentum" in saved and not own_marks & set(saved):
        raise ValueError(
            f"{where} another optimizer: it has momentum, but no adjust_lr_fn (keys "
            f"{listed(saved)}). If that was a Muon, {convert}"
        )
