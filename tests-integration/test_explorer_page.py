"""The schedule explorer's page in a headless browser, on a desktop's and a phone's width, light and dark.

nox -s docs                                                             # builds the site, then runs this
python -m pytest tests-integration/test_explorer_page.py --site site    # on a site that is built
                                                         --pictures     # writes docs/explorer/*.png anew

What the page shows is compared with what ``tools/explorer/answer.py`` gives here, in an ordinary Python.
"""

import sys
from pathlib import Path

import pytest
from browser_helpers import chromium, served
from repository_helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "packages" / "pipeline" / "src"))  # of which nothing here needs torch

from explorer.answer import answer, export, menu
from explorer.examples import EXAMPLES
from explorer.request import OWN, Request

LOAD_MS = 120_000  # Python's first start in a browser, on a busy machine
ANSWER_MS = 60_000
SIZES = {"desktop": (1280, 800, "light"), "phone": (360, 740, "dark")}
DEADLOCK = EXAMPLES["sends that cross: a deadlock"]


class Explorer:
    """One open page, and what was asked of any server meanwhile."""

    def __init__(self, browser, address, size, **more):
        width, height, scheme = SIZES[size]
        touch = size == "phone"
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=touch, **more
        )
        self.page, self.address = self.context.new_page(), address
        self.asked, self.errors = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(error.message))
        self.page.set_default_timeout(ANSWER_MS)

    def open(self, state=""):
        """Open the page at a state of its address, and wait for the answer."""
        if self.page.url.startswith("http"):
            self.page.goto("about:blank")
        self.page.goto(f"{self.address}/explorer.html{state}")
        self.settled(LOAD_MS)

    def go(self, state):
        """Change the address of the page that is open; waits for the answer."""
        self.page.evaluate("state => { location.hash = state }", state)
        self.settled()

    def settled(self, timeout=ANSWER_MS):
        # Controls wait a moment before they ask; then the result is busy until the answer is there.
        self.page.wait_for_timeout(300)
        self.page.wait_for_selector("#sx-result[aria-busy=false]", timeout=timeout)

    def text(self, selector):
        return self.page.inner_text(selector)

    def figures(self):
        names, values = self.page.locator("#sx-figures dt"), self.page.locator("#sx-figures dd")
        return dict(zip(names.all_inner_texts(), map(float, values.all_inner_texts()), strict=True))


@pytest.fixture(scope="module")
def site(request):
    site = request.config.getoption("--site") or (request.config.getoption("--whole-site") and ROOT / "site")
    if not site:
        pytest.skip("needs the built site: nox -s docs, or --site FOLDER")
    if not (Path(site) / "explorer" / "pyodide").exists():
        pytest.skip("the site is built without the runtime of Python: npm fetches it")
    with served(Path(site)) as address:
        yield address


@pytest.fixture(scope="module")
def browser(site):
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module", params=SIZES)
def opened(browser, site, request):
    """A page of each size, loaded once."""
    explorer = Explorer(browser, site, request.param)
    explorer.open()
    yield explorer
    explorer.context.close()


@pytest.fixture
def explorer(opened):
    opened.go("schedule=zb_v")
    yield opened
    assert opened.errors == []


def shown(request):
    return {name.replace("_", " "): float(f"{value:.6g}") for name, value in answer(request)["figures"].items()}


def test_the_page_begins_with_the_figures_and_the_picture_of_the_package(explorer):
    found = answer(Request())
    assert explorer.figures() == shown(Request())
    assert explorer.page.locator("#sx-picture rect.sx-act").count() == len(found["words"])
    assert explorer.page.text_content("#sx-text") == found["text"]
    assert explorer.page.text_content("#sx-command") == found["command"]
    assert "Proved" in explorer.text("#sx-verdict")


def test_every_schedule_is_offered(explorer):
    names = explorer.page.eval_on_selector_all("#sx-schedule option", "found => found.map(option => option.value)")
    assert names == [entry["name"] for entry in menu()["schedules"]]


def test_nothing_comes_from_elsewhere(explorer):
    assert explorer.asked
    outside = [url for url in explorer.asked if not url.startswith((explorer.address, "data:", "blob:", "about:"))]
    assert outside == []


def test_the_page_is_as_wide_as_its_window(explorer):
    for state in ("schedule=zb_v&ranks=8", "schedule=own&program=0F0,0B1"):
        explorer.go(state)
        assert explorer.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_slider_moved_by_keys_is_answered_and_kept_in_the_address(explorer):
    explorer.page.focus("#sx-ranks")
    explorer.page.keyboard.press("ArrowRight")
    explorer.settled()
    assert explorer.figures() == shown(Request(ranks=5))
    assert explorer.page.locator("#sx-memory tbody tr").count() == 5
    assert explorer.page.evaluate("location.hash") == "#ranks=5"


def test_of_many_movements_the_last_is_shown(explorer):
    explorer.page.evaluate(
        """() => { const control = document.getElementById("sx-microbatches");
        for (let m = 9; m <= 30; m++) {
          control.value = m;
          control.dispatchEvent(new Event("input", {bubbles: true}));
        } }"""
    )
    explorer.settled()
    assert explorer.figures() == shown(Request(microbatches=30))


