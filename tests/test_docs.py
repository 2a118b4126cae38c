"""Every piece of Python in the README, the docs and the docstrings runs, and prints
what is shown below it."""

import ast
import functools as ft
import inspect
import json
import pathlib
import re
import sys

import eqx_sow
import pytest

from tests.documented import DOCUMENTED


pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(
    r"^( *)```python\n(.*?)^\1```\n(?:\s*^\1```text\n(.*?)^\1```)?",
    re.DOTALL | re.MULTILINE,
)


# What one line prints, beside it.
SHOWN = re.compile(r"^(?:print|tap)\(.*\)  # (.*)$", re.MULTILINE)


sys.path.insert(0, str(ROOT / "docs"))
import make_notebooks
import make_pages


sys.path.pop(0)


def _blocks():
    # The pages have all docstrings, as a test below says, and what the README has.
    texts = {
        str(p.relative_to(ROOT / "docs")): p.read_text() for p in make_pages.pages()
    }
    texts |= {"README": re.sub(make_pages.PART, "", (ROOT / "README.md").read_text())}
    # Here one program goes on through the page.
    for key in ("coming-from.md", "index.md"):
        _, parts, shown = zip(*BLOCK.findall(texts.pop(key)))
        shown += (*(x + "\n" for code in parts for x in SHOWN.findall(code)),)
        yield pytest.param("\n".join(parts), "".join(shown), id=key)
    for name, text in texts.items():
        for i, (indent, *texts) in enumerate(BLOCK.findall(text)):
            code, shown = (
                "".join(line.removeprefix(indent) for line in t.splitlines(True))
                for t in texts
            )
            yield pytest.param(code, shown, id=f"{name}-{i}")


@pytest.mark.parametrize("code, shown", list(_blocks()))
def test_runs(code, shown, capsys):
    exec(compile(code, "<docs>", "exec"), {"__name__": "docs"})
    if shown:
        assert capsys.readouterr().out == shown


def _has_arguments(x):
    return inspect.isfunction(x) or (
        inspect.isclass(x) and not issubclass(x, Exception)
    )


@pytest.mark.parametrize(
    "name",
    [n for n, x in vars(eqx_sow).items() if n[0] != "_" and _has_arguments(x)],
)
def test_public_names_have_an_example(name):
    assert "!!! example" in inspect.getdoc(getattr(eqx_sow, name))


@pytest.mark.parametrize(
    "name",
    [n for n, x in vars(eqx_sow).items() if inspect.isfunction(x) and n[0] != "_"],
)
def test_public_functions_tell_what_comes_back_and_what_goes_wrong(name):
    for part in ("Arguments", "Returns", "Raises"):
        assert f"**{part}:**" in inspect.getdoc(getattr(eqx_sow, name))


def test_every_line_of_the_cheat_sheet_runs():
    text = (ROOT / "docs/cheat-sheet.md").read_text()
    scope = {}
    exec(BLOCK.findall(text)[0][1], scope)
    scope["intermediates"] = scope["save_intermediates"](scope["model"])(scope["x"])[1]
    scope["reference"] = scope["intermediates"]
    rows = re.findall(r"^\| [^|`]*(?:`[^`]*`[^|`]*)* \| `([^`]+)`", text, re.MULTILINE)
    for code in rows:
        exec(code, dict(scope))
    assert len(rows) == text.count("\n| ") - text.count("| you want |") > 0


@pytest.mark.parametrize("page", make_pages.pages(), ids=lambda page: page.stem)
def test_pages_have_what_they_repeat(page):
    text = make_pages.made(page)
    assert text == page.read_text(), "Run `python docs/make_pages.py`."
    assert not re.search(r"\]\[(\]|eqx_sow)", text)


def test_every_public_name_is_on_a_page():
    public = {
        name
        for name, x in vars(eqx_sow).items()
        if name[0] != "_" and not inspect.ismodule(x)
    }
    assert set(make_pages.found()) == public
    for name in public:
        assert (
            ROOT / "docs" / make_pages.link(name, ROOT / "docs/x.md").split("#")[0]
        ).exists()


PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *make_pages.pages()))
FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")


