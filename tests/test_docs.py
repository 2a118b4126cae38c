"""Every piece of Python in the README, the docs and the docstrings runs, and prints
what is shown below it."""

import inspect
import json
import pathlib
import re
import tomllib

import eqx_sow
import pytest


pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parent.parent
BLOCK = re.compile(
    r"^( *)```python\n(.*?)^\1```\n(?:\s*^\1```text\n(.*?)^\1```)?",
    re.DOTALL | re.MULTILINE,
)


def _blocks():
    texts = {
        p.stem: p.read_text() for p in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    }
    for name, x in vars(eqx_sow).items():
        if not name.startswith("_"):
            texts[name] = inspect.getdoc(x) or ""
            if inspect.isclass(x) and x.__init__ is not object.__init__:
                texts[f"{name}.__init__"] = inspect.getdoc(x.__init__) or ""
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
    rows = re.findall(r"^\| [^|`]*(?:`[^`]*`[^|`]*)* \| `([^`]+)`", text, re.MULTILINE)
    for code in rows:
        exec(code, dict(scope))
    assert len(rows) == text.count("\n| ") - text.count("| you want |") > 0


def test_the_address_is_that_of_the_metadata():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    (address,) = re.findall(
        r"git\+(https://[^\s\"]+)", (ROOT / "README.md").read_text()
    )
    assert address == urls["Repository"]


def test_limits_name_tests_that_exist():
    text = (ROOT / "docs/limits.md").read_text()
    named = re.findall(r"\b(test_\w+\.py)::(test_\w+)", text)
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (file, name)


def _cells(script):
    """The cells of a script in jupytext's percent format."""
    _, *cells = re.split(r"^# %%", script, flags=re.MULTILINE)
    for cell in cells:
        first, _, rest = cell.partition("\n")
        kind = "markdown" if first == " [markdown]" else "code"
        if kind == "markdown":
            rest = re.sub("^# ?", "", rest, flags=re.MULTILINE)
        yield kind, rest.strip()


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script_without_outputs(path):
    script = list(_cells(path.with_suffix(".py").read_text()))
    cells = json.loads(path.read_text())["cells"]
    assert [(c["cell_type"], "".join(c["source"])) for c in cells] == script
    assert all(not c.get("outputs") and not c.get("execution_count") for c in cells)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2
