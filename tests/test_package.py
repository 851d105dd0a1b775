"""The package as a kernel: what the builder and the loader demand of it, checked with their own parsers, no network."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import torch
import yaml
from kernels import get_local_kernel
from kernels._rust import Build, Digest, DigestAlgorithm, DigestValidationError, Metadata

from tests.hub import COMMIT, serve

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "torch-ext" / "optimizer"
BACKENDS = ["cpu", "cuda", "rocm", "xpu"]
# The loader demands that the first argument of these decorators is a direct call of add_op_namespace_prefix.
REGISTERS = {"custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap", "register_torch_dispatch"}

GET = """
from kernels import get_kernel
print(get_kernel("org/optimizer", version=1).__name__)
"""

# As the nightly workflow does.
NIGHTLY = """
import runpy, sys
script = sys.argv.pop(1)
sys.argv += ["--repo", "org/optimizer"]
runpy.run_path(script, run_name="__main__")
"""

# Prints why it was refused, and its name once it was not.
REFUSED_THEN_TRUSTED = """
import json
from kernels import get_kernel
try:
    refusal = get_kernel("org/optimizer", version=1) and ""
except Exception as error:
    refusal = str(error)
print(json.dumps([refusal, get_kernel("org/optimizer", version=1, trust_remote_code=True).__name__]))
"""

# Runs each [code, arguments, environment] of argv[1] in a process of its own, all at once, which share no more than the
# import of torch; prints of each the exit status, what it printed and its errors. What kernels imports reads the
# environment, so it is not imported here, nor does torch import Triton.
AT_ONCE = """
import json, os, sys, tempfile, traceback
import torch
assert not {"kernels", "huggingface_hub", "triton"} & set(sys.modules)
started = []
for code, args, env in json.loads(sys.argv[1]):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files, start=1):
            os.dup2(file.fileno(), number)
        try:
            for name, value in env.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            sys.argv[1:] = args
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    started.append((child, files))
ended = [(os.waitpid(child, 0)[1], files) for child, files in started]
print(json.dumps([[status, *(file.seek(0) or file.read() for file in files)] for status, files in ended]))
"""

# Prints the modules that loading the build argv[1] brings into a process which has torch and kernels.
LOAD_AND_LIST = """
import json, sys
from pathlib import Path
import torch, kernels
before = set(sys.modules)
name = kernels.get_local_kernel(Path(sys.argv[1])).__name__
print(json.dumps([name, sorted(set(sys.modules) - before)]))
"""

# Runs the files argv[1:], without main(), and prints the build that each asks of get_kernel where nothing names one.
ASKED_BY_SCRIPTS = """
import json, os, runpy, sys, types

class Asked(Exception): pass

def get_kernel(*args, **options):
    raise Asked

sys.modules["kernels"] = types.ModuleType("kernels")
sys.modules["kernels"].get_kernel = get_kernel
builds = {}
for path in sys.argv[1:]:
    os.environ.pop("LOCAL_KERNELS", None)
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="script")
    except Asked:  # simulate.py and workspace.py ask at once
        pass
    builds[os.path.basename(path)] = os.environ.get("LOCAL_KERNELS")
