"""The documentation as a site: what its search finds, and how it looks in a browser.

Needs the extra `docs`; what needs a browser looks for Chromium and its driver.
"""

import functools as ft
import http.server
import json
import pathlib
import re
import shutil
import threading

import pytest


ROOT = pathlib.Path(__file__).parent.parent
lunr = pytest.importorskip("lunr", reason="needs the extra `docs`")
pytest.importorskip("lunr.builder")
pytest.importorskip("lunr.stop_word_filter")
mkdocs_config = pytest.importorskip("mkdocs.config", reason="needs the extra `docs`")

pytestmark = pytest.mark.sample(1)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    from mkdocs.commands.build import build

    directory = tmp_path_factory.mktemp("site")
    config = mkdocs_config.load_config(
        str(ROOT / "mkdocs.yml"), site_dir=str(directory)
    )
    build(config)
    return directory


# --- search ---
@pytest.fixture(scope="module")
def found(site):
    """A function from a query to the pages that a search shows, best first, computed as
    the theme does it: `foo bar` looks for words that begin with either, a title counts
    most, and a page more than a section."""
    index = json.loads((site / "search/search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    assert index["config"]["pipeline"] == ["stopWordFilter"]
    split = lambda text: " ".join(separator.split(re.sub("<[^>]*>", " ", text))).lower()
    documents = {d["location"]: d for d in index["docs"]}
    builder = lunr.builder.Builder()
    builder.b(0)
    builder.pipeline.add(lunr.stop_word_filter.stop_word_filter)
    builder.ref("location")
    for field in ("title", "text"):
        builder.field(field, boost=index["config"]["fields"][field]["boost"])
    for location, document in documents.items():
        fields = {key: split(document[key]) for key in ("title", "text")}
        builder.add(
            {"location": location, **fields}, {"boost": document.get("boost", 1)}
        )
    searched = builder.build()

    def search(query):
        words = split(query).split()
        scores = {}
        for hit in searched.search(" ".join(f"{word}*" for word in words)):
            there = list(hit["match_data"].metadata)
            share = sum(any(t.startswith(w) for t in there) for w in words) / len(words)
            factor = 1 + (share + ("#" not in hit["ref"])) ** 2
            page = hit["ref"].split("#")[0].rstrip("/")
            scores[page] = max(scores.get(page, 0), hit["score"] * factor)
        return sorted(scores, key=scores.get, reverse=True)

    return search


@pytest.mark.parametrize(
    "query, page",
    [
        ("plant", "api/plant"),
        ("sow", "api/sow"),
        ("capture", "guides/capture"),
        ("tap", "api/tap"),
        ("compare", "api/compare"),
        ("tabulate", "api/summarize"),
        ("primal", "tour"),
        ("GPU", "guides/sharding"),
        ("TPU", "guides/sharding"),
        ("multi-GPU", "guides/sharding"),
        ("devices", "guides/sharding"),
        ("upgrade", "help/faq"),
        ("slow", "help/broken"),
        ("plot", "examples/training_plots"),
        ("NaN", "help/broken"),
        ("hook", "coming-from"),
        ("names", "guides/capture"),
        ("tuple", "guides/capture"),
        ("cache", "coming-from"),
        ("attention", "recipes/interpretability"),
        ("disk", "recipes/saving"),
        ("diffrax", "guides/loops-and-branches"),
        ("scan", "guides/loops-and-branches"),
        ("axes", "api/intermediates"),
        ("memory", "guides/training"),
        ("histogram", "api/summarize"),
        ("checkpoint", "guides/gradients"),
        ("while_loop", "guides/loops-and-branches"),
        ("install", ""),
        ("PyTorch", "coming-from"),
        ("bfloat16", "recipes/saving"),
        ("alarm", "guides/training"),
        ("multiple GPUs", "guides/sharding"),
        ("optimistix", "guides/loops-and-branches"),
        ("haliax", "recipes/saving"),
        ("exploding", "help/broken"),
        ("dead", "help/broken"),
        ("port", "recipes/testing"),
        ("test", "recipes/testing"),
        ("head", "recipes/interpretability"),
    ],
)
def test_search(found, query, page):
    first, second, *_ = [*found(query), "", ""]
    assert page in (first, second)


# --- a browser ---
@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("Until Chromium and chromedriver are installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    for argument in (
        "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update --disable-sync"
    ).split():
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=driver)
    browser = webdriver.Chrome(options=options, service=service)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = ft.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


# What is wider than the page, and cannot be scrolled by itself.
TOO_WIDE = """
const width = document.documentElement.clientWidth;
const scrolls = (e) => {
  for (; e && e !== document.body; e = e.parentElement) {
    const style = getComputedStyle(e);
    const own = ["auto", "scroll", "hidden"].includes(style.overflowX);
    if (own || style.position === "fixed") return true;
  }
  return false;
};
return [...document.querySelectorAll("article *")]
  .filter((e) => e.getBoundingClientRect().right > width + 1 && !scrolls(e))
  .map((e) => e.outerHTML.slice(0, 120));
"""


@pytest.mark.parametrize("width", [1400, 400])
def test_looks(site, address, browser, width):
    browser.set_window_size(width, 1000)
    problems = []
    for file in sorted(site.rglob("index.html")):
        page = str(file.parent.relative_to(site))
        browser.get(address + ("" if page == "." else f"{page}/"))
        problems += [(page, x) for x in browser.execute_script(TOO_WIDE)]
        for entry in browser.get_log("browser"):
            problems.append((page, entry["message"]))
        for entry in browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith((address, "data:", "blob:", "chrome:", "about:")):
                    problems.append((page, url))
    assert not problems


def test_links_can_be_read(address, browser):
    """Their contrast against the background is 4.5 at least, by the formula of WCAG 2:
    https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""
    browser.set_window_size(1400, 1000)
    browser.get(address)
    link = browser.find_element("css selector", "article p a")
    colours = [
        link.value_of_css_property("color"),
        browser.find_element("tag name", "body").value_of_css_property(
            "background-color"
        ),
    ]

    def luminance(colour):
        rgb = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
        r, g, b = [
            x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb
        ]
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark, light = sorted(map(luminance, colours))
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_titles_differ(site):
    titles = [
        re.search("<title>(.*?)</title>", file.read_text())[1]
        for file in site.rglob("index.html")
    ]
    assert len(set(titles)) == len(titles)
