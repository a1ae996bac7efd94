"""What the repository says of itself: paths that exist, tables as measured, pinned versions."""

import ast
import os.path
import re
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from course import machines, outline, tables
from course.lessons import FOLDERS, LESSONS, ROOT
from course.outline import book
from course.shared_code import plumbing_of

TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
).stdout.split()
PATHS = re.compile(
    rf"\b(?:{'|'.join(FOLDERS)}|exercises|tests|course)/[\w./-]*\w|results/lessons/[\w./-]+\w"
)


def words_of(file: str) -> str:
    """What a file says in words: a document whole, of a program its comments and docstrings."""
    text = (ROOT / file).read_text()
    if not file.endswith(".py"):
        return text
    comments = re.findall(r"^\s*#.*|  #.*", text, re.M)
    return "\n".join([ast.get_docstring(ast.parse(text)) or "", *comments])


def test_every_path_that_is_named_exists() -> None:
    missing = []
    for file in [*LESSONS, *(f for f in TRACKED if f.endswith(".md"))]:
        text = words_of(file)
        missing += [(file, path) for path in PATHS.findall(text) if not named(path)]
        missing += [(file, link) for link in links_of(text) if not leads_somewhere(file, link)]
    assert missing == []


def links_of(text: str) -> list[str]:
    """The links to what is in this repository."""
    return [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]


def leads_somewhere(file: str, link: str) -> bool:
    """Whether a link in `file` names a path that is there, and a heading of that document."""
    path, _, anchor = link.partition("#")
    target = ROOT / os.path.dirname(file) / path if path else ROOT / file
    if not target.exists():
        return False
    return not anchor or anchor in anchors_of(target.read_text(encoding="utf-8"))


def anchors_of(document: str) -> set[str]:
    """What GitHub calls the headings of a document in links."""
    headings = re.findall(r"^#+ (.*)$", document, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_link_that_leads_nowhere_is_found() -> None:
    assert leads_somewhere("README.md", "results/README.md#on-gpus")
    assert not leads_somewhere("README.md", "results/README.md#on-gpu")
    assert not leads_somewhere("fsdp/README.md", "01_fsdp_basic.py")


def test_the_first_page_is_short_and_says_first_what_has_not_run() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 120] == []
    first = " ".join(lines[:10])
    assert "several GPUs" in first
    assert "`make gpu`" in first


def test_the_first_page_s_numbers_are_counted() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    hours = sum(lesson.minutes for lesson in outline.lessons()) / 60
    assert f"{len(LESSONS)} lessons ({hours:.0f} hours)" in text
    topics = (ROOT / "exercises/interview_topics.md").read_text(encoding="utf-8")
    questions = len(re.findall(r"^\*\*\d+\. ", topics, re.M))
    assert f" {questions} [interview questions]" in text
    assert f": {questions} questions, answered]" in text
    assert f" {len(book())} exercises: " in text
    rows = tables.ledger_of("profiling/05_memory.py")["ledger"]
    counted = {row["claim"]: row["measured"] for row in rows if row["verdict"] == "PASS"}
    many, few = peak(counted, "many tokens"), peak(counted, "few tokens")
    saved = "4 micro-batches: saves, per P"
    less = counted[f"many tokens, {saved}"] * many["parameters"] / 4 / sum(many.values())
    more = -counted[f"few tokens, {saved}"] * few["parameters"] / 4 / sum(few.values())
    fixed = 1 - (few["activations"] + few["work"]) / sum(few.values())
    front = (ROOT / "site/front.md.in").read_text(encoding="utf-8")
    for said in (f"peak by {less:.0%}.", f"lower one's by {more:.0%}"):
        assert said in text
        assert said in front
    assert f"there: {fixed:.0%} are" in text
    sent = counted["shard: bytes sent / the plain step's"] - 1
    assert f"sharding sends {sent:.0%} more" in text


def peak(counted: dict[str, float], job: str) -> dict[str, float]:
    """The kB of each category at a job's peak."""
    found = {}
    for claim, kilobytes in counted.items():
        if named := re.fullmatch(rf"{job}: (\w+) at the peak, in kB", claim):
            found[named[1]] = kilobytes
    return found


def test_each_lesson_names_the_next_one() -> None:
    """The check of the machine, then the spine; then the others, folder by folder."""
    order = outline.lessons()
    spine = [lesson for lesson in order if lesson.spine]
    first, *deeper = [lesson for lesson in order if not lesson.spine]
    assert order == [first, *spine, *deeper]
    assert [lesson.folder for lesson in deeper] == sorted(
        [lesson.folder for lesson in deeper], key=FOLDERS.index
    )
    lost = []
    stems = {lesson.file.stem for lesson in order}
    for lesson, following in pairwise(order):
        words = re.findall(r"\w+", lesson.docstring.partition("**Next.**")[2])
        if following.file.stem != next((word for word in words if word in stems), None):
            lost.append(f"{lesson.name} leads to {following.name}, and its Next does not say so")
    assert not lost, "\n".join(lost)