print(json.dumps(builds))
"""

LOAD_WITHOUT_TRITON = """
import sys
from pathlib import Path
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
import torch, kernels
package = kernels.get_local_kernel(Path(sys.argv[1]))
print(package.orthogonalize(torch.eye(4)).sum().item())
"""

LOAD_TWICE_AND_CALL = """
import sys
from pathlib import Path
import torch, kernels
results = [kernels.get_local_kernel(Path(path)).orthogonalize(torch.eye(4)) for path in sys.argv[1:]]
assert torch.equal(*results)
print("torch._dynamo" in sys.modules)
"""


def run_at_once(*jobs: tuple) -> list[tuple[int, str, str]]:
    """Run each (code, arguments, environment) in a process of its own; an environment value of None removes a variable.

    Return the exit status, the last line printed, and the errors of each.
    """
    given = json.dumps([(code, list(map(str, args)), env) for code, args, env in jobs])
    command = [sys.executable, "-W", "ignore", "-c", AT_ONCE, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    return [(status, (out.strip().splitlines() or [""])[-1], errors) for status, out, errors in ended]


def hub_environment(hub, home: Path) -> dict[str, str | None]:
    """The environment of a machine that knows no kernel yet and has `hub` for its Hub.

    Telemetry stays at its default: without it, kernels 0.17.2 sends a user agent that huggingface_hub 2.4 refuses.
    """
    unset = dict.fromkeys(["LOCAL_KERNELS", "KERNELS_CACHE", "HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_DISABLE_TELEMETRY"])
    return {**unset, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}


def make_build(out: Path, *options: str, root: Path = ROOT) -> Path:
    command = [sys.executable, str(ROOT / "tools" / "make_build.py"), "--root", str(root), "--out", str(out), *options]
    subprocess.run(command, check=True, capture_output=True)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def git(*args: str, root: Path = ROOT) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(root), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build_id(build: Path) -> str:
    return json.loads((build / "torch-cpu" / "metadata.json").read_text())["id"].removeprefix("_optimizer_cpu_")


def trees(*folders: Path) -> list[tuple[str, ast.Module]]:
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths]


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Path:
    return make_build(tmp_path_factory.mktemp("build"))


@pytest.fixture
def repository(tmp_path) -> Path:
    """A git repository of its own with the committed sources of the package."""
    root = tmp_path / "repository"
    ignored = shutil.ignore_patterns("__pycache__", "_ops.py", ".ruff_cache")
    shutil.copytree(ROOT / "torch-ext", root / "torch-ext", ignore=ignored)
    for name in ("build.toml", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    git("init", "--quiet", root=root)
    git("add", "--all", root=root)
    git("commit", "--quiet", "--message", "sources", root=root)
    return root


# What is written


def test_build_toml_parses_as_the_builder_parses_it(tmp_path):
    parsed = Build.open(ROOT)
    assert sorted(str(backend) for backend in parsed.general.backends) == BACKENDS
    assert not any(parsed.all_kernel_depends(backend) for backend in parsed.general.backends)
    (tmp_path / "build.toml").write_text((ROOT / "build.toml").read_text() + "unknown = 1\n")
    with pytest.raises(ValueError, match="unknown"):
        Build.open(tmp_path)


def test_build_toml_tells_publishers_of_source(tmp_path):
    """With what its comment proposes it parses, and every variant says it; without it the card names no sources."""
    shutil.copytree(ROOT / "torch-ext", tmp_path / "torch-ext", ignore=shutil.ignore_patterns("__pycache__"))
    line = 'source = "https://example.org/me"'  # a publisher's file has its own in this place
    text, count = re.subn('^(# )?source = ".*"$', line, (ROOT / "build.toml").read_text(), flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "build.toml").write_text(text)
    Build.open(tmp_path)
    variant = make_build(tmp_path / "out", "--backend", "cpu", root=tmp_path) / "torch-cpu"
    assert Metadata.read_from_file(variant / "metadata.json").source == "https://example.org/me"


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_parses_as_the_loader_parses_it(build, backend):
    path = build / f"torch-{backend}" / "metadata.json"
    metadata = Metadata.read_from_file(path)
    assert (str(metadata.name), metadata.version, metadata.license) == ("optimizer", 1, "apache-2.0")
    assert (str(metadata.backend.backend_type), metadata.backend.archs) == (backend, None)
    assert not metadata.python_depends and not metadata.kernel_depends
    assert re.fullmatch(rf"_optimizer_{backend}_[0-9a-f]{{7}}(_dirty)?", metadata.id)
    assert {"name", "id", "version", "license", "python-depends", "backend"} <= set(json.loads(path.read_text()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_digest_holds_and_notices_a_change(build, tmp_path, backend):
    variant = tmp_path / "variant"
    shutil.copytree(build / f"torch-{backend}", variant)
    expected = Metadata.read_from_file(variant / "metadata.json").digest
    assert "__init__.py" in expected.files and "metadata.json" not in expected.files
    expected.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    (variant / "_ops.py").write_text("changed")
    with pytest.raises(DigestValidationError):
        expected.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_a_build_holds_the_package_and_what_is_generated(build):
    shipped = {name for name in contents(SOURCE) if name.endswith((".py", ".pyi", ".json"))} | {"_ops.py"}
    for backend in BACKENDS:
        files = contents(build / f"torch-{backend}")
        assert set(files) == shipped | {"metadata.json"}
        assert all(files[name] == (SOURCE / name).read_bytes() for name in shipped - {"_ops.py"})


def test_two_builds_of_one_commit_are_identical(repository, tmp_path):
    copy = tmp_path / "copy"
    git("clone", "--quiet", str(repository), str(copy))
    first, second = make_build(tmp_path / "a", root=repository), make_build(tmp_path / "b", root=copy)
    assert contents(first) == contents(second)
    committed = git("rev-parse", "HEAD:torch-ext", "HEAD:build.toml", root=repository).split()
    assert build_id(first) == hashlib.sha1("".join(committed).encode()).hexdigest()[:7]


def test_a_build_without_git_has_the_id_of_the_commit(repository, tmp_path):
    first = build_id(make_build(tmp_path / "a", root=repository))
    shutil.rmtree(repository / ".git")
    assert build_id(make_build(tmp_path / "b", root=repository)) == first


@pytest.mark.parametrize("change", ["torch-ext/optimizer/__init__.py", "torch-ext/optimizer/new.py", "build.toml"])
def test_changed_sources_are_named_dirty(repository, tmp_path, change):
    clean = build_id(make_build(tmp_path / "a", root=repository))
    with open(repository / change, "a", encoding="utf-8") as file:
        file.write("# changed\n")
    dirty = build_id(make_build(tmp_path / "b", root=repository))
    assert "_dirty" not in clean and re.fullmatch("[0-9a-f]{7}_dirty", dirty) and not dirty.startswith(clean)


def test_caches_of_tools_change_no_id(repository, tmp_path):
    """ruff writes one into torch-ext/, which has settings of its own."""
    clean = build_id(make_build(tmp_path / "a", root=repository))
    for cache in (".ruff_cache", "optimizer/__pycache__", "optimizer/.pytest_cache"):
        (repository / "torch-ext" / cache).mkdir()
        (repository / "torch-ext" / cache / "entry").write_text("of a tool")
    assert build_id(make_build(tmp_path / "b", root=repository)) == clean


def test_one_backend_can_be_built_alone(tmp_path):
    assert [path.name for path in make_build(tmp_path, "--backend", "cuda").iterdir()] == ["torch-cuda"]


def test_a_variant_that_cannot_be_removed_is_an_error(tmp_path):
    """Such as one in read-only folders, or a link, which fails for every user; its files were mixed with the new."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "stale.py").write_text("")
    (tmp_path / "torch-cpu").symlink_to("other")
    with pytest.raises(subprocess.CalledProcessError):
        make_build(tmp_path, "--backend", "cpu")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["stale.py"]


