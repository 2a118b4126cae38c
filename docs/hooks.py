"""A search finds what is said of a name before the programs that use it."""


def on_page_markdown(markdown, page, **_):
    if page.file.src_uri.startswith("examples/"):
        page.meta["search"] = {"boost": 0.5}
    return markdown
