"""The rules of the code that ruff cannot say: sizes, layers, who may do what, and what the repository may not say. The
others (docstrings, how modules begin, what is imported late) are in ruff.toml.

A number that stands in the way of a clearer text is changed here, with its reason.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "torch-ext" / "optimizer"

# Room for docstrings that say shapes, units and errors, for comments that give a reason, and for files that hold one
# subject whole: limits that forced shorter texts had made them harder to read.
FILE_LINES, FUNCTION_LINES, KERNEL_LINES, NESTING = 700, 60, 120, 3

# A module imports from its own folder and from folders above its own in this list; no two modules import each other.
# The modules of LEAVES import each other only, so every module may import them.
FOLDERS = ["kernels.backend", "kernels.launch", "kernels.weights", "kernels.elementwise", "kernels.quantized",
           "kernels.metrics", "kernels.matmul", "kernels.onchip", "newton_schulz", "rules", "rules.elements",
           "rules.named", "params.model", "params.checks", "params", "pipeline", "planning", "communication",
           "communication.matrix_owners", "state", "qk_clip", "metrics", "execution", "execution.prepare",
           "execution.offload", "execution.overlap", "report", "memory", "state_dict_methods", "report_methods",
           "muon", "integrations", "__init__"]
FILES_IN_A_FOLDER = 8
LEAVES = {"_ops", "params.errors", "params.dtensor", "params.units"}  # _ops is generated: the operators' namespace

COLLECTIVES = re.compile(
    r"^(dist|distributed|c10d|funcol)\.(all_|reduce|broadcast|barrier|monitored_barrier|i?send|i?recv|scatter|gather|batch_)"
)
PLACEMENTS = {"Shard", "_StridedShard", "Replicate", "Partial"}
VAGUE = re.compile(r"util|helper|manager", re.IGNORECASE)


def name_of(path: Path) -> str:
    """The module's name inside the package: "pipeline", "kernels.matmul.api", and "__init__" for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))
         if path.name not in ("_ops.py", "__init__.py") or path.parent == SOURCE}
TREES = {name: ast.parse(path.read_text()) for name, path in PATHS.items()}


def every_module(check):
    """A test that checks each module, and tells of all that fail: a test of each would take longer than its check."""
    def test():
        faults = []
        for module in PATHS:
            try:
                check(module)
            except AssertionError as fault:
                faults.append(f"{module}: {fault}")
        assert not faults, "\n".join(faults)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def functions(tree: ast.AST, scope: str = "") -> list[tuple[str, ast.FunctionDef]]:
    """All functions with their qualified names, also those inside classes and functions."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{scope}{node.name}"
            found += [] if isinstance(node, ast.ClassDef) else [(name, node)]
            found += functions(node, f"{name}.")
        else:
            found += functions(node, scope)
    return found


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def length(function: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)
    docstring = first.end_lineno - first.lineno + 1 if has_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring


def depth(node: ast.AST) -> int:
    """How deep blocks are nested under `node`; an elif is as deep as its if, an inner function starts again."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        is_block = isinstance(child, (ast.For, ast.While, ast.If, ast.With, ast.Try))
        is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (is_block and not is_elif))
    return deepest


def imported(module: str) -> set[str]:
    """The modules of the package that `module` imports, at the top or inside functions."""
    package = [] if module in ("__init__",) else PATHS[module].relative_to(SOURCE).parts[:-1]
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in PATHS else base or "__init__")
    return found - {module}


# Sizes


@every_module
def test_files_are_short(module):
    assert len(PATHS[module].read_text().splitlines()) <= FILE_LINES


@every_module
def test_functions_are_short_and_flat(module):
    for name, function in functions(TREES[module]):
        lines = KERNEL_LINES if is_kernel(function) else FUNCTION_LINES
        assert length(function) <= lines, f"{module}.{name} has {length(function)} lines"
        assert depth(function) <= NESTING, f"{module}.{name} is nested {depth(function)} deep"


# Layers and walls


def room_of(module: str) -> int:
    """The place in FOLDERS of the folder or file that holds a module."""
    if module in LEAVES:
        return -1
    rooms = [room for room in FOLDERS if module == room or module.startswith(f"{room}.")]
    assert rooms, f"say in FOLDERS where {module} stands"
    return FOLDERS.index(max(rooms, key=len))


@every_module
def test_modules_import_only_from_folders_above(module):
    for other in imported(module):
        assert room_of(other) <= room_of(module), f"{module} imports {other}"
    assert module not in LEAVES or imported(module) <= LEAVES


def test_no_two_modules_import_each_other():
    known, path = set(), []

    def visit(module):
        assert module not in path, " imports ".join([*path[path.index(module):], module])
        if module in known or module == "_ops":
            return
        path.append(module)
        for other in sorted(imported(module)):
            visit(other)
        known.add(path.pop())

    for module in PATHS:
        visit(module)


def test_folders_are_small():
    counts = Counter(path.parent for path in PATHS.values())
    assert {str(folder): count for folder, count in counts.items() if count > FILES_IN_A_FOLDER} == {}