def test_nothing_generated_is_tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    generated = re.compile(r"^build/|(^|/)_ops\.py$|(^|/)metadata(-\w+)?\.json$|\.pyc$|__pycache__|^setup\.py$|\.so$")
    assert [name for name in git("ls-files").splitlines() if generated.search(name)] == []


# What is imported


def test_imports_are_relative_or_of_torch_and_the_standard_library():
    allowed = sys.stdlib_module_names | {"torch", "triton", "safetensors", "matplotlib"}
    for name, tree in trees(SOURCE):
        depth = len(Path(name).parts) - len(SOURCE.relative_to(ROOT).parts)  # 1: a module of the package itself
        # The entry of a framework imports the framework when it is called
        frameworks = {"titan.py": {"torchtitan"}, "megatron.py": {"megatron"}, "trainer.py": {"transformers"}}
        own = frameworks.get(Path(name).name, set())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                assert node.level <= depth, f"{name}:{node.lineno} imports from outside the package"
            else:
                found = {"Import": lambda n: [a.name for a in n.names], "ImportFrom": lambda n: [n.module]}
                for module in found.get(type(node).__name__, lambda _: [])(node):
                    assert module.split(".")[0] in allowed | own, f"{name}:{node.lineno} imports {module}"


def test_registered_operators_carry_the_prefix():
    for name, tree in trees(SOURCE, ROOT / "tests"):
        for function in filter(lambda node: hasattr(node, "decorator_list"), ast.walk(tree)):
            for call in filter(lambda node: isinstance(node, ast.Call), function.decorator_list):
                if getattr(call.func, "attr", getattr(call.func, "id", "")) in REGISTERS:
                    first = call.args[0] if call.args else None
                    prefixed = isinstance(first, ast.Call) and ast.unparse(first.func) == "add_op_namespace_prefix"
                    assert prefixed, f"{name}:{call.lineno} registers an operator without add_op_namespace_prefix(...)"


