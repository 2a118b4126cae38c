"""Would a test notice? Changes the source in one place at a time, and runs the tests.

    python tests/mutants.py --mutants 300 --seed 0 --out mutants.jsonl

All mutants are in one copy of the source, each behind a switch: `a < b` becomes
`(a <= b if on(17) else a < b)`. A first run of the default tests, with all switches
off, records which of them ask which switch, and how long they take. Then

1. each mutant alone is given to the tests that ask its switch, the most promising
   first, for `--seconds`, until one of them fails;
2. what is left is switched on together, in three runs of the default tests, so that
   mutants of one file do not hide each other. Each of these mutants is then given,
   alone, to those tests that failed. This is repeated with those that are still left,
   until none is noticed;
3. the same with `-m "rest or slow"`, the cases that the default tests leave out.

The output has a line for each mutant that a test has noticed, with that test and the
step, and in the end one for each that none has.
"""

import argparse
import ast
import collections
import concurrent.futures
import copy
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple


ROOT = pathlib.Path(__file__).parent.parent
DEFAULT = "not (fuzz or slow or types or every or rest)"
REST = "rest or slow"
# What holds the semantics. Messages and tables are left out.
MODULES = "_mark _values _walk _modules _handlers _transforms _names.py _selection.py"
# The switches. In the copy only.
SWITCHES = """
import os
ON = frozenset(map(int, os.environ.get("MUTANTS_ON", "").split()))
ASKED = set()
def on(i):
    ASKED.add(i)
    return i in ON
"""
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


def _fixed(tree):
    """Annotations, patterns of `match` and f-strings, where no switch can stand."""
    whole = (
        part
        for node in ast.walk(tree)
        for name in ("annotation", "returns", "pattern")
        if isinstance(part := getattr(node, name, None), ast.AST)
    )
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    return {x for part in (*whole, *strings) for x in ast.walk(part)}


def mutants():
    for part in MODULES.split():
        place = ROOT / "eqx_sow" / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            name = str(file.relative_to(ROOT))
            tree = ast.parse(file.read_text())
            fixed = _fixed(tree)
            for i, node in enumerate(ast.walk(tree)):
                for k, new in enumerate([] if node in fixed else changes(node)):
                    at = getattr(node, "iter", node).lineno
                    short = ast.unparse(new).splitlines()[0]
                    old = ast.unparse(node).splitlines()[0]
                    yield Mutant(name, at, i, k, f"{old} -> {short}")


def switched(text, chosen):
    """The source with some of its mutants, by number, each behind a switch."""
    tree = ast.parse(text)
    at = collections.defaultdict(list)
    numbers = {node: i for i, node in enumerate(ast.walk(tree))}
    for i, mutant in chosen.items():
        at[mutant.node].append((i, mutant.change))

    class Switch(ast.NodeTransformer):
        def visit(self, node):
            here = at[numbers[node]]
            old = self.generic_visit(node)
            possible = list(changes(old)) if here else []
            for i, change in here:
                old = either(i, possible[change], old)
            return old

    tree = Switch().visit(tree)
    last = max(i for i, x in enumerate(tree.body) if i == 0 or _is_future(x))
    tree.body.insert(
        last + 1, ast.parse("from eqx_sow._switches import on as _on").body[0]
    )
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_future(statement):
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def either(i, new, old):
    on = ast.Call(ast.Name("_on"), [ast.Constant(i)], [])
    if isinstance(old, ast.If):
        return ast.If(ast.IfExp(on, new.test, old.test), old.body, old.orelse)
    if isinstance(old, ast.comprehension):
        all_of = ast.BoolOp(ast.And(), old.ifs) if len(old.ifs) > 1 else old.ifs[0]
        one = ast.BoolOp(ast.Or(), [on, all_of])
        return ast.comprehension(old.target, old.iter, [one], old.is_async)
    return ast.IfExp(on, new, old)


def write(drawn, tree):
    """A copy of the project with all mutants, each switched off."""
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", "site", "__pycache__", ".pytest_cache"
    )
    shutil.copytree(ROOT, tree, ignore=ignore)
    (tree / "eqx_sow/_switches.py").write_text(SWITCHES)
    for name in {m.file for m in drawn}:
        file = tree / name
        here = {i: m for i, m in enumerate(drawn) if m.file == name}
        file.write_text(switched(file.read_text(), here))


# --- tests: what runs in pytest ---
class Record:
    """Which switches each test asks, and how long it takes."""

    def __init__(self, file, asked):
        self.file, self.asked, self.tests = file, asked, {}

    def pytest_collection_finish(self):
        self.at_import = sorted(self.asked)

    def pytest_runtest_setup(self):
        self.asked.clear()

    def pytest_runtest_logreport(self, report):
        # What fails or is skipped by itself says nothing.
        if report.when == "call" and report.passed:
            self.tests[report.nodeid] = report.duration, sorted(self.asked)

    def pytest_sessionfinish(self):
        self.file.write_text(json.dumps([self.at_import, self.tests]))


def _too_long(signal_number, frame):
    raise TimeoutError("a loop without an end")


def pytest_runtest_setup(item):
    # All but the slow ones take less than a second. What is given to one mutant ends
    # after a minute and a half, and this must come before.
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(120 if item.get_closest_marker("slow") else 30)


def pytest_configure(config):
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and "MUTANTS_RECORD" in os.environ:
        from eqx_sow import _switches  # pyright: ignore[reportAttributeAccessIssue]

        file = pathlib.Path(os.environ["MUTANTS_RECORD"], f"{worker}.json")
        config.pluginmanager.register(Record(file, _switches.ASKED))


