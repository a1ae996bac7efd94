"""The site as a reader has it: made by `make site`, opened as files in Chromium.

What has changed in a lesson is seen by test_pages.py on each change, and here at night; what has
changed in site/ is seen here at the gate, too.
"""

import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from urllib.parse import unquote

import pytest

from course import outline
from course.lessons import ROOT
from course.plan import (
    Job,
    Layout,
    Model,
    known_gpus,
    known_models,
    memory,
    mfu,
    read_config,
    seconds,
)
from course.plan_command import words
from course.plan_emit import WRITERS, settings
from course.planning import (
    OPTIMIZERS,
    Cluster,
    all_layouts,
    best,
    broken_rules,
    cheapest_change,
    chosen,
    evaluate,
    why_not,
)
from tests.site.chromium import Chromium, program

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

SITE = ROOT / "build/site"
READ = ("site/conf.py", "site/pages.py", "site/front.md.in", "site/static", "course/lessons.toml")
READ += ("site/translate.py", "site/planner.md.in", "course/plan_data/gpus.json")
READ += ("site/browser.sh", "course/plan_data/models.json")
READ += ("site/requirements.txt", "site/requirements-test.txt", "course/terminal.py")
AXE = ".venv-site/lib/python*/site-packages/axe_playwright_python/axe.min.js"
LESSON = "parallelism/07_pipeline_schedules.html"  # with questions, rows, printed grids, a figure


@pytest.fixture(scope="session")
def site() -> Path:
    """The pages, as they are now; one process at a time makes them."""
    assert all((ROOT / path).exists() for path in READ)
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build/site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            ["make", "site", ".venv-site/browser"], cwd=ROOT, capture_output=True, text=True
        )
    assert made.returncode == 0, made.stdout + made.stderr
    return SITE


@pytest.fixture(scope="module")
def chromium(site: Path) -> Iterator[Chromium]:
    if program() is None:
        pytest.skip("needs Chromium: sudo apt install chromium")
    started = Chromium()
    yield started
    started.close()


@pytest.fixture
def browser(chromium: Chromium) -> Iterator[Chromium]:
    """A browser that knows no answer yet; in the end, what it said and asked for is judged."""
    chromium.look(1280)
    chromium.open(address("LICENSE.html"))
    chromium.run("localStorage.clear()")
    chromium.errors.clear()
    chromium.requests.clear()
    yield chromium
    assert chromium.errors == []
    asked = {request.partition(":")[0] for request in chromium.requests}
    assert asked <= {"file", "data"}, "a request left this machine"


def address(page: str) -> str:
    path, mark, fragment = page.partition("#")
    return (SITE / path).as_uri() + mark + fragment