def test_public_names_are_a_literal_list_and_exist(optimizer):
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    values = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    assert len(values) == 1 and isinstance(values[0], ast.List)
    names = [element.value for element in values[0].elts]
    assert all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    assert all(hasattr(optimizer, name) for name in names) and optimizer.__all__ == names


# The ways to load it

@pytest.mark.parametrize("below", ["", "build", "build/torch-cpu"])
def test_get_local_kernel_takes_the_repository_the_build_or_a_variant(build, tmp_path, below):
    shutil.copytree(build, tmp_path / "build")
    name = get_local_kernel(tmp_path / below).__name__
    assert name.startswith("_optimizer_") and name.endswith(build_id(build))
    generated = importlib.import_module(f"{name}._ops")
    namespace, _, op = generated.add_op_namespace_prefix("gram").partition("::")
    assert op == "gram" and namespace.endswith(f"_{build_id(build)}")
    assert generated.ops is getattr(torch.ops, namespace)


def test_processes_that_begin_to_load_it(build, tmp_path):
    """All at once, for they share the import of torch: copies of a build, LOCAL_KERNELS, and Hubs with cold caches. One
    build has one namespace for its operators, wherever it lies.
    """
    shutil.copytree(build, tmp_path / "build")
    with serve(build) as alone, serve(build) as shared, serve(build, trusted=False) as untrusted:
        homes = {hub: tmp_path / str(number) for number, hub in enumerate((alone, shared, untrusted))}
        alone_env, shared_env, untrusted_env = (hub_environment(hub, home) for hub, home in homes.items())
        nightly_env = {**untrusted_env, "HF_HOME": str(tmp_path / "nightly")}
        local = {"LOCAL_KERNELS": f"org/optimizer={build}", "HF_HOME": str(tmp_path / "local"), "HF_HUB_OFFLINE": "1"}
        ended = run_at_once(
            (LOAD_AND_LIST, [build], {}), (LOAD_WITHOUT_TRITON, [build], {}),
            (LOAD_TWICE_AND_CALL, [build, tmp_path / "build"], {}), (GET, [], local), (GET, [], alone_env),
            *[(GET, [], shared_env)] * 4, (NIGHTLY, [ROOT / ".ci" / "load_published.py"], nightly_env),
            (REFUSED_THEN_TRUSTED, [], untrusted_env))
    refusals, nightly = ended.pop(), ended.pop()
    assert nightly[0] == 0 and re.search(f"{build_id(build)}: a step with errors up to", nightly[1]), nightly
    for job in ended:
        assert job[0] == 0, job[2]
    listed, without_triton, twice, named, *fetched = (printed for _, printed, _ in ended)
    loading_imports_torch_and_the_standard_library_only(*json.loads(listed))
    assert float(without_triton) == pytest.approx(4.0, rel=0.5)
    assert twice == "False", "a first call imports torch._dynamo, which takes seconds"
    assert named.endswith(build_id(build)) and list((tmp_path / "local").rglob("*.py")) == []
    a_cold_cache_is_filled_once(build, alone, fetched[:1])
    a_cold_cache_is_filled_once(build, shared, fetched[1:])
    an_untrusted_publisher_is_refused_unless_the_caller_trusts_it(build, *refusals)


