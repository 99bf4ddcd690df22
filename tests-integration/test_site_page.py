"""Pages of the site in a headless browser, on a desktop's and a phone's width: search, tables, code, ways from home.

nox -s docs                                                          # builds the site, then runs this
python -m pytest tests-integration/test_site_page.py --site site     # on a site that is built
"""

from pathlib import Path

import pytest
from browser_helpers import chromium, served
from repository_helpers import ROOT

READ = ("index", "start/index", "start/fsdp", "move/megatron-datasets", "move/fsdp2", "errors/fsdp", "figures")
CODE = "[...document.querySelectorAll('.language-python code')].every(one => getComputedStyle(one).whiteSpace == 'pre')"
WIDTHS = "[...document.querySelectorAll('table')].map(one => [one.scrollWidth, one.closest('article').clientWidth])[0]"
WAIT_MS = 60_000  # the first search makes its index; a busy machine takes a while


@pytest.fixture(scope="module")
def folder(request):
    site = request.config.getoption("--site") or (request.config.getoption("--whole-site") and ROOT / "site")
    if not site:
        pytest.skip("needs the built site: nox -s docs, or --site FOLDER")
    return Path(site).resolve()


@pytest.fixture(scope="module")
def browser(folder):
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as address:
        yield address


def page_of(browser, width):
    page = browser.new_context(viewport={"width": width, "height": 800}).new_page()
    page.set_default_timeout(WAIT_MS)
    return page


@pytest.mark.parametrize("opened", ["served", "as a file"])
def test_search_finds_an_error_by_words_of_its_message(browser, folder, address, opened):
    page = page_of(browser, 1280)
    page.goto(f"{address if opened == 'served' else folder.as_uri()}/start/index.html")
    page.click("input.md-search__input")
    page.keyboard.type("ranks used units in different orders")
    # A locator: the list is made anew with each letter that has been looked for.
    page.locator("a.md-search-result__link[href*='#ranks-used-units-in-different-orders']").first.click()
    page.wait_for_url("**/errors/fsdp.html?*#ranks-used-units-in-different-orders")
    page.context.close()


@pytest.mark.parametrize("width", [1280, 360])
def test_a_page_is_not_wider_than_the_window_and_long_code_scrolls(browser, address, width):
    page = page_of(browser, width)
    for name in READ:
        page.goto(f"{address}/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        # One line of a program is one line on the page, whatever its length.
        assert page.evaluate(CODE), name
    page.context.close()


def test_the_table_of_figures_is_whole_on_a_desktop(browser, address):
    page = page_of(browser, 1280)
    page.goto(f"{address}/figures.html")
    table, room = page.evaluate(WIDTHS)
    assert table <= room
    page.context.close()


def test_the_home_page_leads_to_every_section(browser, address):
    page = page_of(browser, 1280)
    page.goto(f"{address}/index.html")
    targets = page.evaluate("[...document.querySelectorAll('article a')].map(one => one.getAttribute('href'))")
    sections = ("start", "move", "do", "understand", "errors", "reference")
    assert {f"{name}/index.html" for name in sections} | {"explorer.html", "figures.html"} <= set(targets)
    page.context.close()