def _anchors(page):
    """As a repository browser makes them."""
    for heading in re.findall("^#+ (.*)$", FENCED.sub("", page.read_text()), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        yield re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = re.sub("`[^`]*`", "", FENCED.sub("", page.read_text()))
    for file, anchor in LINK.findall(text):
        there = page.parent / file if file else page
        assert there.exists(), file
        assert not anchor or anchor in set(_anchors(there)), f"{file}#{anchor}"


@pytest.mark.parametrize("page", DOCUMENTED)
def test_what_pages_say_has_tests(page):
    text = FENCED.sub("", (ROOT / f"docs/{page}.md").read_text())
    assert set(DOCUMENTED[page]) <= set(re.findall("^#+ (.*)$", text, re.M))
    named = [name for tests in DOCUMENTED[page].values() for name in tests]
    named += re.findall(r"\btest_\w+\.py::test_\w+", text)
    for file, name in (x.split("::") for x in named):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (file, name)


def test_every_message_has_tests():
    text = (ROOT / "docs/api/errors.md").read_text()
    assert set(re.findall("^### (.*)$", text, re.M)) == set(DOCUMENTED["api/errors"])


def _strings():
    """Each string in the code, with a `…` for what is put in."""
    for file in ROOT.glob("eqx_sow/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(v, "value", None) for v in node.values]
                yield "".join(p if isinstance(p, str) else "…" for p in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _messages():
    text = (ROOT / "docs/api/errors.md").read_text()
    ours, _ = text.split("## Wrong arguments")
    return re.findall('^### .*?"(.*)"', ours, re.MULTILINE)


def test_messages_are_those_of_the_code():
    strings = list(_strings())
    assert len(_messages()) > 20
    for heading in _messages():
        for message in heading.split('", "'):
            parts = map(re.escape, message.split(" … "))
            pattern = re.compile(".*".join(parts), re.DOTALL)
            assert any(map(pattern.search, strings)), message


# The pages for people who change the source.
ABOUT_SOURCE = [
    "CONTRIBUTING.md",
    "docs/background/executions-and-names.md",
    "docs/background/how-it-works.md",
]
SOURCES = [
    p for d in ("eqx_sow", "tests", "docs", "examples") for p in ROOT.glob(f"{d}/**/*")
]


@ft.cache
def _identifiers():
    """Those in the code of the package, and what other files define."""
    found = set()
    for file in (*SOURCES, ROOT / "noxfile.py"):
        if file.suffix != ".py":
            continue
        found.add(file.stem)
        if not file.is_relative_to(ROOT / "eqx_sow"):
            found.update(re.findall(r"(?:def |class |\.)(\w+)", file.read_text()))
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            found |= {getattr(node, x, None) for x in ("id", "attr", "name", "arg")}
    return found


@pytest.mark.parametrize("page", ABOUT_SOURCE)
def test_the_source_has_what_pages_say_of_it(page):
    text = FENCED.sub("", (ROOT / page).read_text())
    named = set(re.findall(r"`@?(\w[\w./]*)(?:\([^`]*\))?`", text))
    files = {x for x in named if x.endswith(".py") or re.match("_.*/", x)}
    there = {f"/{p.relative_to(ROOT)}{'/' * p.is_dir()}" for p in SOURCES}
    there |= {f"/{p.name}" for p in ROOT.glob("*.py")}
    assert [x for x in files if not any(y.endswith(f"/{x}") for y in there)] == []
    # Classes, and other names with an underscore.
    parts = {part for x in named - files for part in x.split(".")}
    pattern = "_*[A-Z]\\w*[a-z]\\w*|[a-z]*_[a-z_]+"
    ours = {x for x in parts if re.fullmatch(pattern, x)}
    assert files and ours and ours - _identifiers() == set()


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script_with_outputs(path):
    script = list(make_notebooks.cells(path.with_suffix(".py").read_text()))
    notebook = json.loads(path.read_text())
    cells = [
        (c["cell_type"], "".join(c["source"]), c["metadata"]) for c in notebook["cells"]
    ]
    assert cells == script, "Run `python docs/make_notebooks.py`."
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    shown = [output for c in code for output in c["outputs"]]
    assert shown and all(x["output_type"] != "error" for x in shown)
    # Small enough to look at, and to keep.
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pages_have_the_pictures_of_the_notebooks(path):
    files = sorted((ROOT / "docs/images").glob(f"{path.stem}-*.png"))
    pictures = list(make_notebooks.images(json.loads(path.read_text())))
    assert [data for _, data in pictures] == [file.read_bytes() for file in files]
    assert all(alt for alt, _ in pictures)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 6


def test_the_code_of_the_page_is_that_of_the_notebook():
    script = (ROOT / "examples/language_model.py").read_text()
    page = (ROOT / "docs/examples/language_model.md").read_text()
    blocks = re.findall("```py\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 10 and set(lines) <= set(script.splitlines())
