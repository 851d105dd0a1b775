"""The timeline of a trace: names are sorted right, overlaps are counted once, and only the marked step counts."""

from __future__ import annotations

import gzip
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def timeline(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("timeline")


def kernel(name, stream, start, duration, category="kernel"):
    return {"ph": "X", "cat": category, "name": name, "tid": stream, "ts": start, "dur": duration,
            "args": {"stream": stream}}


def write(path, events, **more):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt") as file:
        json.dump({"traceEvents": events, **more}, file)
    return path


NAMES = {
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "wire", "c10d::alltoall_base_": "wire",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "wire", "gloo:all_to_all": "wire",
    "_tma_kernel": "products", "pingpong_kernel": "products", "cooperative_kernel": "products",
    "_product_kernel": "products", "mixed_input_kernel": "products",
    "_raw_norm_kernel": "memory",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT": "products",
    "sm90_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize128x128x64": "products", "aten::mm": "products",
    "_pack_kernel": "memory", "_copy_kernel": "memory", "_update_kernel": "memory", "_rows_kernel": "memory",
    "_norm_kernel": "memory", "Memcpy DtoD (Device -> Device)": "memory", "Memset (Device)": "memory",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>(...)": "memory",
    "aten::_foreach_copy_": "memory",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "memory",
    "aten::_fused_adamw_": "memory", "something_else": "other"}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_sorted_by_name(name, timeline):
    assert timeline.kind_of(name) == NAMES[name]


def test_every_kernel_of_the_package_is_known(timeline):
    """A new file whose kernels multiply has to be named in the tool: the others are taken for memory."""
    known = timeline.own_kernels()
    assert {"_tma_kernel", "_product_kernel", "_pack_kernel", "_copy_kernel", "_update_kernel"} <= set(known)
    for path in timeline.SOURCES.rglob("*.py"):
        multiplies = re.search(r"\btl\.dot\(|\bmultiply(_ring)?\(", path.read_text()) is not None
        # scaling.py multiplies matrices beyond the range of fp32 only, and reads all others
        assert not multiplies or path.parent.name in timeline.PRODUCTS or path.stem == "scaling", path.name


def test_overlap_is_counted_once(timeline, tmp_path):
    """0..10 products, 5..25 wire, 20..24 memory, 30..34 other: 5..10 and 20..24 are hidden, 25..30 is idle."""
    events = [kernel("_tma_kernel", 7, 100, 10), kernel("ncclDevKernel_SendRecv", 20, 105, 20),
              kernel("_pack_kernel", 7, 120, 4), kernel("unknown", 7, 130, 4), {"ph": "i", "name": "a mark", "ts": 0}]
    rank, works = timeline.read(write(tmp_path / "trace.json", events, distributedInfo={"rank": 3}))
    rows = {row["kind"]: row for row in timeline.busy(rank, works)}
    assert {kind: round(1e3 * row["busy_ms"]) for kind, row in rows.items()} == {
        "wire": 20, "products": 10, "memory": 4, "other": 4, "wire, exposed": 11, "idle": 5, "all": 34}
    assert rows["wire"]["rank"] == 3 and rows["all"]["launches"] == 4
    assert rows["idle"]["share"] == pytest.approx(5 / 34, abs=1e-4)


def test_only_the_marked_step_counts(timeline, tmp_path):
    """What the warm-up did before it does not; on a GPU the mark of the stream counts, not the host's."""
    events = [kernel("_tma_kernel", 7, 0, 50), kernel("step", 7, 100, 40, "gpu_user_annotation"),
              kernel("step", 1, 10, 5, "user_annotation"), kernel("_tma_kernel", 7, 100, 10),
              kernel("_pack_kernel", 9, 130, 10)]
    _, works = timeline.read(write(tmp_path / "trace.json.gz", events))
    assert [(w.kind, w.start, w.end) for w in works] == [("products", 0, 10), ("memory", 30, 40)]
    _, works = timeline.read(tmp_path / "trace.json.gz", whole=True)
    assert [w.start for w in works] == [0, 100, 130]
    # A mark on a second stream, which began earlier
    write(tmp_path / "trace.json.gz", [kernel("step", 9, 80, 30, "gpu_user_annotation"), *events,
                                       kernel("_copy_kernel", 9, 80, 10)])
    _, works = timeline.read(tmp_path / "trace.json.gz")
    assert [(w.start, w.end) for w in works] == [(0, 10), (20, 30), (50, 60)]
    assert timeline.lines(3, works)[1] == (
        "rank 3, compute:    0.020 to    0.030, busy   0.010, products, 1 launches, _tma_kernel")
    works = [timeline.Work(kind, "a", start, start + 10) for kind, start in (
        ("memory", 0), ("memory", 10), ("memory", 90), ("wire", 5), ("wire", 15))]
    assert [line.split(", busy")[0] for line in timeline.lines(0, works)] == [
        f"rank 0, {lane}:    {begin} to    {end}" for lane, begin, end in (
            ("compute", "0.000", "0.020"), ("wire", "0.005", "0.015"), ("wire", "0.015", "0.025"),
            ("compute", "0.090", "0.100"))]


def test_without_a_gpu_operators_count_once(timeline, tmp_path):
    """aten::mm with what it calls is one product; of operators of no kind, those that call none are left."""
    def op(name, start, duration):
        return kernel(name, 1, start, duration, "cpu_op")

    events = [op("aten::linear", 0, 100), op("aten::mm", 10, 50), op("aten::copy_", 20, 10), op("aten::view", 70, 5)]
    _, works = timeline.read(write(tmp_path / "trace.json", events))
    assert [(w.name, w.kind) for w in works] == [("aten::mm", "products"), ("aten::view", "other")]


def test_one_command_makes_figure_and_table(timeline, tmp_path, monkeypatch):
    events = [kernel("_tma_kernel", 7, 0, 1000), kernel("ncclDevKernel_SendRecv", 20, 500, 2000)]
    traces = [write(tmp_path / f"rank{r}.json", events, distributedInfo={"rank": r}) for r in (1, 0)]
    monkeypatch.setattr("sys.argv", ["timeline.py", *map(str, traces), "--out", str(tmp_path / "out.png")])
    timeline.main()
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "rank,kind,busy_ms,share,launches" and len(lines) == 1 + 2 * 7
    assert lines[1].startswith("0,wire,2.0,0.8,1") and (tmp_path / "out.png").stat().st_size > 5000


def test_a_lane_holds_what_runs_one_after_another(timeline):
    """The wire apart; times that overlap by a rounding do not make a lane of their own."""
    works = [timeline.Work(kind, "", start, end) for kind, start, end in (
        ("products", 0, 50), ("wire", 10, 30), ("memory", 49.8, 60), ("products", 55, 70), ("wire", 30, 40))]
    lanes = timeline.lanes_of(works)
    assert [(name, [w.start for w in lane]) for name, lane in lanes] == [
        ("compute", [0, 49.8]), ("compute", [55]), ("wire", [10, 30])]


def test_an_empty_trace_is_refused(timeline, tmp_path):
    with pytest.raises(ValueError, match="no kernels and no operators"):
        timeline.read(write(tmp_path / "trace.json", []))
