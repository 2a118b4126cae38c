"""Writes what the pages of `docs/` repeat from elsewhere: `python docs/make_pages.py`.

    <!-- api: plant -->              signature and docstring of `eqx_sow.plant`
    <!-- file: examples/watch.py --> that file
    <!-- notebook: examples/gpt.ipynb --> its cells, with what they show
    <!-- readme -->                  what the README has between its own such marks
    <!-- reducers -->                a table of them, each with its first sentence

Each of these begins a part that this script writes, up to `<!-- end -->`. A reference
to a public name without an address, as docstrings have them, becomes a link. So pages
can be read as they are, and the site is built from the same files.
"""

import ast
import functools as ft
import inspect
import json
import os.path
import pathlib
import re
import textwrap


DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
PART = re.compile(
    r"<!-- (api|file|notebook|readme|reducers)(?:: (\S+))? -->\n.*?<!-- end -->",
    re.DOTALL,
)
REFERENCE = re.compile(r"\[`eqx_sow\.(\w+)`\]\[\]")
ADMONITION = re.compile(
    r'^(?:!!!|\?\?\?) \w+(?: "(.*)")?\n((?:\n|    .*\n?)+)', re.MULTILINE
)


def pages():
    return sorted(DOCS.glob("**/*.md"))


@ft.cache
def _page_of():
    """The page that has a public name."""
    return {
        name: page
        for page in pages()
        for kind, name in PART.findall(page.read_text())
        if kind == "api"
    }


def _heading(name, page):
    """`None` if that is the title of the page."""
    text = page.read_text()
    if text.startswith(f"# {name}\n"):
        return None
    there = [n.lower() for kind, n in PART.findall(text) if kind == "api"]
    # Addresses within a page do not tell `Sow` from `sow`.
    twice = there.count(name.lower()) > 1 and name != name.lower()
    return f"{name} (class)" if twice else name


def link(name, page):
    """The address of a public name, as it is from a page."""
    there = _page_of()[name]
    heading = _heading(name, there)
    slug = "" if heading is None else re.sub(r"[^\w ]", "", heading.lower())
    address = os.path.relpath(there, page.parent) if there != page else ""
    return address + (f"#{slug.replace(' ', '-')}" if slug else "")


def _with_links(text, page):
    def replaced(found):
        # A page needs no link to itself.
        there = link(found[1], page)
        return f"[`eqx_sow.{found[1]}`]({there})" if there else f"`eqx_sow.{found[1]}`"

    return REFERENCE.sub(replaced, text)


@ft.cache
def found():
    """The definition of each public name. Nothing is imported."""
    return dict(_found())


def _found():
    for line in ast.parse((ROOT / "eqx_sow/__init__.py").read_text()).body:
        if isinstance(line, ast.ImportFrom) and line.level and line.module:
            file = ROOT / "eqx_sow" / f"{line.module.replace('.', '/')}.py"
            if file.exists():
                # The last one, as overloads come first.
                there = {getattr(x, "name", None): x for x in _body(file)}
                for alias in line.names:
                    if alias.asname and not alias.asname.startswith("_"):
                        yield alias.asname, there[alias.name]


def _body(file):
    return ast.parse(file.read_text()).body


def _signature(called, tree):
    """As in the source, with one parameter on each line if they do not fit on one."""
    if any(getattr(x, "id", None) == "property" for x in tree.decorator_list):
        returns = ast.unparse(tree.returns).strip("'")
        return f"```py\n{called}: {returns}\n```"
    args = tree.args
    positional = args.posonlyargs + args.args
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    each = list(map(_parameter, positional, defaults))
    if args.posonlyargs:
        each.insert(len(args.posonlyargs), "/")
    if args.vararg:
        each.append(f"*{ast.unparse(args.vararg)}")
    elif args.kwonlyargs:
        each.append("*")
    each += map(_parameter, args.kwonlyargs, args.kw_defaults)
    if args.kwarg:
        each.append(f"**{ast.unparse(args.kwarg)}")
    if each and each[0] in ("self", "cls"):
        each = [x for x in each[1:] if x != "/"]
    has_result = tree.returns and tree.name != "__init__"
    end = f") -> {ast.unparse(tree.returns)}" if has_result else ")"
    line = f"{called}({', '.join(each)}{end}"
    if len(line) > 88:
        line = "\n".join([f"{called}(", *(f"    {x}," for x in each), end])
    # Types are named as a reader would: `T`, not `_T`; `Summary`, not `'Summary'`.
    line = re.sub(r"\b_([A-Z])", r"\1", line)
    line = re.sub(r"'([A-Z]\w*)'", r"\1", line)
    line = line.replace("'", '"')
    return f"```py\n{line}\n```"