@pytest.mark.sampled(1)
def test_a_link_opens_what_it_was_made_of(explorer):
    state = "schedule=interleaved&ranks=3&microbatches=7&chunks=3&forward=1.5&hop=0.25&memory_cap=4"
    explorer.open(f"#{state}")
    request = Request(schedule="interleaved", ranks=3, microbatches=7, chunks=3, forward=1.5, hop=0.25, memory_cap=4)
    assert explorer.figures() == shown(request)
    assert explorer.page.evaluate("location.hash") == f"#{state}"
    assert explorer.text("#sx-memory tbody").count("over the cap") == sum(r["over"] for r in answer(request)["ranks"])
    assert answer(request)["verdict"]["error"] in explorer.page.text_content("#sx-verdict")


def test_keys_go_from_action_to_action_and_say_what_each_waits_for(explorer):
    said = answer(Request())["words"]
    explorer.page.focus("#sx-picture")
    met = []
    for key in ("Home", "ArrowRight", "ArrowDown", "End", "ArrowLeft"):
        explorer.page.keyboard.press(key)
        met.append(explorer.text("#sx-action").split(":")[0])
        assert explorer.text("#sx-action") == said[met[-1]]
        assert explorer.text(".sx-tip") == said[met[-1]]
    assert met[:2] == ["0F0", "0F1"]
    assert [met[2][0], met[3], met[4]] == ["1", "1W7", "6W7"]
    explorer.page.keyboard.press("Escape")
    assert explorer.page.locator(".sx-tip").count() == 0


def test_pointing_at_an_action_says_what_it_is(explorer, opened):
    box = explorer.page.locator("rect[data-action='0F2']")
    box.scroll_into_view_if_needed()
    (box.tap if opened.page.evaluate("navigator.maxTouchPoints") else box.hover)(position={"x": 4, "y": 4})
    assert explorer.text(".sx-tip") == answer(Request())["words"]["0F2"]


def test_a_pasted_deadlock_is_shown_with_its_counter_example(explorer):
    explorer.page.select_option("#sx-schedule", OWN)
    explorer.page.fill("#sx-program", DEADLOCK)
    explorer.settled()
    verdict = answer(Request(schedule=OWN, program=DEADLOCK))["verdict"]
    assert verdict["error"] in explorer.page.text_content("#sx-verdict")
    assert explorer.page.locator("#sx-marked .wrong text").all_text_contents() == ["0SEND_F1", "1SEND_B0"]
    assert explorer.page.locator("#sx-marked .wait").count() == 2
    assert not explorer.page.is_visible("#sx-picture")
    explorer.open(explorer.page.evaluate("location.hash"))
    assert explorer.page.input_value("#sx-program") == DEADLOCK
    assert verdict["error"] in explorer.page.text_content("#sx-verdict")


def test_a_pasted_program_that_is_right_is_timed(explorer):
    program = EXAMPLES["1F1B, right"]
    explorer.page.select_option("#sx-schedule", OWN)
    explorer.page.select_option("#sx-example", "1F1B, right")
    explorer.settled()
    assert explorer.figures() == shown(Request(schedule=OWN, program=program))


def test_what_a_schedule_refuses_is_said_in_its_own_words(explorer):
    explorer.go("schedule=pipedream_2bw&ranks=8&microbatches=2")
    with pytest.raises(ValueError, match="microbatches") as refused:
        answer(Request(schedule="pipedream_2bw", ranks=8, microbatches=2))
    assert f"ScheduleError: {refused.value}" in explorer.page.text_content("#sx-verdict")


@pytest.mark.parametrize("state", ["ranks=99", "microbatches=x", "colour=1", "schedule=none"])
def test_a_link_to_what_cannot_be_is_refused_and_not_bent(explorer, state):
    explorer.go(state)
    assert "ScheduleError" in explorer.text("#sx-verdict")
    assert state.split("=")[0] in explorer.text("#sx-verdict")
    assert not explorer.page.is_visible("#sx-picture")


def test_a_saved_file_is_the_packages(explorer):
    explorer.page.select_option("#sx-form", "lowered")
    with explorer.page.expect_download() as begun:
        explorer.page.click("#sx-save")
    file = export(Request(), "lowered")
    assert begun.value.suggested_filename == file["file"]
    assert Path(begun.value.path()).read_bytes().decode() == file["content"]


def test_all_schedules_are_compared_and_one_is_chosen(explorer):
    explorer.page.click("#sx-compare")
    explorer.page.wait_for_selector("#sx-compared:not([hidden])")
    explorer.page.click("#sx-compared a:text-is('v_half')")
    explorer.settled()
    assert explorer.figures() == shown(Request(schedule="v_half"))


@pytest.mark.sampled(1)
def test_controls_answer_while_python_searches(explorer):
    explorer.page.evaluate("window.turns = 0; window.clock = setInterval(() => window.turns++, 20)")
    explorer.go("schedule=plan&ranks=6&microbatches=12&memory_cap=4")
    assert explorer.page.evaluate("clearInterval(window.clock), window.turns") > 20
    figures = explorer.figures()
    assert figures["no order is below"] <= figures["makespan"]