def test_only_the_optimizer_knows_overlap():
    """The core runs without `execution/overlap`."""
    found = {module for module in PATHS if any(other.startswith("execution.overlap") for other in imported(module))}
    allowed = {"muon", "state_dict_methods", "report_methods"}
    assert {module for module in found if not module.startswith("execution.overlap")} <= allowed


# A class of a later layer, and the protocols by which earlier layers know it
PROTOCOLS = {
    "execution.param_store.Store": ["pipeline.UpdatedParams", "planning.planner.StoreOfPlan",
                                    "metrics.reading.MeasuredStore"],
    "communication.process_groups.ProcessGroups": ["planning.planner.AllToAllBackends"],
}


def members(name: str) -> dict[str, list[str] | None]:
    """{attribute: None, method: names of its arguments} of a class."""
    module, _, own = name.rpartition(".")
    (node,) = [x for x in ast.walk(TREES[module]) if isinstance(x, ast.ClassDef) and x.name == own]
    found = {x.name: [a.arg for a in x.args.args] for x in node.body if isinstance(x, ast.FunctionDef)}
    declared = [x.target for x in node.body if isinstance(x, ast.AnnAssign)]
    return {**dict.fromkeys(names_of(declared, ast.Name) | names_of([node], ast.Attribute)), **found}


def test_protocols_are_those_of_their_classes():
    for name, protocols in PROTOCOLS.items():
        for protocol in protocols:
            wanted, has = members(protocol), members(name)
            assert wanted and {key: has.get(key, "missing") for key in wanted} == wanted, protocol


@every_module
def test_collectives_are_issued_where_ranks_talk(module):
    """A DTensor's `redistribute` and `full_tensor` count as collectives, too; they are called where placements are."""
    calls = [node for node in ast.walk(TREES[module]) if isinstance(node, ast.Call)]
    found = [f"line {call.lineno}: {ast.unparse(call.func)}" for call in calls if _is_collective(call)]
    assert module.startswith("communication.") or found == []


def _is_collective(call: ast.Call) -> bool:
    return bool(COLLECTIVES.match(ast.unparse(call.func).removeprefix("torch.")))


@every_module
def test_only_two_modules_know_placements(module):
    nodes = list(ast.walk(TREES[module]))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert module in ("params.layout", "communication.redistribute") or not names & PLACEMENTS


# Names with an underscore that another module imports: two kernels, written in pointer.py and launched by api.py
PRIVATE = {"kernels.matmul.api": {"_linear_kernel", "_product_kernel"}}


@every_module
def test_no_module_takes_private_names_of_another(module):
    """Neither imported by name nor read from an imported module: what begins with an underscore serves one module."""
    nodes = list(ast.walk(TREES[module]))
    aliases = [alias for node in nodes if isinstance(node, ast.ImportFrom) and node.level for alias in node.names]
    found = {alias.name for alias in aliases if alias.name.startswith("_")}
    imported_names = {alias.asname or alias.name for alias in aliases}
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            found |= {node.attr} if getattr(node.value, "id", None) in imported_names else set()
    assert found == PRIVATE.get(module, set())


@every_module
def test_only_kernels_import_triton_and_nobody_needs_more_than_torch(module):
    for node in ast.walk(TREES[module]):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        packages = {name.split(".")[0] for name in names}
        assert "triton" not in packages or module.startswith("kernels"), f"{module}:{node.lineno}"
        at_top = getattr(node, "col_offset", 1) == 0
        assert not at_top or packages <= sys.stdlib_module_names | {"torch"}, f"{module}:{node.lineno}"


# Attributes of classes


# A name: a constant or a function
CONSTANT = (ast.Constant, ast.Tuple, ast.UnaryOp, ast.Name, ast.Load, ast.unaryop)
OPTIMIZERS = ("Muon", "NorMuon", "ForwardOverlapMethods", "StateDictMethods", "ReportMethods")


