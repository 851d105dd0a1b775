"""Compile every Triton kernel for some architectures, without a GPU: `python -m tests.compile_kernels sm90=232448`.

The number is the bytes of shared memory there. For sm90 the assembler takes part, for others PTX or AMDGCN is the end.
Prints a line of JSON per architecture: every product with its tile and the shared memory that it takes, that of the
others, and for sm90 how many bytes the cast reads at once, who waits for earlier kernels, and what the assembler says.
With --few, of kernels that take long, forms of which each choice is met once in place of all pairs of choices.
"""
from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.hasty import hasty_kernel
from tests.ranks import part

# sm86 runs the code of sm80: Triton writes the same for it but for the target's name. What differs is the launches.
TARGETS = {"sm80": ("cuda", 80, 32), "sm86": ("cuda", 80, 32), "sm90": ("cuda", 90, 32),
           "sm100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
GLUON = "tensordesc<{}[1, {}, {}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)>"
OPERANDS = "a", "b", "a_half", "b_half"
ROW_MAJOR, COLUMN_MAJOR = ("i32", "i32", 1), ("i32", 1, "i32")
TYPES = {"TYPE_0": triton.language.float32, "TYPE_1": triton.language.bfloat16, "TYPE_2": triton.language.float32,
         "TYPE_3": triton.language.float32}


FEW = "--few" in sys.argv
waits = {}  # name of a kernel -> whether all its binaries for sm90 wait for kernels that were launched before
reads_first = {}  # name of a kernel -> whether all its binaries for sm90 load before they let the next kernel begin
spilled = {}  # name of a kernel -> the most bytes of registers that the assembler stores elsewhere in one of them
serialized = {}  # name of a kernel -> why products wait for each other in one of them
barriers = {}  # name of a kernel -> where the first barrier lies in shared memory, in each of them


def end_with_text(backend=None, stages=None, *_):
    """Leave the assembler of this kind of GPU out. Without arguments: what a cache knows this by (Triton 3.7)."""
    if backend is None:
        return "text", "text"
    stages[backend.binary_ext] = lambda text, metadata: b""


def compile_for(arch: str, kernel, arguments: dict, **options) -> int:
    """Compile; an argument is a type's name, or a constant (a text as constexpr). Return the bytes of shared memory."""
    return compiled(arch, kernel, arguments, **options).metadata.shared


def compiled(arch: str, kernel, arguments: dict, even: bool | None = None, **options):
    """Compile as for a launch whose addresses are multiples of 16 and, if `even`, whose sizes and strides are, too.
    None: as this process was told.

    Such a launch takes the most shared memory: what is read at once by a thread may be fetched ahead.
    """
    function, even = kernel.make(), "--uneven" not in sys.argv if even is None else even
    signature, constants, hints, sixteen = {}, {}, {}, [["tt.divisibility", 16]]
    for place, name in enumerate(function.arg_names):
        value, known = arguments[name], even and name not in kernel.numbers
        if isinstance(value, tuple):
            signature[name] = tuple(x if isinstance(x, str) else "constexpr" for x in value)
            constants |= {(place, i): x for i, x in enumerate(value) if not isinstance(x, str)}
            hints |= {(place, i): sixteen for i, x in enumerate(value) if x == "i32" and known}
        elif isinstance(value, str):
            signature[name] = value
            hints |= {(place,): sixteen} if value.startswith("*") or value == "i32" and known else {}
        else:
            signature[name], constants[(place,)] = "constexpr", getattr(value, "value", value)
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(fn=function, signature=signature, constexprs=constants, attrs=hints)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        made = triton.compile(source, target=GPUTarget(*TARGETS[arch]), options=options)
    if arch == "sm90":
        _note(kernel.__name__, made.asm["ptx"], said.getvalue())
    return made


def _note(name: str, ptx: str, said: str) -> None:
    """Keep what is to be known of a binary; the assembler says nothing of one that is in the cache."""
    waits[name] = waits.get(name, True) and "griddepcontrol.wait" in ptx
    reads_first[name] = reads_first.get(name, True) and -1 < ptx.find("ld.global") < ptx.find("launch_dependents")
    if found := re.findall(r"add\.s32[^;]*, (\d+);", ptx.partition("mbarrier.init")[0]):
        barriers.setdefault(name, set()).add(int(found[-1]))
    for stored in re.findall(r"(\d+) bytes spill stores", said):
        spilled[name] = max(spilled.get(name, 0), int(stored))
    for reason in re.findall(r"wgmma.mma_async instructions are serialized due to .*", said):
        serialized[name] = reason


def products(arch: str):
    """Compile the product kernel once for each distinct use and tile of the table, or for the default tiles."""
    tiles = part("kernels.launch.tile_config")
    usual = [dict(op=op, bytes=size, tile=(t.rows, t.columns, t.inner), group=t.group, stages=t.stages, warps=t.warps)
             for size, t in ((2, tiles.DEFAULT), (4, tiles.DEFAULT_FP32)) for op in ("gram", "symmetric", "product")]
    entries = tiles.table(arch)["entries"] or usual
    uses = {(e["op"], e["bytes"], *e["tile"], e.get("loop")): e for e in entries}
    loops_of_bf16 = set()
    for entry in uses.values():
        loop = entry.get("loop", "pointers")
        specialised = loop in tiles.SPECIALISED
        compile_product = by_pointers if loop == "pointers" else by_groups if specialised else by_tma
        yield entry, compile_product(arch, entry)
        largest = loop != "once" or entry["tile"][:2] == [128, 128]  # of the tiles that a program has alone
        if entry["op"] != "product" and loop == "once":
            yield {**entry, "to": "single"}, by_one_group(arch, entry)
            if largest:
                yield {**entry, "to": "ordered"}, by_one_group(arch, entry, order="*i32")
        enough = FEW and loop in loops_of_bf16
        if entry["op"] == "gram" and entry["bytes"] == 2 and loop != "pointers" and largest and not enough:
            loops_of_bf16.add(loop)
            of_bf16 = by_one_group if loop == "once" else compile_product
            yield {**entry, "of": "bf16"}, of_bf16(arch, entry, of="bf16")
        if entry["op"] == "product":
            kind = "turned" if specialised else "rows"
            yield {**entry, "to": kind}, compile_product(arch, entry, **{kind: True})
    by_pointers(arch, dict(entry, bytes=4), sizes=(1, 1, 1), EVEN=False)


def by_pointers(arch: str, entry: dict, sizes=("i32", "i32", "i32"), rows=False, **more) -> int:
    """Compile as for a result that is stored as a whole, or by a table of `rows`."""
    pointer, op = "*fp16" if entry["bytes"] == 2 else "*fp32", entry["op"]
    height, width, inner = entry["tile"]
    arguments = dict(
        A=pointer, B=pointer, OUT=pointer, sizes=sizes,
        scales=None if op == "symmetric" else "*fp32", **dict.fromkeys("CDE", pointer if op == "symmetric" else None),
        a_strides=ROW_MAJOR, b_strides=COLUMN_MAJOR if op == "gram" else ROW_MAJOR, c_strides=ROW_MAJOR,
        d_strides=ROW_MAJOR, e_strides=ROW_MAJOR, out_strides=None if rows else ROW_MAJOR, factors=("fp32",) * 5,
        SYMMETRIC=op != "product", EVEN=op == "gram", TURNED=rows, BLOCK_R=height, BLOCK_C=width, BLOCK_K=inner,
        GROUP=entry["group"])
    return compile_for(arch, part("kernels.matmul.pointer")._product_kernel, {**arguments, **more},
                       num_stages=entry["stages"], num_warps=entry["warps"])


def by_tma(arch: str, entry: dict, rows=False, of="fp16") -> int:
    """The same, by TMA but for the store by a table of `rows`."""
    sm90_tma = part("kernels.matmul.sm90_tma")
    symmetric, (height, width, inner) = entry["op"] != "product", entry["tile"]
    half, beside = (height, (height, height)) if symmetric else (width, (inner, width // 2))
    boxes = dict(a=(height, inner), b=(width, inner) if symmetric else (inner, width), c=beside,
                 d=(height, beside[1]), e=(height, height), out=(height, half))
    arguments = dict(
        {name: "tensordesc<{}[1, {}, {}]>".format(of if name in "ab" else "fp16", *box) for name, box in boxes.items()},
        pointer="*fp16",
        strides=ROW_MAJOR, order="*i32", count="i32", whole="i32", halves="i32", sizes=("i32",) * 3,
        scales="*fp32", factors=("fp32",) * 5,
        SYMMETRIC=sm90_tma.SYMMETRY[entry["op"]], TURNED=False,
        ADDENDS=3 * (entry["op"] == "symmetric"), DIAGONAL=True, PDL=True,
        LOOP=triton.language.constexpr(entry["loop"]))
    unused = "cde" if entry["op"] == "gram" or not symmetric and width == height else "" if symmetric else "e"
    arguments |= dict.fromkeys(unused) | (dict(d=None, out=None, strides=None) if rows else {})
    return compile_for(arch, sm90_tma._tma_kernel, arguments,
                       num_stages=entry["stages"], num_warps=entry["warps"])


def by_groups(arch: str, entry: dict, turned=False, of="fp16") -> int:
    """The same, by groups of warps that differ: as for a result, or for its transpose."""
    sm90_warp_specialized = part("kernels.matmul.sm90_warp_specialized")
    op, (height, width, inner), half = entry["op"], entry["tile"], entry["tile"][0] // 2
    left, right = (height, inner), (width, inner)
    boxes = dict(a=left[::-1] if turned else left, b=right[::-1] if op == "product" else right)
    kernel, sizes = sm90_warp_specialized.pingpong_kernel, {}
    if entry["loop"] == "cooperative":
        kernel, sizes = sm90_warp_specialized.cooperative_kernel, dict(BLOCK_R=height, BLOCK_C=width)
        boxes["b_half"] = (inner, width // 2) if op == "product" else (width // 2, inner)
    boxes |= dict.fromkeys(("c", "d", "e", "out"), (half, half) if entry["loop"] == "cooperative" else (height, height))
    if entry["loop"] == "pingpong":
        boxes |= dict.fromkeys(("a_half", "c_half", "d_half", "e_half", "out_half"), (half, inner))
    arguments = {name: GLUON.format(of if name in OPERANDS else "fp16", *box) for name, box in boxes.items()}
    arguments |= sizes | dict(
        order="*i32", count="i32", whole="i32", halves="i32", inner="i32", addends="i32", TURNED=turned,
        STAGES=entry["stages"], SYMMETRIC=part("kernels.matmul.sm90_tma").SYMMETRY[op], scales="*fp32",
        factors=("fp32",) * 5, SEVERAL=op == "symmetric")
    return compile_for(arch, kernel, arguments, num_warps=entry["warps"])


def by_one_group(arch: str, entry: dict, order=None, of="fp16") -> int:
    """The same of one tile a program, with as many addends as there can be, its place computed or in an `order`."""
    height, width, inner = entry["tile"]
    operands = ((height, inner), (width, inner)) if entry["op"] == "gram" else 2 * [(inner, inner)]
    boxes = dict.fromkeys(("c", "d", "e", "out"), (height, height)) | dict(zip("ab", operands))
    arguments = {name: GLUON.format(of if name in OPERANDS else "fp16", *box) for name, box in boxes.items()} | dict(
        order=order, count="i32", inner="i32", addends="i32", early="i32", mirror="i32", scales="*fp32",
        factors=("fp32",) * 5, SYMMETRIC=part("kernels.matmul.sm90_tma").SYMMETRY[entry["op"]], COLUMNS=width,
        STAGES=entry["stages"])
    return compile_for(arch, part("kernels.matmul.sm90_one_tile").one_tile_kernel, arguments, num_warps=entry["warps"])


def raw(tile) -> int:
    """Compile the product that casts on its way."""
    boxes = dict(x=("bf16", tile.inner, tile.rows), a=("fp16", tile.inner, tile.columns),
                 a_half=("fp16", tile.inner, tile.columns // 2), out=("fp16", tile.rows // 2, tile.rows // 2))
    arguments = {name: GLUON.format(*box) for name, box in boxes.items()} | dict(
        order="*i32", count="i32", whole="i32", halves="i32", inner="i32", scales="*fp32", powers="*fp32",
        STAGES=tile.stages)
    return compile_for("sm90", part("kernels.matmul.sm90_mixed_input").mixed_input_kernel, arguments, num_warps=4)


def resident(dtype: str) -> int:
    """Compile what follows matrices in dtype whose Gram matrices stay in shared memory."""
    squares, halves = GLUON.format("fp16", 128, 128), GLUON.format("fp16", 64, 128)
    arguments = dict.fromkeys(("a", "z", "one_box", "other_box"), squares) | dict(
        x=GLUON.format(dtype, 256, 64), one_half=halves, other_half=halves, one="*fp16", other="*fp16", apart="i32",
        scales="*fp32", steps="i32", codes="*i32", factors="*fp32", products="i32", keep="i32", EARLY=dtype == "bf16")
    return compile_for("sm90", part("kernels.onchip.sm90_gram_chain").gram_chain_kernel, arguments, num_warps=4)


def others(arch: str, shared: int):
    """Compile the kernels of everything that is not a product.

    For sm90 each pair of flags of momentum, copies and weight update; elsewhere each form of them once or twice.
    """
    pack, update, norm, aol, check, quantized, averages, halves = (
        part(f"{name}")
        for name in (
            "kernels.elementwise.momentum",
            "kernels.elementwise.weight_update",
            "kernels.elementwise.scaling",
            "kernels.elementwise.aol",
            "kernels.elementwise.nonfinite_check",
            "kernels.quantized.momentum",
            "kernels.quantized.adamw",
            "kernels.weights.split",
        )
    )
    table = dict(records="*i64", blocks="*i64", FIELDS=15, BLOCK=4096, ACCESS=2, **TYPES)
    for access in (0, 1, 2):
        yield compile_for(arch, check._check_kernel, dict(
            table, addresses="*i64", flags="*fp32", places="*i64", ACCESS=access))
        yield compile_for(arch, update._scale_kernel, dict(
            table, factors="*fp32", places="*i64", ACCESS=access, ACROSS=access == 0))
    for decay, is_split in [(0, False), (1, True), (2, False)] if arch == "sm90" else [(2, True)]:
        pointers = dict(weights="*i16" if is_split else "*bf16", rests="*i16", gradients="*bf16", initials="*bf16",
                        m_numbers="*i8", v_numbers="*u8", m_scales="*fp32", v_scales="*fp32", factors="*fp32")
        strides = [f"{name}_stride" for name in ("w", "rest", "g", "initial", "m", "v", "m_scale", "v_scale")]
        numbers = dict.fromkeys(("one_minus_beta1", "beta2", "one_minus_beta2", "eps"), "fp32")
        yield compile_for(arch, averages._adamw_kernel, dict(
            pointers, **dict.fromkeys((*strides, "rows", "columns"), "i32"), **numbers, DECAY=decay, SPLIT=is_split,
            NVIDIA=arch.startswith("sm"), FLAT=not is_split, ACCESS=averages.ACCESS, LENGTH=64, TILE=averages.TILE,
            SLACK=averages.SLACK),
            **(averages.OPTIONS if is_split or arch == "gfx942" else averages.OPTIONS_OF_NVIDIA))
    for skips in (False, True):
        skip = dict(table, flags="*fp32" if skips else "*i64", places="*i64", SKIPS=skips)
        own = dict(groups="*i64", GROUPED=skips, squares="*fp32" if skips else "*i64", COLLECTS=skips)
        fresh = dict(skip, **own, addresses="*i64", weight="*fp32", update_momentum="i32")
        for form in ({"SUMS": False, "CORRECTED": not skips}, {"SUMS": True, "CORRECTED": False}, {"FEEDBACK": True}):
            if arch == "sm90" or form.get("SUMS", not skips) == skips or not skips:
                yield compile_for(arch, pack._pack_kernel, dict(fresh, NESTEROV=True, SIGNS=skips) | {
                    "SUMS": False, "CORRECTED": False, "FEEDBACK": False} | form)
        in_8_bits = dict(fresh, NESTEROV=True, LENGTH=64, ACCESS=int(not skips), TYPE_0=triton.language.int8,
                         TYPE_1=triton.language.float32)
        # With U: all flags on, and all off. M alone is written without them
        for form in ({"SUMS": not skips, "CORRECTED": skips, "SIGNS": skips, "TO_U": True},
                     {"SUMS": skips, "CORRECTED": False, "SIGNS": False, "TO_U": False}):
            if arch == "sm90" or form["TO_U"] == skips:
                yield compile_for(arch, quantized._momentum_kernel, dict(in_8_bits, **form))
        if arch == "sm90" or skips:
            yield compile_for(arch, pack._copy_kernel, dict(skip, addresses="*i64", FRESH=True))
        for access in (0, 1):
            if arch == "sm90" or not skips:
                yield compile_for(arch, pack._copy_kernel, dict(skip, addresses=None, FRESH=False, ACCESS=access))
        pairs = [(momenta, decay) for momenta, decay in itertools.product((False, True), (0, 1, 2))
                 if (momenta + decay) % 2 == skips]
        for momenta, decay in pairs if arch == "sm90" else [(True, 0), (skips, 1 + skips)]:
            rounds = halves.STOCHASTIC if skips != (decay == 1) else halves.NEAREST
            arguments = fresh if momenta else dict(
                skip, **own, addresses=None, weight=None, update_momentum="i32")
            arguments |= dict(scales="*fp32", sent="*i64", factors="*fp32", MOMENTA=momenta, SUMS=skips, keys="*i64",
                              FEEDBACK=False, TYPE_4=TYPES["TYPE_2"], TYPE_5=TYPES["TYPE_2"])
            yield compile_for(arch, update._update_kernel, dict(arguments, DECAY=decay, FACTORS=0, ROUNDS=rounds))
            if momenta:
                yield compile_for(arch, update._update_kernel, dict(
                    arguments, DECAY=decay, FACTORS=0, ROUNDS=0, SUMS=False, FEEDBACK=True))
            if momenta and decay != 1:
                yield compile_for(arch, update._update_kernel, dict(
                    arguments, DECAY=decay, FACTORS=0, ROUNDS=halves.SPLIT, TYPE_0=triton.language.int16))
            if decay == 0:
                for kind in (dict(DECAY=3, FACTORS=1), dict(DECAY=0, FACTORS=1), dict(DECAY=0, FACTORS=2, ACCESS=1)):
                    yield compile_for(arch, update._update_kernel, {**arguments, **kind, "ROUNDS": rounds})
    sample = part("kernels.metrics.sample")
    for kernel, splits in itertools.product((sample._save_kernel, sample._add_kernel), (False, True)):
        kinds = {"TYPE_0": triton.language.int16, "TYPE_1": triton.language.int16} if splits else {}
        yield compile_for(arch, kernel, dict(table, saved="*fp32", squares="*fp32", SPLIT=splits, **kinds),
                          num_warps=8, enable_fp_fusion=False)
    for kernel in (halves._join_kernel, halves._split_kernel):
        yield compile_for(arch, kernel, dict(wide="*fp32", weights="*i16", rests="*i16", count="i32", TILE=4096),
                          num_warps=8, enable_fp_fusion=False)
    sizes = dict(numel="i32", R="i32", C="i32", eps="fp32", BLOCK=1024, TILE=64, strides=ROW_MAJOR, parts="i32",
                 programs="i32", DOWN=32, ACROSS=16, u_strides=ROW_MAJOR, o_strides=ROW_MAJOR, v_strides=("i32", 1, 1),
                 x_strides=ROW_MAJOR, ROWS=4, COLUMNS=256, WIDE=True, EVEN=16, STRAIGHT=True, STAGES=8, FORM=0,
                 PDL=arch in ("sm90", "sm100"))
    floats = dict(V="*fp32", squares="*fp32", factors="*fp32", sums="*fp32", numbers="*fp32", groups="*i64",
                  GROUPED=False,
                  guesses="*fp32", scales="*fp32", aim="fp32")
    cast, scales = norm._cast_kernel, norm._norm_kernel
    sums = dict(X="*bf16", out="*fp32", R="i32", C="i32", BLOCK=1024)
    yield compile_for(arch, aol._row_absolutes_kernel, sums)
    yield compile_for(arch, aol._column_absolutes_kernel, sums | dict(blocks="i32", ROWS=32, COLUMNS=64))
    for kernel in (cast, scales):
        yield compile_for(arch, kernel, dict(sizes, **floats, U="*bf16", O="*bf16", X="*fp16"))
        if arch == "sm90":  # sizes of 1 are constants to the compiler
            ones = dict(R=1, C=1, numel=1, parts=1, EVEN=1, u_strides=COLUMN_MAJOR, o_strides=COLUMN_MAJOR)
            yield compile_for(arch, kernel, {**sizes, **floats, "U": "*fp32", "O": "*fp32", "X": "*bf16", **ones})
    in_rows = dict(sizes, **floats, U="*bf16", O="*bf16", X="*fp16") | dict(
        strides=None, u_strides=None, o_strides=None)
    for kernel in (cast, scales):
        yield compile_for(arch, kernel, in_rows)
    yield from norms_of_rules(arch)
    if arch == "sm90":
        for form in (1, 2):
            yield compile_for(arch, cast, dict(sizes, **floats, U="*bf16", X="*bf16") | dict(FORM=form))
        beyond = dict(factors="*fp32", apart="i32", n="i32", m="i32", copied="i32", a_strides=ROW_MAJOR, SIDE=32,
                      STEP=32, A="*fp16")
        raw_norm = part("kernels.elementwise.scaling")._raw_norm_kernel
        yield compile_for(arch, raw_norm, dict(sizes, **floats, U="*bf16") | beyond, num_warps=4)
    lengths = dict(U="*bf16", Y="*fp16", A="*fp16", lengths="*fp32", scales="*fp32", n="i32", m="i32", ROWS=4,
                   strides=ROW_MAJOR, u_strides=COLUMN_MAJOR, y_strides=ROW_MAJOR, BLOCK=512, TILE=64)
    for kernel in (aol._lengths_kernel, aol._unit_rows_kernel, aol._scales_kernel):
        yield compile_for(arch, kernel, lengths)
    for left, right in (("*fp32", "*fp32"), ("*fp32", None), (None, "*fp32")):
        yield compile_for(arch, aol._rescale_kernel, dict(lengths, left=left, right=right))
    linear = dict(lengths, OUT="*fp16", a_strides=ROW_MAJOR, out_strides=ROW_MAJOR, b="fp32", a="fp32", SIDE=64)
    yield compile_for(arch, part("kernels.matmul.pointer")._linear_kernel, linear)
    pairs = ((64, "*bf16"), (128, "*fp32"))  # the latter takes the most memory
    for side, U in pairs if FEW else itertools.product((64, 128), ("*bf16", "*fp32")):
        yield from small(arch, shared, side, U)
    if arch == "sm90":
        pairs = (("*bf16", False), ("*fp32", True))  # the latter takes the most registers
        for U, turned in pairs if FEW else itertools.product(("*bf16", "*fp32"), (False, True)):
            yield whole(U, turned)
        yield from map(raw, part("kernels.matmul.api").MIXED_INPUT_TILES)
        yield from map(resident, ("fp16", "bf16"))


def norms_of_rules(arch: str):
    """Compile the kernels of the rules by name as they are launched, and once for sizes of 1."""
    norms, update = part("kernels.elementwise.norms"), part("kernels.elementwise.weight_update")
    nothing = dict.fromkeys(
        ("columns", "rows", "V", "squares", "numbers", "groups", "v_strides", "eps"))
    sizes = dict.fromkeys(("R", "C", "parts", "lines", "count", "size", "tiles"), "i32")
    given = dict(sizes, **nothing, X="*bf16", O="*bf16", W="*fp32", strides=ROW_MAJOR, ALIGNED=True, TABLE=False,
                 TILE=4096, BLOCK=1024, STEPS=8, root="fp32")
    given |= dict.fromkeys(("out", "sums", "weights", "radius", "keep", "step"), "*fp32")
    wide, whole = dict(ROWS=4, WIDTH=1024), dict(ROWS=16, COLUMNS=256)
    eps, moments = dict(eps="fp32"), dict.fromkeys(("V", "squares", "numbers"), "*fp32") | dict(
        groups="*i64", v_strides=("i32", 1), eps="fp32")
    table = dict(strides=None)
    ones = dict.fromkeys(sizes, 1) | dict(X="*fp32", strides=("i32", 1, 1))
    uses = [
        (norms._rows_kernel, wide), (norms._rows_kernel, wide | moments), (norms._rows_kernel, wide | moments | table),
        (norms._rows_kernel, wide | moments | ones), (norms._rows_kernel, wide | eps),
        (norms._rows_kernel, dict(ROWS=1, WIDTH=8192, out=None, columns="*fp32") | eps),
        (norms._column_sums_kernel, whole), (norms._column_sums_kernel, whole | dict(rows="*fp32")),
        (norms._column_sums_kernel, whole | ones), (norms._columns_kernel, dict(BLOCK=256)),
        (norms._columns_kernel, dict(BLOCK=256) | eps), (norms._columns_kernel, dict(BLOCK=256) | moments),
        (norms._norms_kernel, dict(squares="*fp32")), (norms._scale_kernel, whole | dict(rows="*fp32")),
        (norms._scale_kernel, whole | dict(columns="*fp32")), (norms._scale_kernel, whole | table | dict(rows="*fp32")),
        (norms._roots_kernel, {}), (norms._roots_kernel, dict(root=None)), (update._products_kernel, {}),
        (update._products_kernel, dict(W="*i64", TABLE=True)), (update._products_kernel, dict(W="*bf16")),
        (norms._element_moments_kernel, moments),
        (norms._element_moments_kernel, moments | dict(V="*i64", TABLE=True)),
        (update._sphere_kernel, dict(numbers="*fp32")), (update._sphere_kernel, dict(numbers="*fp32", groups="*i64")),
    ]
    for kernel, more in uses:
        yield compile_for(arch, kernel, given | more, num_warps=8, enable_fp_fusion=False)


def small(arch: str, shared: int, side: int, U: str):
    """Compile the kernels of matrices with a short side of at most `side` as they are launched with so much memory."""
    on_chip, size = part("kernels.onchip.polar"), 2 if U == "*bf16" else 4
    arguments = dict(
        U=U, X="*fp16", out=U, u_strides=ROW_MAJOR, x_strides=ROW_MAJOR, out_strides=ROW_MAJOR, A="*fp16", Q="*fp16",
        a_strides=ROW_MAJOR, q_strides=ROW_MAJOR, triples=("fp32",) * 15, n="i32", m="i32", eps="fp32", WIDE=True,
        BLOCK=side, DTYPE=triton.language.float16)
    # As few steps as show every kind; each is compiled for itself, and more of them take no more memory. The Gram
    # iteration's: the first, one between and the last of a interval, and, after a restart, the only one of another. Of
    # what U's dtype changes, which is before the first step and after the last, two only steps show as much. For sm90
    # both sides show every kind, elsewhere the longer, and the interval's kernel leaves out the step between, which
    # the Gram iteration has.
    full = arch == "sm90"
    yield compile_for(arch, on_chip._interval_kernel, arguments | dict(STEPS=3 if full else 2),
                      num_warps=side // 16)
    all_kinds = U == "*bf16" and (full or side == 128 or FEW)
    standard = on_chip._standard_kernel, dict(STEPS=2 if all_kinds else 1)
    gram = on_chip._gram_kernel, dict(STEPS=4, FIRSTS=0b11001) if all_kinds else dict(STEPS=2, FIRSTS=0b111)
    for (kernel, steps), chunk in ((standard, side), (standard, 128), (gram, 128)):
        stages, options = on_chip.pipeline_depth(shared, side * chunk, size)
        constants = dict(steps, CHUNK=chunk, STAGES=stages)
        yield compile_for(arch, kernel, arguments | constants, num_warps=side // 16, **options)


def whole(U: str, turned: bool, pieces: int = 8) -> int:
    """Compile the kernel of matrices that stay in shared memory as it is launched, for so many pieces."""
    chain, size = part("kernels.onchip.sm90_polar"), 2 if U == "*bf16" else 4
    strides = COLUMN_MAJOR if turned else ROW_MAJOR
    # Of the wide, turned one, which takes the most registers, and of the one that is neither as many steps as usual; of
    # the others as few as show every kind.
    usual = turned == (size == 4) and (turned or not FEW)
    arguments = dict(
        U=U, out=U, u_strides=strides, out_strides=strides, triples=("fp32",) * 15, n="i32", m="i32", eps="fp32",
        WIDE=True, STEPS=5 if usual else 3, FIRSTS=0b101011 if usual else 0b1011, TURNED=turned,
        FROM=chain._lines(size, turned), TO=chain._lines(size, turned), SIDE=chain.SIDE, WIDTH=chain.WIDTH,
        PIECES=pieces, IN_REGISTERS=min(chain.IN_REGISTERS[size], pieces), DTYPE=triton.language.float16)
    return compile_for("sm90", chain._polar_kernel, arguments, num_warps=8)


def cast_bytes(even: int) -> int:
    """Return how many bytes a thread of `norm._cast_kernel` reads of bf16 at once on sm90 if `even` divides."""
    arguments = dict(
        U="*bf16", X="*fp16", sums="*fp32", guesses="*fp32", parts="i32", R="i32", C="i32", u_strides=ROW_MAJOR,
        x_strides=ROW_MAJOR, aim="fp32", ROWS=32, COLUMNS=256, EVEN=even, STRAIGHT=True, DOWN=32, ACROSS=16, FORM=0,
        PDL=True)
    ptx = compiled(
        "sm90", part("kernels.elementwise.scaling")._cast_kernel, arguments, even=even == 16, num_warps=4
    ).asm["ptx"]
    sizes = [int(bits) // 8 * int(count or 1) for count, bits in re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", ptx)]
    return max(sizes)


def everything(arch: str, shared: int) -> dict:
    """Compile all of it for an architecture with so much shared memory."""
    triton.knobs.runtime.add_stages_inspection_hook = None if arch == "sm90" else end_with_text
    triton.knobs.nvidia.dump_ptxas_log = True
    found = {"arch": arch, "products": [{**entry, "shared_bytes": taken} for entry, taken in products(arch)],
             "others": list(others(arch, shared))}
    if arch == "sm90" and "--uneven" not in sys.argv:
        found["cast_bytes"] = {even: cast_bytes(even) for even in (1, 4, 8, 16)}
        compile_for(arch, hasty_kernel, {"out": "*fp32"}, num_warps=4)
        found |= {"waits": waits, "reads_first": reads_first, "spilled": spilled, "serialized": serialized,
                  "barriers": {name: sorted(found) for name, found in barriers.items()}}
    return found


if __name__ == "__main__":
    for arch, shared in (argument.split("=") for argument in sys.argv[1:] if "=" in argument):
        print(json.dumps(everything(arch, int(shared))), flush=True)