def test_every_control_has_a_name(explorer):
    for state in ("schedule=zb_v", "schedule=own"):
        explorer.go(state)
        nameless = explorer.page.evaluate(
            """() => [...document.querySelectorAll("#explorer :is(input, select, textarea, button, [tabindex])")]
            .filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map(e => e.id)"""
        )
        assert nameless == []


def test_words_keep_their_contrast(explorer):
    """Of the page's own colours; those of the picture are the package's, and its tests'."""
    ratios = explorer.page.evaluate(
        """() => {
        const paint = (...colours) => { const c = document.createElement("canvas").getContext("2d");
          for (const colour of ["white", ...colours]) { c.fillStyle = colour; c.fillRect(0, 0, 1, 1); }
          return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); };
        const linear = (v) => v <= 10 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4;
        const light = (...css) => paint(...css).map(linear)
          .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
        const behind = (e) => { for (; e; e = e.parentElement) { const b = getComputedStyle(e).backgroundColor;
          if (!/, 0\\)$|transparent/.test(b)) return b; } return "white"; };
        return ["#sx-status", "#sx-summary", "#sx-verdict strong", "#sx-figures dt", "#sx-compare", "#sx-with"]
          .map((place) => { const e = document.querySelector(place);
            const pair = [light(behind(e), getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
            return [place, (pair[0] + .05) / (pair[1] + .05)]; });
        }"""
    )
    assert all(ratio >= 4.5 for _, ratio in ratios), ratios


def test_without_its_runtime_the_page_says_so(browser, site):
    explorer = Explorer(browser, site, "desktop")
    explorer.page.route("**/pyodide.mjs", lambda route: route.fulfill(status=404))
    explorer.page.goto(f"{site}/explorer.html")
    explorer.page.wait_for_function(
        "document.getElementById('sx-status').textContent.startsWith('Python did not answer')"
    )
    assert explorer.page.is_visible("#sx-drawn img")  # a schedule that was drawn beforehand
    assert "nox -s docs" in explorer.text("#sx-status")
    explorer.context.close()


def test_opened_as_a_file_the_page_says_what_to_do(browser, site, request):
    explorer = Explorer(browser, site, "desktop")
    folder = Path(request.config.getoption("--site") or ROOT / "site")
    explorer.page.goto((folder / "explorer.html").resolve().as_uri())
    assert "python -m http.server -d site" in explorer.text("#sx-status")
    assert explorer.page.is_visible("#sx-drawn img")
    assert explorer.errors == []
    explorer.context.close()


def test_a_question_that_takes_too_long_is_given_up_and_the_next_is_answered(browser, site):
    explorer = Explorer(browser, site, "desktop")
    explorer.page.clock.install()
    explorer.open()
    # The question is lost on its way: Python would answer it in two seconds, on a busy machine before one looks.
    explorer.page.evaluate(
        "() => { window.kept = Worker.prototype.postMessage; Worker.prototype.postMessage = () => {} }"
    )
    explorer.page.evaluate("location.hash = 'schedule=plan&ranks=8&microbatches=20'")
    explorer.page.wait_for_function("document.getElementById('sx-status').textContent.startsWith('Searching')")
    explorer.page.clock.fast_forward(31_000)
    assert "No answer within 30 s" in explorer.text("#sx-status")
    explorer.page.evaluate("() => { Worker.prototype.postMessage = window.kept }")
    explorer.go("schedule=gpipe")
    assert explorer.figures() == shown(Request(schedule="gpipe"))
    explorer.context.close()


@pytest.mark.parametrize("size", SIZES)
def test_pictures_of_the_page(browser, site, size, request):
    """The two in the documentation, written anew with --pictures."""
    if not request.config.getoption("--pictures"):
        pytest.skip("writes docs/explorer/*.png with --pictures")
    explorer = Explorer(browser, site, size, device_scale_factor=1)
    explorer.page.set_viewport_size({"width": SIZES[size][0], "height": 1100})
    explorer.open("#schedule=zb_v&memory_cap=4" if size == "desktop" else f"#{OWN_LINK}")
    if size == "desktop":
        explorer.page.focus("#sx-picture")
        for key in ("Home", "ArrowDown", *["ArrowRight"] * 12):
            explorer.page.keyboard.press(key)
    else:
        explorer.page.locator("#sx-own").scroll_into_view_if_needed()
        explorer.page.evaluate("document.getElementById('sx-own').scrollIntoView()")
    picture = ROOT / "docs" / "explorer" / f"{size}.png"
    explorer.page.screenshot(path=picture)
    image = pytest.importorskip("PIL.Image", reason="Pillow makes the pictures small")
    image.open(picture).quantize(96, dither=image.Dither.NONE).save(picture, optimize=True)
    explorer.context.close()


OWN_LINK = "schedule=own&program=" + DEADLOCK.replace("\n", "%0A")