def test_the_nightly_check_sees_wrong_numbers(optimizer):
    check_step = runpy.run_path(str(ROOT / ".ci" / "load_published.py"))["check_step"]
    assert float(check_step(optimizer)) < 0.01
    for wrong in ({"adjust_lr_fn": 0.9}, {"ns_steps": 3}, {"adamw_eps": 1.0}):
        class Wrong:
            @staticmethod
            def Muon(groups, wrong=wrong, **options):
                eps = {"eps": wrong["adamw_eps"]} if "adamw_eps" in wrong else {}
                return optimizer.Muon([groups[0], {**groups[1], **eps}], **{**options, **wrong})

        with pytest.raises(SystemExit, match="wrong numbers"):
            check_step(Wrong)


def loading_imports_torch_and_the_standard_library_only(package, loaded):
    known = sys.stdlib_module_names | {"torch", package}
    foreign = [name for name in loaded if name.split(".")[0] not in known and not name.startswith("_sysconfigdata")]
    assert foreign == []
    slow = ("torch.distributed.tensor", "torch._dynamo", "torch._inductor")
    assert [name for name in loaded if name.startswith(slow)] == []


def a_cold_cache_is_filled_once(build, hub, names):
    assert len(set(names)) == 1 and names[0].endswith(build_id(build))
    variant = f"build/torch-{names[0].split('_')[2]}"
    fetched = {path: count for (method, path), count in hub.requests.items() if method == "GET" and "/resolve/" in path}
    prefix = f"kernels/org/optimizer/resolve/{COMMIT}/{variant}/"
    assert fetched == {prefix + name: 1 for name in contents(build / Path(variant).name)}


def an_untrusted_publisher_is_refused_unless_the_caller_trusts_it(build, status, printed, errors):
    assert status == 0, errors
    refusal, name = json.loads(printed)
    assert "trust" in refusal and name.endswith(build_id(build))


def test_the_hubs_ci_has_all_that_its_subset_needs(build, tmp_path):
    """Its sandbox holds build.toml, the package and the tests, nothing else, and the build has the publisher's name."""
    for name in ("torch-ext", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "build.toml", tmp_path)
    env = os.environ | {"LOCAL_KERNELS": f"me/optimizer={build}", "PYTHONPATH": ""}
    command = [sys.executable, "-m", "pytest", "tests", "-m", "kernels_ci", "--collect-only", "-q", "--assert=plain"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+)/\d+ tests collected", done.stdout)[1]) > 300


# The files around it


