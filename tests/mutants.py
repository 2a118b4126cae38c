"""Would a test notice? Changes the source in one place at a time, and runs the tests.

    python tests/mutants.py --mutants 100 --seed 0 --out mutants.jsonl
    python tests/mutants.py --again mutants.jsonl --marks rest --out again.jsonl

A first run of the tests records which of them execute which line, and how long they
take; `--survey FILE` keeps that. A mutant is then given to the tests that execute its
line, file by file, until one of them fails; if that takes longer than `--seconds`, it
has survived. With `--again`, mutants that have survived are given to other cases of the
same tests.

Each line of the output is a mutant: the file, the line, what was changed, the test that
noticed (or `null`), and whether there was time for all of them.
"""

import argparse
import ast
import collections
import concurrent.futures
import copy
import gc
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import types
from typing import NamedTuple


ROOT = pathlib.Path(__file__).parent.parent
DEFAULT = "not (fuzz or slow or types or every or rest)"
# What holds the semantics. Messages and tables are left out.
MODULES = "_mark _values _walk _modules _handlers _transforms _names.py _selection.py"

SWAPPED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class Mutant(NamedTuple):
    file: str
    line: int
    # Which node of the file, in the order of `ast.walk`, and which of its changes.
    node: int
    change: int
    said: str


# --- mutants ---
def changes(node):
    """The nodes that may stand in the place of one, each with what it does."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        new = copy.deepcopy(node)
        new.ops[0] = SWAPPED[type(node.ops[0])]()
        yield new
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPPED:
        if not isinstance(node, ast.BinOp) or not _is_string(node):
            new = copy.deepcopy(node)
            new.op = SWAPPED[type(node.op)]()
            yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield ast.Constant(value)
    elif isinstance(node, ast.If):
        for test in (True, False):
            yield ast.If(ast.Constant(test), node.body, node.orelse)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield ast.comprehension(node.target, node.iter, [], node.is_async)


def _is_string(node):
    return any(
        isinstance(x, ast.JoinedStr)
        or (isinstance(x, ast.Constant) and isinstance(x.value, str))
        for x in ast.walk(node)
    )


def _in_annotations(tree):
    whole = (
        annotation
        for node in ast.walk(tree)
        for name in ("annotation", "returns")
        if isinstance(annotation := getattr(node, name, None), ast.AST)
    )
    return {node for annotation in whole for node in ast.walk(annotation)}


def mutants():
    for part in MODULES.split():
        place = ROOT / "eqx_sow" / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            name = str(file.relative_to(ROOT))
            tree = ast.parse(file.read_text())
            annotations = _in_annotations(tree)
            for i, node in enumerate(ast.walk(tree)):
                for k, new in enumerate([] if node in annotations else changes(node)):
                    at = getattr(node, "iter", node).lineno
                    short = ast.unparse(new).splitlines()[0]
                    old = ast.unparse(node).splitlines()[0]
                    yield Mutant(name, at, i, k, f"{old} -> {short}")


def mutated(mutant):
    """The text of the file with the change."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    old = list(ast.walk(tree))[mutant.node]
    new = list(changes(old))[mutant.change]

    class Replace(ast.NodeTransformer):
        def visit(self, node):
            return new if node is old else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Replace().visit(tree)))


# --- tests ---
def run_of_pytest(*args):
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *args]


class Record:
    """A plugin of pytest: which lines each test executes, and how long it takes."""

    def __init__(self, file):
        self.file, self.lines, self.tests = file, set(), {}

    def watch(self):
        """Once for each line, until `restart_events`. Coverage costs as much as the
        tests themselves."""
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")

        def at(code, line):
            self.lines.add(f"{pathlib.Path(code.co_filename).relative_to(ROOT)}:{line}")
            return monitoring.DISABLE

        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, at)
        todo = [f.__code__ for f in gc.get_objects() if type(f) is types.FunctionType]
        source = str(ROOT / "eqx_sow")
        while todo:
            code = todo.pop()
            if code.co_filename.startswith(source):
                events = monitoring.events.LINE
                monitoring.set_local_events(monitoring.COVERAGE_ID, code, events)
                todo += [x for x in code.co_consts if type(x) is types.CodeType]

    def pytest_collection_finish(self):
        self.watch()

    def pytest_runtest_setup(self):
        self.lines.clear()
        sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report):
        # What fails or is skipped by itself says nothing.
        if report.when == "call" and report.passed:
            self.tests[report.nodeid] = report.duration, sorted(self.lines)

    def pytest_sessionfinish(self):
        self.file.write_text(json.dumps(self.tests))