def _parameter(arg, default):
    if default is None:
        return ast.unparse(arg)
    equals = " = " if arg.annotation else "="
    return f"{ast.unparse(arg)}{equals}{ast.unparse(default)}"


def _doc(tree):
    def replaced(found):
        title = found[1] or "Example"
        return f"**{title}:**\n\n{textwrap.dedent(found[2]).strip()}\n\n"

    return ADMONITION.sub(replaced, ast.get_docstring(tree) + "\n").strip()


def _attributes(tree):
    """Those that have a string below them: a list."""
    for field, doc in zip(tree.body, tree.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            what = inspect.cleandoc(ast.literal_eval(doc.value)).replace("\n", "\n    ")
            yield f"- `{ast.unparse(field.target)}`: {what}"


def _api(name, page):
    tree = found()[name]
    heading = _heading(name, page)
    parts = [f"## {heading}"] if heading else []
    if isinstance(tree, ast.FunctionDef):
        parts += [_signature(f"eqx_sow.{name}", tree), _doc(tree)]
        return "\n\n".join(parts)
    methods = [x for x in tree.body if isinstance(x, ast.FunctionDef)]
    methods = [x for x in methods if ast.get_docstring(x)]
    init = [x for x in methods if x.name == "__init__"]
    parts += [_signature(f"eqx_sow.{name}", x) for x in init]
    parts += map(_doc, [tree, *init])
    if attributes := list(_attributes(tree)):
        parts.append("\n".join(["**Attributes:**", "", *attributes]))
    for method in methods:
        if method.name == "__call__" or not method.name.startswith("_"):
            parts.append(f"### {name}.{method.name}")
            called = name.lower() if method.name == "__call__" else method.name
            parts.append(_signature(called, method))
            parts.append(_doc(method))
    return "\n\n".join(parts)


def _file(name, page):
    del page
    return f'```py title="{name}"\n{(ROOT / name).read_text().strip()}\n```'


def _notebook(name, page):
    """What it shows is below each cell: text, or a picture. The code that draws a
    picture, or is not about eqx_sow, is in the notebook alone."""
    parts, pictures = [], 0
    for cell in json.loads((ROOT / name).read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # The page has the title.
            parts.append(re.sub(r"\A# .*\n*", "", source))
            continue
        if not cell["metadata"].keys() & {"alt", "aside"}:
            parts.append(f"```py\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                file = f"images/{pathlib.Path(name).stem}-{pictures}.png"
                address = os.path.relpath(DOCS / file, page.parent)
                parts.append(f"![{cell['metadata'].get('alt', '')}]({address})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(filter(None, parts))


def _readme(_, page):
    text = (ROOT / "README.md").read_text()
    (text,) = re.findall(r"<!-- readme -->\n(.*?)\n<!-- end -->", text, re.DOTALL)

    def replaced(found):
        return f"]({os.path.relpath(ROOT / found[1], page.parent)}"

    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)", replaced, text)


def _reducers(_, page):
    rows = ["| reducer | what it does |", "|---|---|"]
    # In the order of their file.
    for name, tree in sorted(found().items(), key=lambda item: item[1].lineno):
        if "Reducer" in map(ast.unparse, getattr(tree, "bases", ())):
            said = " ".join(ast.get_docstring(tree).split())
            rows.append(f"| [`eqx_sow.{name}`][] | {re.split(r'[.] ', said)[0]} |")
    return "\n".join(rows)


WRITE = dict(
    api=_api, file=_file, notebook=_notebook, readme=_readme, reducers=_reducers
)


def made(page):
    """The text that a page should have."""

    def replaced(found):
        kind, name = found.groups()
        opening = found[0].split("\n", 1)[0]
        return f"{opening}\n\n{WRITE[kind](name, page)}\n\n<!-- end -->"

    return _with_links(PART.sub(replaced, page.read_text()), page)


if __name__ == "__main__":
    for page in pages():
        page.write_text(made(page))
