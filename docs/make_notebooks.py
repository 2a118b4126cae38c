"""Runs the notebooks in `examples/`, and writes them with their outputs.

    python docs/make_notebooks.py            all of them
    python docs/make_notebooks.py gpt        this one
    python docs/make_notebooks.py --check    runs them, and writes nothing

A notebook is made from the script of its name, whose cells begin with `# %%`, and
`# %% [markdown]` if they are text. Its pictures are written to `docs/images/` as well,
for the pages. `# %% alt="..."` describes the picture of a cell. What is not about
eqx_sow has `# %% aside`: the pages have what it shows, without the code.

`--check` compares the outputs with those that are committed: the same text, but for
numbers, which vary between machines, and pictures and tables in the same places.
"""

import argparse
import base64
import io
import json
import pathlib
import re
import sys


DOCS = pathlib.Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"


def cells(script):
    """The cells of a script: kind, source and metadata."""
    _, *parts = re.split(r"^# %%", script, flags=re.MULTILINE)
    for part in parts:
        first, _, source = part.partition("\n")
        kind = "markdown" if first == " [markdown]" else "code"
        if kind == "markdown":
            source = re.sub("^# ?", "", source, flags=re.MULTILINE)
        alt = re.search('alt="(.*)"', first)
        metadata = {"alt": alt[1]} if alt else {}
        if first == " aside":
            metadata["aside"] = True
        yield kind, source.strip(), metadata


def made(name):
    """The notebook of a script, without outputs."""
    import nbformat.v4 as v4

    each = []
    text = (EXAMPLES / f"{name}.py").read_text()
    for i, (kind, source, metadata) in enumerate(cells(text)):
        new = v4.new_markdown_cell if kind == "markdown" else v4.new_code_cell
        each.append(new(source, id=f"cell-{i}", metadata=metadata))
    return v4.new_notebook(cells=each)


def run(notebook):
    """Fills in the outputs."""
    from nbclient import NotebookClient

    client = NotebookClient(notebook, timeout=1800, kernel_name="python3")
    # One imports a script beside it.
    client.execute(cwd=str(EXAMPLES))
    spec = dict(display_name="Python 3", language="python", name="python3")
    # Nothing that depends on who ran it, and when.
    notebook.metadata = {"kernelspec": spec, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = list(_without_chance(cell.outputs))


def _without_chance(outputs):
    """What is printed comes in pieces, cut anywhere."""
    text = None
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        output.get("metadata", {}).clear()
        if output.output_type != "stream":
            text = None
        elif text is not None:
            text.text += output.text
            continue
        else:
            text = output
        yield output


def images(notebook):
    """The PNG pictures of a notebook, in order, with their descriptions."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                data = base64.b64decode(output["data"]["image/png"])
                yield cell["metadata"].get("alt", ""), data


def shrink(notebook):
    """256 colours are enough, and take a third of the space."""
    from PIL import Image

    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                data = base64.b64decode(output["data"]["image/png"])
                file = io.BytesIO()
                picture = Image.open(io.BytesIO(data)).convert("RGB")
                picture.quantize(256, dither=0).save(file, "png", optimize=True)
                data = base64.b64encode(file.getvalue()).decode()
                output["data"]["image/png"] = data


NUMBER = re.compile(r"\(?\[*[-+]?[\d.,]*\d(e[-+]?\d+)?[%s]?[\]).,:;]*|nan,?|-+")


def compared(notebook):
    """What a notebook shows, without numbers."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text", ""))
            known = [w for w in text.split() if not NUMBER.fullmatch(w)]
            yield output["output_type"], sorted(output.get("data", {})), known


def main():
    import nbformat

    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    every = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
    for name in arguments.names or every:
        path = EXAMPLES / f"{name}.ipynb"
        notebook = made(name)
        run(notebook)
        if arguments.check:
            for cell in notebook.cells:
                for output in cell.get("outputs", ()):
                    print(output.get("text", ""), end="")
            before = list(compared(json.loads(path.read_text())))
            after = list(compared(notebook))
            for old, new in zip(before, after):
                if old != new:
                    sys.exit(f"{path.name} shows\n  {old}\nand now\n  {new}")
            if len(before) != len(after):
                sys.exit(f"{path.name} has {len(before)} outputs, now {len(after)}")
            continue
        shrink(notebook)
        nbformat.write(notebook, path)
        for old in DOCS.glob(f"images/{name}-*.png"):
            old.unlink()
        for i, (_, data) in enumerate(images(notebook), start=1):
            (DOCS / f"images/{name}-{i}.png").write_bytes(data)


if __name__ == "__main__":
    main()