def pytest_configure(config):
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and "MUTANTS_RECORD" in os.environ:
        file = pathlib.Path(os.environ["MUTANTS_RECORD"], f"{worker}.json")
        config.pluginmanager.register(Record(file))


def survey(marks, folder):
    """Which tests execute each line, and how long each test takes."""
    command = run_of_pytest("-p", "tests.mutants", f"-m={marks}")
    environment = os.environ | {"MUTANTS_RECORD": str(folder)}
    subprocess.run(command, cwd=ROOT, env=environment)
    by_line, seconds = collections.defaultdict(list), {}
    for file in folder.glob("gw*.json"):
        for test, (took, lines) in json.loads(file.read_text()).items():
            seconds[test] = took
            for line in lines:
                by_line[line].append(test)
    return by_line, seconds


def collected(marks):
    command = run_of_pytest("-n0", "--collect-only", f"-m={marks}")
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in run.stdout.splitlines() if "::" in line]


def function(test):
    return test.split("[")[0]


def in_order(tests, seconds):
    """File by file, as JAX's caches are cleared after each. First those of which most
    tests execute the line, and the quick ones of these."""
    file = lambda test: test.split("::")[0]
    here, all_tests = (collections.Counter(map(file, x)) for x in (tests, seconds))
    took = collections.Counter()
    for test in tests:
        took[file(test)] += seconds.get(test, 1.0)
    share = {f: round(here[f] / max(all_tests[f], here[f]), 1) for f in here}
    return sorted(tests, key=lambda t: (-share[file(t)], took[file(t)], file(t)))


def give(mutant, tests, seconds, limit, folder):
    """The first of the tests that fails, or `None`, and whether there was time."""
    tree = pathlib.Path(tempfile.mkdtemp(dir=folder))
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", "site", "__pycache__", ".pytest_cache"
    )
    shutil.copytree(ROOT, tree, ignore=ignore, dirs_exist_ok=True)
    (tree / mutant.file).write_text(mutated(mutant))
    end = time.monotonic() + limit
    # First a few, since to collect all of them takes longer than most mutants live.
    few, passed = [], 0.0
    for test in tests:
        passed += seconds.get(test, 1.0)
        if passed < limit / 8:
            few.append(test)
    try:
        for some in (few, tests[len(few) :]):
            if some and (killer := fails(tree, some, end, folder)):
                return killer, True
        return None, True
    except subprocess.TimeoutExpired:
        return None, False
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def fails(tree, tests, end, folder):
    chosen = tree / "chosen.txt"
    chosen.write_text("\n".join(tests))
    options = ["-x", "-n0", "--no-header", "--tb=no", "--assert=plain", "-m="]
    run = subprocess.run(
        run_of_pytest(*options, f"-ocache_dir={folder / 'cache'}", f"@{chosen}"),
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=max(end - time.monotonic(), 1),
    )
    failed = [x for x in run.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].split(" ", 1)[1].split(" - ")[0]
    return None if run.returncode in (0, 5) else "collection"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--marks", default=DEFAULT)
    parser.add_argument("--again", type=pathlib.Path)
    parser.add_argument("--survey", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default="mutants.jsonl")
    given = parser.parse_args()

    folder = pathlib.Path(tempfile.mkdtemp())
    if given.survey and given.survey.exists():
        by_line, seconds = json.loads(given.survey.read_text())
    else:
        by_line, seconds = survey(DEFAULT, folder)
        if given.survey:
            given.survey.write_text(json.dumps([by_line, seconds]))
    those = lambda m: by_line.get(f"{m.file}:{m.line}", [])
    if given.again:
        before = list(map(json.loads, given.again.read_text().splitlines()))
        chosen = [(Mutant(*x["mutant"]), x["killed by"]) for x in before]
    else:
        there = [m for m in mutants() if those(m)]
        some = random.Random(given.seed).sample(there, given.mutants)
        chosen = [(m, None) for m in some]
    others = collected(given.marks) if given.again else []

    def tried(pair):
        mutant, killer = pair
        tests, in_time = those(mutant), True
        if given.again:
            functions = set(map(function, tests))
            tests = [t for t in others if function(t) in functions]
        if killer is None and tests:
            tests = in_order(tests, seconds)
            killer, in_time = give(mutant, tests, seconds, given.seconds, folder)
        return {"mutant": mutant, "killed by": killer, "in time": in_time}

    killed = 0
    with (
        concurrent.futures.ThreadPoolExecutor(given.workers) as pool,
        given.out.open("w") as file,
    ):
        for i, result in enumerate(pool.map(tried, chosen), 1):
            killed += result["killed by"] is not None
            print(json.dumps(result), file=file, flush=True)
            print(f"{killed} of {i} killed", end="\r", flush=True)
    print()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