class Anchors(HTMLParser):
    """What a page has names for, what it links to, and what it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.names |= {said["id"]} if said.get("id") else set()
        if tag == "a" and said.get("href"):
            self.links.append(said["href"])
        elif tag == "link" and said.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(said["href"])
        elif said.get("src"):
            self.loads.append(said["src"])


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Anchors(path) for path in site.rglob("*.html")}
    lost = []
    for page, anchors in pages.items():
        for link in [*anchors.links, *anchors.loads]:
            if re.match(r"https?:|mailto:", link) and link in anchors.links:
                continue
            path, _, name = unquote(link.partition("?")[0]).partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.is_file() or (name and name not in pages[target].names):
                lost.append(f"{page.relative_to(site)}: {link}")
    assert len(pages) > len(outline.lessons()) + len(outline.book())
    assert lost == []


def test_next_leads_through_everything_and_no_page_is_wider_than_a_telephone(
    browser: Chromium, site: Path
) -> None:
    """From the front page to the end, in reading order; then the pages that no list names."""
    browser.look(360, 740)
    browser.open(address("index.html"))
    seen = []
    wide = []

    def look_at_this_page() -> None:
        seen.append(browser.run("location.pathname").partition("/build/site/")[2])
        width = browser.run("document.documentElement.scrollWidth")
        if width > 360:
            wide.append(f"{seen[-1]}: {width}")

    look_at_this_page()
    while following := browser.run("document.querySelector('a.next-page')?.href"):
        here = browser.run("location.href")
        browser.open(following)
        assert browser.run("document.querySelector('a.prev-page')?.href") == here
        look_at_this_page()
    order = [lesson.path.replace(".py", ".html") for lesson in outline.lessons()]
    order += [f"exercises/{one.name}/README.html" for one in outline.book()]
    assert [page for page in seen if page in order] == order
    for page in {str(path.relative_to(site)) for path in site.rglob("*.html")} - {*seen}:
        browser.open(address(page))
        look_at_this_page()
    assert wide == []


def shown(what: str) -> str:
    """Whether all that this selector finds can be seen."""
    return f"[...document.querySelectorAll({what!r})].every((one) => one.checkVisibility())"


def answer(number: int, text: str) -> str:
    question = f"document.querySelector('#question-{number}')"
    return f"""
        {question}.querySelector("input").value = {text!r};
        {question}.querySelector("form").requestSubmit();
    """


def test_a_row_is_covered_until_its_question_is_settled(browser: Chromium) -> None:
    browser.open(address(LESSON))
    values = "tr[data-question='{}'] .value"
    for hidden in (values.format(1), values.format(2), "pre.printed", ".covered img", ".seen"):
        assert not browser.run(shown(hidden)), hidden
    browser.run(answer(1, "about 0.6"))
    assert browser.run(shown(values.format(1)))
    assert not browser.run(shown(values.format(2)))
    said = browser.run("document.querySelector('#question-1 .comparison').innerText")
    for expected in ("about 0.6", "0.75", "Three quarters"):
        assert expected in said
    assert not browser.run(shown(".seen"))
    give_up = "document.querySelectorAll('.question form button[type=button]')"
    browser.run(f"{give_up}.forEach((one) => one.click())")
    for visible in (values.format(2), values.format(3), "pre.printed", ".covered img", ".seen"):
        assert browser.run(shown(visible)), visible
    assert "gave up" in browser.run("document.querySelector('#question-2 .comparison').innerText")


def test_an_answer_is_kept_in_this_browser_and_forgotten_when_asked(browser: Chromium) -> None:
    browser.open(address(LESSON))
    browser.run(answer(1, "0.5"))
    browser.open(address("index.html"))
    browser.open(address(LESSON))
    assert (
        browser.run("document.querySelector('tr[data-question=\"1\"]').cells[1].innerText") == "0.5"
    )
    assert browser.run("JSON.parse(localStorage['predictions of parallelism/07'])") == {"1": "0.5"}
    browser.run("document.querySelectorAll('.choices button')[1].click()")  # Forget my answers
    assert not browser.run(shown("tr[data-question='1'] .value"))


def test_an_empty_answer_uncovers_nothing_and_a_choice_uncovers_every_page(
    browser: Chromium,
) -> None:
    browser.open(address(LESSON))
    browser.run(answer(1, ""))
    assert not browser.run(shown("tr[data-question='1'] .value"))
    browser.run("document.querySelector('#uncovered').click()")
    browser.open(address("parallelism/09_pipeline_deadlocks.html"))
    assert browser.run(shown("tr[data-question] .value"))
    assert browser.run(shown("pre.printed"))


def test_the_search_finds_a_lesson(browser: Chromium) -> None:
    browser.open(address("index.html"))
    browser.run("""
        document.querySelector(".sidebar-search").value = "DAPPLE";
        document.querySelector(".sidebar-search").form.submit();
    """)
    browser.until("document.querySelectorAll('#search-results li a').length")
    found = browser.run("[...document.querySelectorAll('#search-results li a')].map((a) => a.href)")
    assert any(LESSON in link for link in found)


PAGES = ("index.html", LESSON, "exercises/11_pipeline_micro_batches/README.html", "paths.html")
PAGES += ("parallelism/README.html", "results/README.html", "search.html", "planner.html")
PAGES += ("README.html", "launch/README.html", "benchmarks/README.html")
PAGES += ("exercises/interview_topics.html", "launch/fsdp_surviving.py.html")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_axe_finds_no_violation(browser: Chromium, width: int, scheme: str) -> None:
    (axe,) = ROOT.glob(AXE)
    browser.look(width, scheme=scheme)
    found = []
    for page in PAGES:
        browser.open(address(page))
        if page == LESSON:
            browser.run(answer(1, "0.5"))
        browser.run(axe.read_text(encoding="utf-8") + "; true")
        for broken in browser.run("axe.run({preload: false}).then((told) => told.violations)"):
            nodes = [node["html"][:120] for node in broken["nodes"][:3]]
            found.append(f"{page}: {broken['id']}: {nodes}")
    assert not found, "\n".join(found)


# The planner


def random_case(random: Random) -> dict:
    """A model, a GPU, a job and a layout; whether it could run does not matter."""
    layout = {"dp": 2 ** random.randrange(7), "tp": 2 ** random.randrange(5)}
    layout |= {"pp": random.choice([1, 2, 3, 4, 8, 16]), "cp": 2 ** random.randrange(3)}
    layout |= {"ep": 2 ** random.randrange(6), "micro_batch": 2 ** random.randrange(4)}
    layout |= {"chunks": random.choice([1, 2, 4]), "zero": random.randrange(4)}
    layout["recompute"] = random.randrange(3)
    batch = layout["dp"] * layout["micro_batch"] * 2 ** random.randrange(6)
    job = {"sequence": 4096 * 2 ** random.randrange(3), "batch": batch}
    job |= {"state_bytes": random.choice([*OPTIMIZERS.values()]), "lora": random.choice([0, 16])}
    job |= {"compute": random.choice(["bf16", "fp8"]), "offload": random.random() < 0.2}
    job |= {"schedule": random.choice(["1f1b", "gpipe", "zb-h1"]), "hide": random.random() < 0.5}
    models = [name for name, one in known_models().items() if "hidden_size" in one]
    case = {"model": random.choice(models), "gpu": random.choice([*known_gpus()])}
    return case | {"job": job, "layout": layout}


def test_the_planner_s_formulas_equal_the_python_for_a_thousand_inputs(browser: Chromium) -> None:
    browser.open(address("planner.html"))
    random = Random(7)
    cases = [random_case(random) for _ in range(1000)]
    ours = browser.run(f"""{json.dumps(cases)}.map((one) => {{
        const model = read_config(MODELS[one.model]);
        const job = Job(one.job);
        const broken = Object.values(broken_rules(model, job, one.layout)).map(Boolean);
        const time = seconds(model, job, one.layout, GPUS[one.gpu]);
        const pasted = {{}};
        for (const trainer of Object.keys(WRITERS)) {{
            try {{ pasted[trainer] = settings(trainer, model, one.layout, job); }}
            catch (error) {{ pasted[trainer] = error.message; }}
        }}
        const share = (how) => mfu(model, job.sequence, 1, 1e15, how);
        const held = memory(model, job, one.layout);
        return [held, time, broken, words(one.layout, job), pasted,
            {json.dumps(CONVENTIONS)}.map(share)];
    }})""")
    for case, (held, time, broken, said, pasted, shares) in zip(cases, ours, strict=True):
        model = read_config(known_models()[case["model"]])
        job = Job(**case["job"])
        layout = Layout(**case["layout"])
        gpu = known_gpus()[case["gpu"]]
        assert held == pytest.approx(numbers(memory(model, job, layout)), rel=1e-9), case
        assert time == pytest.approx(numbers(seconds(model, job, layout, gpu)), rel=1e-9), case
        assert broken == [bool(one) for one in broken_rules(model, job, layout).values()], case
        assert said == words(layout, job)
        assert pasted == pasted_settings(model, layout, job), case
        for how, share in zip(CONVENTIONS, shares, strict=True):
            assert share == pytest.approx(mfu(model, job.sequence, 1, 1e15, how), rel=1e-12), case


CONVENTIONS = ("causal", "full", "6N")


def pasted_settings(model: Model, layout: Layout, job: Job) -> dict[str, str]:
    """What each trainer gets, or why it gets nothing."""
    pasted = {}
    for trainer in WRITERS:
        try:
            pasted[trainer] = settings(trainer, model, layout, job)
        except ValueError as error:
            pasted[trainer] = str(error)
    return pasted


def numbers(parts: dict) -> dict[str, float]:
    return {name: float(value) for name, value in parts.items()}


SEARCHES = [("qwen3-30b-a3b", 8, "h100"), ("llama-70b", 64, "gb300"), ("deepseek-v3", 256, "b200")]
SEARCHES += [("llama-8b", 24, "a100"), ("gpt3-175b", 96, "l4"), ("llama-405b", 8, "h100")]


@pytest.mark.parametrize(("name", "gpus", "kind"), SEARCHES)
def test_the_form_finds_what_course_plan_finds(
    browser: Chromium, name: str, gpus: int, kind: str
) -> None:
    browser.open(address(f"planner.html#{name},{gpus},{kind}"))
    ours = browser.run("""(() => {
        const [model, job, cluster] = asked(fields_of(location.hash.slice(1)));
        const { count, first, others, why } = plan(model, job, cluster);
        const meshes = [first, ...others].filter(Boolean).map((one) => Object.values(one.layout));
        const pasted = {};
        for (const trainer of Object.keys(first ? WRITERS : {})) {
            try { pasted[trainer] = settings(trainer, model, first.layout, job); }
            catch (error) { pasted[trainer] = error.message; }
        }
        return { count, meshes, why, pasted };
    })()""")
    cluster = Cluster(gpus, known_gpus()[kind])
    model = read_config(known_models()[name])
    job = Job(batch=max(gpus, 1024), reserve=cluster.gpu.reserve)
    layouts = all_layouts(model, job, cluster)
    planned = evaluate(model, job, layouts, cluster)
    if not planned.fits.any():
        planned = planned._replace(fits=planned.tight)
    found = best(planned)
    why = why_not(model, job, planned, cluster, found[0]) if found else []
    meshes = [list(chosen(layouts, at)) for at in found]
    pasted = pasted_settings(model, chosen(layouts, found[0]), job) if found else {}
    expected = {"count": len(layouts.dp), "meshes": meshes, "why": why, "pasted": pasted}
    assert ours == expected
    text = browser.run("document.getElementById('plan').innerText")
    for line in why if found else ["does not fit"]:
        assert line in text
    if not found:  # the command adds its flag in brackets
        assert cheapest_change(model, job, cluster).partition(" (--")[0] in text


def test_a_plan_s_address_holds_all_of_its_fields(browser: Chromium) -> None:
    fragment = "deepseek-v3,256,gb300,21d,tokens15000,price2.5,s8192,b2048,lora8"
    fragment += ",muon,fp8,gpipe,offload"
    browser.open(address(f"planner.html#{fragment}"))
    assert browser.run("fragment_of(fields_of(location.hash.slice(1)))") == fragment
    assert browser.run("document.querySelector('[name=optimizer]').value") == "muon"
    assert browser.run("document.querySelector('[name=schedule]').value") == "gpipe"
    browser.run("""
        document.querySelector("[name=gpus]").value = "512";
        document.querySelector("[name=gpus]").dispatchEvent(new Event("change", { bubbles: true }));
    """)
    assert browser.run("location.hash") == "#" + fragment.replace("256", "512")
    browser.run("location.hash = '#nonsense,-3,%3Cb%3E,21d'")
    browser.until("document.querySelector('[name=model]').value == 'qwen3-30b-a3b'")
    usual = "qwen3-30b-a3b,8,h100,21d"
    assert browser.run("fragment_of(fields_of(location.hash.slice(1)))") == usual


def test_days_and_cost_are_the_command_s(browser: Chromium) -> None:
    command = [sys.executable, "-m", "course", "plan", "--model", "llama-8b", "--gpus", "64"]
    command += ["--gpu", "h100", "--tokens", "15T", "--price", "2.5", "--schedule", "zb-h1"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    days, cost = re.search(r" tokens: ([\d,.]+) days\ncost: ([\d,]+) at 2.5", said).groups()
    browser.open(address("planner.html#llama-8b,64,h100,tokens15000,price2.5,zb-h1"))
    text = browser.run("document.getElementById('plan').innerText")
    assert f"15000 billion tokens: {days} days" in text
    assert f"cost: {cost} at 2.5 per GPU-hour, for {days} days" in text
