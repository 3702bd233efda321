"""The report of a finished run: its files, and its page in a real browser, on phones and desktops, light and dark."""

import contextlib
import io
import json
import re
import shutil
from html import escape

import jax
import matplotlib.image
import numpy as np
import pytest
from numpy.testing import assert_allclose

from adaptive_span_jax.commands import report as report_command
from adaptive_span_jax.commands import train
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.inference import cache_plan
from adaptive_span_jax.model import span, transformer
from adaptive_span_jax.report import page as report_page
from adaptive_span_jax.report import report
from adaptive_span_jax.report.paper_tables import FOOTNOTES, Row, tables
from tests.conftest import tiny_config, use_devices
from tests.support.report_files import FIGURES, rows_of

pytestmark = pytest.mark.xdist_group("report_page")  # one run serves all

# A penalty this large is warned of, and a warning must fit the page as well.
CONFIG = tiny_config(
    model={"attention": "plain"},  # compiled sooner
    span={"kind": "dynamic", "penalty": 1.0},
    train={"steps": 20},
    log={"every_steps": 5},
    evaluate={"every_steps": 10},
)

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

# The contrast of an element's text to the card behind it, as defined by WCAG.
CONTRAST = """text => {
  const numbers = color => color.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const linear = x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const bright = color => numbers(color).map(linear).reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const card = getComputedStyle(text.closest('figure')).backgroundColor;
  const [low, high] = [bright(getComputedStyle(text).fill), bright(card)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""

# How many lines an element's text takes.
LINES = """element => {
  const range = document.createRange();
  range.selectNodeContents(element);
  return new Set([...range.getClientRects()].map(line => line.top)).size;
}"""


def find_browser() -> str:
    """The path of a Chromium; without one, the test is skipped. CI has one from `launch/test.sh`."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: the package {BROWSERS[0]})")


