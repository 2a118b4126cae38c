"""What the site says first when somebody searches: what a name is, then how to use it,
and the background last. `tests/test_site.py` asks it."""

# By how a page's address begins; the longest one that fits counts.
BOOSTS = {
    "": 1,
    "api/": 2,
    "api/errors": 0.4,
    "guides/": 1.5,
    "recipes/": 1.5,
    "cheat-sheet": 1.5,
    "tour": 1.5,
    "examples/": 0.5,
    "help/": 1,
    "limits": 0.4,
    "background/": 0.4,
}


def on_page_markdown(markdown, page, **_):
    fitting = [p for p in BOOSTS if page.file.src_uri.startswith(p)]
    page.meta["search"] = {"boost": BOOSTS[max(fitting, key=len)]}
    return markdown