def test_each_finding_names_a_row_that_passed() -> None:
    text = (ROOT / "results/README.md").read_text(encoding="utf-8")
    findings = re.findall(r"^\d+\. (.*?)(?=^\S|\n\n)", text, re.M | re.S)
    assert len(findings) == 10
    for finding in findings:
        words = " ".join(finding.split())
        lesson, claim = re.search(r"\]\(\.\./([\w/-]+\.py)\), \"(.+)\"\.$", words).groups()
        rows = {row["claim"]: row for row in tables.ledger_of(lesson)["ledger"]}
        assert rows[claim]["verdict"] == "PASS", words
        assert rows[claim]["kind"] == "measured", words


INVENTED = ("parallelism/12", "exercises/20_all_to_all")  # CONTRIBUTING's examples
INVENTED += ("tests/lessons/FOLDER", "tests/passed.txt")  # the latter is made by make test-all


def named(path: str) -> bool:
    """Whether this is a path, or a lesson's folder and number, as in communication/03."""
    if path.startswith(INVENTED):
        return True
    return (ROOT / path).exists() or bool(
        re.search(r"/\d\d\w*$", path) and [*ROOT.glob(f"{path}*")]
    )


@pytest.mark.parametrize("readme", tables.READMES, ids=lambda path: str(path.parent.name))
def test_tables_are_made_of_what_was_measured(readme: Path) -> None:
    assert readme.read_text() == tables.written(readme), "run: make results"


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_was_measured_and_says_what_waits_for_gpus(lesson: str) -> None:
    """README's table reads the ledger measured on CPUs; here it is held to the source."""
    assert tables.ledger_of(lesson)["seconds"], f"make results ONLY={lesson}"
    source = (ROOT / lesson).read_text().removesuffix(plumbing_of(lesson))
    assert source in tables.told_of_gpus(lesson), "run: course write tables"
    said = re.findall(r"(?:Not run|Run) on several\s\w+", source)
    assert len(said) == 1, "Not run on several GPUs"
    declared = set(re.findall(r"\bneeds=\"(\d+ GPUs?)\b", source))
    waiting = machines.only_on_gpus(lesson)
    assert {machines.wanted(needs) for needs in declared} == set(waiting)
    if waiting:
        assert re.search(r"torch\.cuda|== \"cuda\"|is_cuda", source), "code that runs there"


def test_a_machine_s_page_is_made_of_its_ledgers() -> None:
    for machine in machines.machines():
        others = [other for other in machines.machines() if other != machine]
        text = (machine.folder / "README.md").read_text()
        assert text == machines.page(machine, others), "run: course write tables"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_s_readme_names_its_lessons_and_figures(folder: str) -> None:
    """And it shows a figure."""
    text = (ROOT / folder / "README.md").read_text()
    for lesson in LESSONS:
        if lesson.startswith(f"{folder}/"):
            name = Path(lesson).name
            assert f"({name})" in text, name
            figure = lesson.replace("/", "_").removesuffix(".py") + ".png"
            if (ROOT / "results/lessons" / figure).exists():
                assert f"../results/lessons/{figure}" in text, figure
    shown = re.findall(r"^!\[(.+)\]\(\.\./results/lessons/.+\)$", text, re.M)
    assert shown, "no figure"
    assert all(len(words) > 20 for words in shown), "words for those who do not see it"


def test_core_needs_no_compiler_and_ci_pins_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[><=]", need)[0] for need in project["dependencies"]}
    assert core.isdisjoint({"ffcv", "deepspeed"})
    pinned = {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = [need for extra in project["optional-dependencies"].values() for need in extra]
    wanted = core | {re.split(r"[\[><=]", need)[0] for need in extras}
    assert wanted - pinned <= {"setuptools"}


def test_nothing_here_speaks_of_how_it_was_made() -> None:
    forbidden = ["../" + "shared", "/" + "work/", "/" + "root/", "py" + "pi.org"]
    forbidden += ["skeleton" + ".py", "help" + "er A", "sub" + "agent"]
    for file in TRACKED:
        path = ROOT / file
        if path.suffix in (".py", ".md", ".toml", ".txt", ".json", ".sh", "") and path.is_file():
            text = path.read_text(errors="replace")
            assert not [word for word in forbidden if word in text], file