def class_attributes(tree: ast.AST) -> list[tuple[ast.ClassDef, ast.Assign]]:
    """What the bodies of classes assign; a dataclass makes attributes of instances of it."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    plain = [node for node in classes if not any("dataclass" in ast.unparse(d) for d in node.decorator_list)]
    return [(node, line) for node in plain for line in node.body if isinstance(line, (ast.Assign, ast.AnnAssign))]


def names_of(targets: list[ast.AST], kind: type) -> set[str]:
    found = [node for target in targets for node in ast.walk(target) if isinstance(node, kind)]
    return {getattr(node, "id", None) or node.attr for node in found if isinstance(node.ctx, ast.Store)}


@every_module
def test_class_attributes_are_constants(module):
    """A list, a dict or an object made there is shared by all instances. A rule declares state, options and numbers
    to send on its class, which nobody writes, and has a single instance.
    """
    for node, line in class_attributes(TREES[module]):
        if module.startswith("rules.") and [*map(ast.unparse, node.bases)] in ([], ["Rule"], ["Elementwise"]):
            if ast.unparse(getattr(line, "target", None) or line.targets[0]) in ("state", "options", "sends"):
                continue
        inside = list(ast.walk(line.value)) if line.value is not None else []
        assert all(isinstance(value, CONSTANT) for value in inside), f"{module}:{line.lineno}, {node.name}"


def test_class_attributes_of_optimizers_are_never_assigned():
    """A default on the class hides the value of the optimizer from wrappers that derive a class from the optimizer's
    and ask the optimizer only for what that class lacks (Lightning, Fabric): `__init__` has to set it.
    """
    assigned = names_of(list(TREES.values()), ast.Attribute)
    seen, kept = set(), set()
    for module in TREES:
        for node, line in class_attributes(TREES[module]):
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            if node.name in OPTIMIZERS:
                kept |= names_of(targets, ast.Name)
        seen |= {node.name for node in ast.walk(TREES[module]) if isinstance(node, ast.ClassDef)}
    assert seen.issuperset(OPTIMIZERS)
    assert kept & assigned == set() and kept <= {"_extra_keys"}


# Attributes of torch's objects that a module replaces, each for a reason that stands beside the line
FOREIGN = {
    "communication.redistribute": {"_local_tensor"},  # a view keeps the tensor, not its memory of now
    "integrations.megatron": {"data", "_local_tensor"},  # memory and gradients, lent to views for a step
    "communication.process_groups": {"template", "bound_device_id", "_hash_ranks_to_str"},
    "execution.cuda_graphs": {"destroy_process_group", "shutdown"},
    "execution.offload.memory": {"atexit"},
    "execution.overlap.module_hooks": {"unshard"},
    "integrations.trainer": {"collect_metrics"},  # the switch that users set, too
    "params.config": {"__signature__"},
    "params.errors": {"args"},
}


@every_module
def test_objects_are_changed_by_their_own_module_only(module):
    """An object is complete after its constructor, and no other module assigns to it afterwards."""
    if module.startswith("kernels."):
        return  # descriptors and Triton's objects
    own, others = set(), set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ClassDef):
            own |= {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if is_own else others).add(node.attr)
    assert others - own == FOREIGN.get(module, set())


# Text


# Words that stand for a noun that a docstring should name instead
PRONOUNS = set(
    "it its itself this that those these they them their what which one ones other others same such so there here "
    "whose".split())
PRONOUNS_PER_100 = 3.5
COMMENTS_PER_1000 = 40  # comments for lines of code, outside of kernels


def docstrings(tree: ast.AST) -> list[str]:
    documented = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    return list(filter(None, map(ast.get_docstring, documented)))


def test_docstrings_name_their_objects():
    texts = [text.lower() for tree in TREES.values() for text in docstrings(tree)]
    words = [word for text in texts for word in re.findall("[a-z]+", text)]
    assert 100 * sum(word in PRONOUNS for word in words) <= PRONOUNS_PER_100 * len(words)


def test_comments_say_why():
    comments = code = 0
    for module, path in PATHS.items():
        if not module.startswith("kernels."):
            tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
            comments += sum(token.type == tokenize.COMMENT for token in tokens)
            ended = {token.end[0] for token in tokens if token.type == tokenize.NEWLINE}
            code += len(ended) - len(docstrings(TREES[module]))
    assert 1000 * comments >= COMMENTS_PER_1000 * code


@every_module
def test_arguments_are_annotated(module):
    """All of them, and results, but for Triton's functions."""
    for name, function in functions(TREES[module]):
        if is_kernel(function):
            continue
        given = function.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        bare = [a.arg for a in arguments if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
        assert bare == [], f"{module}.{name}"


@every_module
def test_names_say_what_a_thing_is(module):
    classes = [node.name for node in ast.walk(TREES[module]) if isinstance(node, ast.ClassDef)]
    assert [name for name in [module, *classes] if VAGUE.search(name)] == []


def test_ruff_passes():
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def _tracked_texts() -> dict[str, str]:
    """The text files that git tracks or would track."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = {}
    for name in names:
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in data:
            texts[name] = data.decode()
    return texts


def test_the_repository_speaks_of_itself_only():
    folders = "|".join(["wo" + "rk", "ro" + "ot", "tm" + "p", "ho" + "me", "op" + "t"])
    hosts = "|".join([r"py" + r"pi\.org", r"python" + r"hosted\.org", r"download\.py" + r"torch\.org", "npm" + "js"])
    words = "|".join(["work" + "place", "sub-?" + "agent", "clau" + "de", "anth" + "ropic", "chat" + "gpt"])
    forbidden = re.compile(rf"(?<![\w.~}}-])/(?:{folders})/|{hosts}|\b(?:{words})", re.IGNORECASE)
    found = [(name, match.group()) for name, text in _tracked_texts().items() for match in forbidden.finditer(text)]
    assert found == []


def test_text_is_plain():
    forbidden = re.compile("[\u2014\U0001f300-\U0001faff\u2600-\u27bf]"  # em dashes, emoji, dingbats
                           r"|^(?:<{7}|>{7}) ", re.MULTILINE)  # what a merge leaves
    assert [name for name, text in _tracked_texts().items() if forbidden.search(text)] == []