@contextlib.contextmanager
def chromium():
    """A browser, while the block runs."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = find_browser()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def colors(png: bytes) -> int:
    """How many different colors a screenshot has."""
    image = (matplotlib.image.imread(io.BytesIO(png))[..., :3] * 255).astype(np.uint32)
    return len(np.unique(image @ np.array([1 << 16, 1 << 8, 1], np.uint32)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        assert train.train(CONFIG, directory, "python main.py") == 0
    return directory


def test_a_finished_run_has_a_report(run, one_device, capsys):
    target = run / "report"
    # The same command again shows the result again.
    assert train.train(CONFIG, run, "python main.py") == 0
    assert f"open {target}/index.html" in capsys.readouterr().out
    result = json.loads((run / "result.json").read_text())
    summary = json.loads((target / "summary.json").read_text())
    assert summary["dev_bits"] == result["dev_bits"]
    assert summary["test_bits"] == result["test_bits"]
    assert summary["average_span"] == pytest.approx(result["average_span"])
    assert summary["flops_per_token"] == pytest.approx(result["flops_per_token"])

    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert summary["input_share"] == np.median([line["input_share"] for line in logged if "input_share" in line])
    assert 0 < summary["input_share"] < 1

    page = (target / "index.html").read_text()
    headlines = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    assert ("baseline: order-2 entropy of train, bits per byte", f"{result['order2_bits']:.3f}") in headlines
    saved = 1 - result["flops_per_token"] / summary["flops_per_token_fixed"]
    assert ("multiply-adds saved compared with fixed spans of S = 37", f"{100 * saved:.0f} %") in headlines
    assert not [name for name, _ in headlines if "fetching" in name]
    assert "Fetching text took" in page
    for note in FOOTNOTES:
        assert page.count(escape(note)) == 1
    for name in FIGURES:
        assert f'<figure id="{name}">' in page
        assert (target / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (target / f"{name}.svg").stat().st_size < 300_000
        assert rows_of(target / f"{name}.csv")
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page), "asks for something from outside"
    identifiers = re.findall(r'\bid="([^"]+)"', page)
    assert len(identifiers) == len(set(identifiers))
    assert f"{result['dev_bits']:.3f}" in page

    logged = [json.loads(line) for line in (run / "spans.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [5, 10, 15, 20]
    history = rows_of(target / "span_history.csv")
    last = [float(row["span_positions"]) for row in history if row["step"] == "20"]
    assert_allclose(last, np.minimum(np.ravel(logged[-1]["z_LH"]) + CONFIG.span.ramp, CONFIG.span.limit))

    before = {path.name: path.read_bytes() for path in target.iterdir()}
    assert report_command.report(run, "latest") == 0
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before, "not the same twice"


def check_sample(page):
    """A prompt of dev that is told apart from what the model wrote after it."""
    prompt = page.locator("#sample pre .prompt")
    assert len(prompt.inner_text()) > 30
    assert len(page.locator("#sample pre").inner_text()) > len(prompt.inner_text()) + 300
    behind = "element => getComputedStyle(element).backgroundColor"
    assert prompt.evaluate(behind) != page.locator("#sample pre").evaluate(behind)


def check_tables(page, narrow):
    """Bits are seen without scrolling; if there is more, the page says so."""
    for heading in page.locator("th", has_text=re.compile(r"^\w+$")).all():
        assert heading.evaluate(LINES) == 1, f"{heading.inner_text()} is broken within the word"
    for table in page.locator(".wide").all():
        edge = table.bounding_box()
        for heading in table.locator("th", has_text="bits").all():
            box = heading.bounding_box()
            assert box["x"] + box["width"] <= edge["x"] + edge["width"], heading.inner_text()
        cue = table.locator("xpath=preceding-sibling::p[contains(@class, 'cue')]")
        scrolls = table.evaluate("element => element.scrollWidth > element.clientWidth")
        assert (cue.count() > 0 and cue.is_visible()) == scrolls
    assert page.locator(".cue:visible").count() == (2 if narrow else 0)


def test_a_run_on_enwik8_stands_in_its_table(run, tmp_path):
    """And what a model writes is text, not HTML."""
    summary = json.loads((run / "report" / "summary.json").read_text())
    sample = {"prompt": "<b>&", "continuation": "</pre><i>", "temperature": 0.8, "source": "dev"}
    summary |= {"corpus": "enwik8", "sample": sample}
    row = Row("this run (adaptive, S = 1024)", 8, 123.0, 6.5e6, 8e6, 1.31, 1.2942)
    html = report_page.page(summary, [], [], tables("enwik8", row))
    (tmp_path / "index.html").write_text(html)
    assert "Table 2: enwik8" in html
    assert "text8" not in html
    assert "orientation" not in html
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 360, "height": 800})
        page.goto((tmp_path / "index.html").as_uri())
        assert page.locator("#sample pre").inner_text() == "<b>&</pre><i>"
        edge = page.locator(".wide").bounding_box()
        for value in ("1.31", "1.294"):
            box = page.locator("tr.run td", has_text=re.compile(f"^{value}$")).bounding_box()
            assert box["x"] + box["width"] <= edge["x"] + edge["width"]
        assert page.locator(".cue").is_visible()


def test_page_looks_right_on_phone_and_desk_in_light_and_dark(run):
    address = (run / "report" / "index.html").as_uri()

    with chromium() as browser:
        seen = {}
        for width, scheme in ((360, "light"), (360, "dark"), (1280, "light")):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            messages, requests = [], []
            page.on("console", lambda message, to=messages: to.append(message.text))
            page.on("pageerror", lambda error, to=messages: to.append(str(error)))
            page.on("request", lambda request, to=requests: to.append(request.url))
            page.goto(address)
            assert messages == []
            assert [url for url in requests if not url.startswith("data:")] == [address]
            assert page.evaluate("document.scrollingElement.scrollWidth <= window.innerWidth"), "wider than the screen"
            assert page.locator(".concern").is_visible()
            for name in FIGURES:
                figure = page.locator(f"figure#{name} > svg")
                assert figure.is_visible(), name
                assert figure.get_attribute("aria-label")
                box = figure.bounding_box()
                assert box
                assert box["width"] > 250
                assert box["height"] > 100
                assert colors(figure.screenshot()) > 20, f"{name} is blank"
                assert page.locator(f"figure#{name} text").first.evaluate(CONTRAST) > 7, name
            assert page.locator("tr.run").count() == 0, "the run has not read the tables' text"
            assert "This run was trained on stdlib" in page.locator(".apart").inner_text()
            check_sample(page)
            check_tables(page, narrow=width == 360)
            seen[width, scheme] = page.screenshot(full_page=True)
            assert colors(seen[width, scheme]) > 100
            page.close()
    means = {view: float(matplotlib.image.imread(io.BytesIO(png))[..., :3].mean()) for view, png in seen.items()}
    assert means[360, "light"] > 0.8
    assert means[360, "dark"] < 0.3


@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_a_model_whose_numbers_are_not_finite_has_a_report(value, tmp_path, one_device):
    """Parameters that are not finite, or so large that nothing after them is; logs with what training may write."""
    config = tiny_config(model={"attention": "plain"})
    text = corpora.load(config.data)
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, value, leaf.dtype),
        jax.eval_shape(lambda: transformer.init(config, len(text.vocabulary), jax.random.key(0))),
    )
    params = jax.device_get(span.project(params))
    bad = [[None, 1.0]] * 3
    (tmp_path / "spans.jsonl").write_text("".join(json.dumps({"step": step, "z_LH": bad}) + "\n" for step in (1, 2)))
    lines = [{"step": 1, "train_bits": float("nan"), "penalty_nats": 1.0}, {"step": 2, "dev_bits": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    z_LH = cache_plan.largest_z(config, params)
    page = report.write_report(config, tmp_path, text, params, 2, z_LH).read_text()
    assert "No sample" in page
    for reason in ("no span is finite", "no head has finite attention weights"):
        assert (reason in page) == np.isnan(value), reason

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    summary = json.loads((tmp_path / "report" / "summary.json").read_text(), parse_constant=refuse)
    assert summary["dev_bits"] is None
    assert (summary["average_span"] is summary["flops_per_token"] is None) == np.isnan(value)
