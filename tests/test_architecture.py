"""The parts of the package, and which of them may know of which."""

import ast
from pathlib import Path

import eqx_sow
import pytest
from eqx_sow._walk import flow, interpreter, jax_rules, sows
from jax.interpreters import batching


pytestmark = pytest.mark.sample(1)


ROOT = Path(eqx_sow.__file__).parent
# A part may import from those of the rows above its own, and from itself. Parts of one
# row do not know of each other.
LAYERS = [
    {"_errors"},
    {"_compat", "_frames", "_globs"},
    {"_arrays", "_hijax", "_names", "_staging"},
    {"_selection", "_unknown"},
    {"_mark", "_results"},
    {"_values"},
    {"_walk"},
    {"_modules", "_handlers"},
    {"_transforms"},
    {"__init__"},
]
LEVEL = {part: i for i, parts in enumerate(LAYERS) for part in parts}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(file):
    return file.relative_to(ROOT).with_suffix("").parts[0]


def imported(file):
    """The parts from which a file imports, those for type checkers aside."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            path = (*base, *(node.module.split(".") if node.module else ()))
            yield from [path[0]] if path else [a.name for a in node.names]


def test_every_file_has_its_place():
    assert {part_of(f) for f in FILES} == LEVEL.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_have_one_direction(file):
    mine = part_of(file)
    for other in imported(file):
        assert other == mine or LEVEL[other] < LEVEL[mine], f"{mine} knows of {other}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_private_modules_are_in_one_file(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = [getattr(node, "module", None) or ""]
        names += [a.name for a in getattr(node, "names", []) if hasattr(a, "name")]
        private = any("_" == part[:1] for n in names for part in n.split("."))
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and not node.level
        ):
            assert not private or part_of(file) == "_compat", ast.unparse(node)


def _lines_of_code(source):
    """Without docstrings, comments and blank lines."""
    prose = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    code = [s for i, s in lines if i not in prose and s.strip()]
    return sum(not s.lstrip().startswith("#") for s in code)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_modules_are_short(file):
    """Ruff has the bound for functions, 12 branches."""
    assert _lines_of_code(file.read_text()) <= 600


def test_the_tables_of_rules_agree():
    walk, look = set(interpreter.rules), set(flow.rules)
    loops = set(sows._loops)
    assert loops < look < walk
    wrapped = {(id(table), primitive) for table, primitive, _ in jax_rules._wrapped}
    batching_rules = id(batching.fancy_primitive_batchers)
    assert {(batching_rules, loop) for loop in loops} < wrapped
    # And each of them stays in the loop that it is in, under a derivative.
    for primitive in filter(None, walk):
        assert "_keep_in_loop" in primitive.bind.__qualname__