# --- tests: what starts pytest ---
def run_pytest(tree, *args, on=(), seconds=None, **environment):
    command = [sys.executable, *"-m pytest -q --no-header --tb=no".split()]
    command += *"-p tests.mutants --assert=plain".split(), f"-ocache_dir={tree}/.cache"
    run = subprocess.run(
        [*command, *args],
        cwd=tree,
        env=os.environ
        | {"PYTHONPATH": str(tree), "MUTANTS_ON": " ".join(map(str, on))}
        | environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    found = [x for x in run.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    failed = [x.split(" ", 1)[1].split(" - ")[0] for x in found]
    if not failed and run.returncode not in (0, 5):
        failed = ["collection"]
    return failed


def survey(tree):
    """Which tests ask each switch, and how long each test takes."""
    run_pytest(tree, f"-m={DEFAULT}", MUTANTS_RECORD=str(tree))
    asked_by, seconds, at_import = collections.defaultdict(list), {}, set()
    for file in tree.glob("gw*.json"):
        imported, tests = json.loads(file.read_text())
        at_import.update(imported)
        for test, (took, asked) in tests.items():
            seconds[test] = took
            for i in asked:
                asked_by[i].append(test)
    return asked_by | dict.fromkeys(at_import, list(seconds)), seconds


def first_of(tests, seconds, kills, limit):
    """The most promising tests that take no longer than `limit` seconds: five of each
    file, then five more. First the files that have noticed most mutants, and of which
    most tests ask the switch, for the time that they take. They are returned file by
    file, as JAX's caches are cleared after each."""
    file = lambda test: test.split("::")[0]
    of_file, all_tests = collections.defaultdict(list), collections.Counter()
    for test in seconds:
        all_tests[file(test)] += 1
    for test in sorted(tests, key=lambda t: (-kills[t], seconds.get(t, 1.0))):
        of_file[file(test)].append(test)

    def worth(f):
        here = of_file[f]
        took = sum(seconds.get(t, 1.0) for t in here)
        share = len(here) / max(all_tests[f], len(here))
        return (1 + kills[f]) * (0.1 + share) / (5 + took)

    best = sorted(of_file, key=worth, reverse=True)
    left, chosen = limit, collections.defaultdict(list)
    for i in range(0, max(map(len, of_file.values()), default=0), 5):
        for f in best:
            for test in of_file[f][i : i + 5]:
                left -= seconds.get(test, 1.0)
                if left > 0 or not chosen:
                    chosen[f].append(test)
    return [test for f in best for test in chosen[f]]


def failing(tree, tests, on, *args, seconds=None):
    """Which of the tests fail, or `[]` if that takes too long."""
    if not tests:
        return []
    with tempfile.NamedTemporaryFile("w", dir=tree, suffix=".txt") as chosen:
        chosen.write("\n".join(tests))
        chosen.flush()
        args = "-m=", *args, f"@{chosen.name}"
        try:
            return run_pytest(tree, *args, on=on, seconds=seconds)
        except subprocess.TimeoutExpired:
            return []


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--out", type=pathlib.Path, default="mutants.jsonl")
    given = parser.parse_args()

    drawn = random.Random(given.seed).sample(list(mutants()), given.mutants)
    folder = pathlib.Path(tempfile.mkdtemp())
    tree = folder / "tree"
    write(drawn, tree)
    asked_by, seconds = survey(tree)
    asks = {i: set(tests) for i, tests in asked_by.items()}
    kills, left = collections.Counter(), set(range(len(drawn)))
    out = given.out.open("w")

    def say(i, step, test):
        result = {"step": step, "mutant": drawn[i], "noticed by": test}
        print(json.dumps(result), file=out, flush=True)

    def alone(i, step, tests, limit):
        some = first_of(tests, seconds, kills, limit)
        for test in failing(tree, some, [i], "-x", "-n0", seconds=20 + 5 * limit)[:1]:
            say(i, step, test)
            left.discard(i)
            kills.update([test, test.split("::")[0]])
            print(f"{step}: {len(left)} of {len(drawn)} left", flush=True)

    def each(step, some, tests_of, limit):
        with concurrent.futures.ThreadPoolExecutor(given.workers) as pool:
            list(pool.map(lambda i: alone(i, step, tests_of(i), limit), some))

    def together(step, marks, pass_by_themselves, tests_of):
        before = None
        while left and len(left) != before:
            before = len(left)
            in_files = sorted(left, key=lambda i: drawn[i])
            for some in (in_files[k::3] for k in range(3)):
                failed = pass_by_themselves(run_pytest(tree, f"-m={marks}", on=some))
                print(f"{step}: {len(failed)} fail with {len(some)}", flush=True)
                each(step, some, lambda i: tests_of(i, failed), 10)

    # A file that cannot be imported fails as a whole.
    is_file = lambda test: test.endswith(".py")
    asked = lambda i, tests: [t for t in tests if is_file(t) or t in asks.get(i, ())]
    known = lambda tests: [t for t in tests if is_file(t) or t in seconds]
    each("alone", sorted(left), lambda i: asked_by.get(i, []), given.seconds)
    together("default", DEFAULT, known, asked)
    others = lambda tests: set(tests) - set(failing(tree, tests, []))
    together("rest", REST, lambda tests: sorted(others(tests)), lambda i, tests: tests)
    for i in sorted(left):
        say(i, "none", None)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
