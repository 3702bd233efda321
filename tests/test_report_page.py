"""The report in a real browser: on a phone and on a desk, in light and dark."""

import io
import os
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest

from adaptive_span_jax import train
from tests.conftest import tiny_config
from tests.test_report import FIGURES

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium-headless-shell"

# The contrast of an element's text to the card behind it, as defined by WCAG.
CONTRAST = """text => {
  const numbers = colour => colour.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const linear = x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const bright = colour => numbers(colour).map(linear).reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const card = getComputedStyle(text.closest('figure')).backgroundColor;
  const [low, high] = [bright(getComputedStyle(text).fill), bright(card)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""


def find_browser() -> str:
    """A Chromium, installed from Debian's packages where that is possible."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    if not shutil.which("apt-get") or os.geteuid():
        pytest.skip(f"there is no {' or '.join(BROWSERS)}, and only root on Debian can install one here")
    for command in (["update"], ["install", "--yes", "--no-install-recommends", PACKAGE]):
        done = subprocess.run(
            ["apt-get", "-o", "DPkg::Lock::Timeout=300", *command],
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.skip(f"Chromium could not be installed: {done.stderr.strip().splitlines()[-1:]}")
    path = shutil.which(PACKAGE)
    assert path
    return path


def colours(png: bytes) -> int:
    """How many different colours a screenshot has."""
    image = matplotlib.image.imread(io.BytesIO(png))
    return len(np.unique(image.reshape(-1, image.shape[-1]), axis=0))


@pytest.mark.slow
def test_page_looks_right_on_phone_and_desk_in_light_and_dark(tmp_path, one_device):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = find_browser()
    # A penalty this large is warned of, and a warning must fit the page as well.
    config = tiny_config(span={"kind": "dynamic", "penalty": 1.0}, train={"steps": 12}, log={"every_steps": 2})
    assert train.train(config, tmp_path, "command") == 0
    address = (tmp_path / "report" / "index.html").as_uri()

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
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
                assert colours(figure.screenshot()) > 20, f"{name} is blank"
                assert page.locator(f"figure#{name} text").first.evaluate(CONTRAST) > 7, name
            assert page.locator("tr.run").count() == 3
            seen[width, scheme] = page.screenshot(full_page=True)
            assert colours(seen[width, scheme]) > 100
            page.close()
        browser.close()
    means = {view: float(matplotlib.image.imread(io.BytesIO(png))[..., :3].mean()) for view, png in seen.items()}
    assert means[360, "light"] > 0.8
    assert means[360, "dark"] < 0.3