@pytest.mark.parametrize("source", [None, "https://example.org/me/optimizer"])
@pytest.mark.parametrize("has_benchmark", [True, False])
def test_card_renders(has_benchmark, source):
    """As the builder renders it, whose templates lose the line break after a block (trim_blocks)."""
    functions = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", (SOURCE / "__init__.py").read_text(), re.S)[1])
    template = jinja2.Template((ROOT / "CARD.md").read_text(), undefined=jinja2.StrictUndefined, trim_blocks=True)
    card = template.render(
        repo_id="org/optimizer", version=1, functions=functions, layers=[], license="apache-2.0",
        has_benchmark=has_benchmark, upstream=None, source=source,
    )  # fmt: skip
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "kernels" and front["license"] == "apache-2.0"
    assert 'get_kernel("org/optimizer", version=1' in card and "{" + "{" not in card
    lines = card.splitlines()
    first = lines.index("## Public names")
    assert lines[first + 1:first + len(functions) + 2] == ["", *(f"- `{name}`" for name in functions)]
    headings = [number for number, line in enumerate(lines) if line.startswith("## ")]
    assert all(lines[number - 1] == lines[number + 1] == "" for number in headings), card
    titles = ["## Public names"] + ["## Benchmark"] * has_benchmark + ["## Source"] * (source is not None)
    assert [lines[number] for number in headings] == titles
    assert ("In a clone of the source: `kernels benchmark .`" in card) == has_benchmark  # of a Hub's name it fails
    assert source is None or lines[-1].endswith(f": {source}")


def test_the_cards_program_runs(optimizer):
    """With the learning rate that README.md takes for the default groups."""
    program = re.search(r"```python\n(.*?)```", (ROOT / "CARD.md").read_text(), re.S)[1]
    names = {"model": torch.nn.Linear(4, 4)}
    exec(program.replace("{{ repo_id }}", "org/optimizer").replace("{{ version }}", "1"), names)
    assert {group["lr"] for group in names["opt"].param_groups} == {3e-4}
    assert "get_default_muon_param_groups(model, report=print), lr=3e-4)" in (ROOT / "README.md").read_text()


def test_flake_lock_pins_the_builder():
    lock = json.loads((ROOT / "flake.lock").read_text())
    locked = lock["nodes"]["kernel-builder"]["locked"]
    assert (locked["owner"], locked["repo"]) == ("huggingface", "kernels")
    assert re.fullmatch("[0-9a-f]{40}", locked["rev"])


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflow_actions_are_pinned_by_commit(path):
    workflow = yaml.safe_load(path.read_text())
    used = [step["uses"] for job in workflow["jobs"].values() for step in job.get("steps", []) if "uses" in step]
    assert used and all(re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", name) for name in used), used
    assert "permissions" in workflow


def test_the_release_uploads_what_it_signed():
    """The builder's upload looks for result before build, and the copy in build is the one that is signed."""
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["release"]
    lines = [line.strip() for step in job["steps"] for line in step.get("run", "").splitlines()]
    order = ("nix build", "cp -rL result build", "rm result", "cosign sign-blob", "nix run --inputs-from")
    places = [[number for number, line in enumerate(lines) if line.startswith(start)] for start in order]
    assert all(len(found) == 1 for found in places) and places == sorted(places), places


def test_scripts_load_the_optimizer_of_their_checkout():
    """Where LOCAL_KERNELS does not name another build: a Hub's `org/optimizer` is somebody else's."""
    paths = [path for folder in ("examples", "tools", "benchmarks") for path in sorted((ROOT / folder).glob("*.py"))
             if re.search(r"\bget_kernel\(.org/optimizer", path.read_text())]
    assert len(paths) > 10
    command = [sys.executable, "-c", ASKED_BY_SCRIPTS, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {path.name: f"org/optimizer={ROOT}" for path in paths}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_chosen_torch_reaches_new_environments_only(tmp_path):
    """As docs/env.md says of TORCH."""
    def commands():
        made = ["make", "--dry-run", "build", f"VENV={tmp_path}", "TORCH=torch==0.0"]
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
        return subprocess.run(made, cwd=ROOT, env=clean, check=True, capture_output=True, text=True).stdout

    assert "install" in commands() and '"torch==0.0"' in commands()
    (tmp_path / "demo.ready").touch()
    assert "install" not in commands() and "make_build.py" in commands()
    (said,) = re.findall(r"^\| `TORCH` \| (.*) \|$", (ROOT / "docs" / "env.md").read_text(), re.MULTILINE)
    assert "a new `.venv`" in said and "keeps its own" in said
