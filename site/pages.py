"""Write the site's pages, as Markdown for Sphinx, from what lies in this repository: `make site`.

    python site/pages.py build/pages

Nothing is run. A lesson's page shows its prose, its code, and what its recorded run (results/) has
printed: each row of the ledger stands after the cell whose code claims it.
"""

import ast
import html
import json
import posixpath
import re
import sys
import textwrap
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "site")]

from translate import javascript

from course import outline
from course.book import Exercise
from course.lessons import FOLDERS, LESSONS
from course.outline import Lesson
from course.predict import readable

# The table of contents: chapters, their pages, and what these are called there. A folder's lessons
# stand below its README.
CHAPTERS = {
    "Lessons": {
        "spine.md": "The spine",
        "fundamentals/README.md": "Fundamentals",
        "communication/README.md": "Communication",
        "parallelism/README.md": "Parallelism",
        "fsdp/README.md": "FSDP and DeepSpeed",
        "profiling/README.md": "Profiling",
        "data-loading/README.md": "Data loading",
    },
    "Exercises": {
        "exercises/README.md": "Exercises",
        "exercises/interview_topics.md": "Interview questions",
    },
    "At work": {
        "paths.md": "Paths by goal",
        "planner.md": "Plan a run",
        "launch/README.md": "Launching training",
        "benchmarks/README.md": "Benchmarks",
        "results/README.md": "Findings and results",
    },
    "This course": {
        "README.md": "Install, and a first hour",
        "CONTRIBUTING.md": "Contributing",
        "AGENTS.md": "For AI assistants",
        "tests/README.md": "Tests",
    },
}
TRY = ("parallelism/07_pipeline_schedules.py", 1)  # the front page's question
LEXERS = {".py": "python", ".json": "json", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}

# A lesson or an exercise, as prose names it; and what prose may hold in which no name is a link.
NAME = rf"(?:exercises/\d\d_\w+|(?:{'|'.join(FOLDERS)})/\d\d(?:_\w+(?:\.py)?)?)"
FENCED = r"^(?P<fence>```+).*?^(?P=fence)"
OTHER = r"^ {4}[^\n]*$|\[[^]]*\]\([^)]*\)|<[^>\n]+>"
PROSE = re.compile(rf"{FENCED}|{OTHER}|(?P<code>`[^`]+`)|(?<![\w/.-]){NAME}(?![\w/-])", re.M | re.S)


# A lesson's cells, and what its recorded run printed at them


@dataclass(frozen=True)
class Cell:
    """A part of a lesson, as its `# %%` marks divide it."""

    prose: bool
    text: str  # of prose: without the "# " before each line
    lines: range  # its lines in the file, counted from 1


def cells_of(source: str) -> list[Cell]:
    """A lesson's cells; the first one holds what follows the docstring: imports and constants."""
    lines = source.split("\n")
    docstring_ends = source.split('"""')[1].count("\n")
    marks = [number for number, line in enumerate(lines) if line.startswith("# %%")]
    cells = []
    for start, end in pairwise([docstring_ends, *marks, len(lines)]):
        body = lines[start + 1 : end]
        prose = lines[start] == "# %% [markdown]"
        if prose:
            body = [re.sub(r"^# ?", "", line) for line in body]
        cells.append(Cell(prose, "\n".join(body).strip("\n"), range(start + 1, end + 1)))
    return cells


def calls_of(source: str) -> list[tuple[int, str]]:
    """Each call of `claim` or `blocked`: its line, and a pattern of the texts that it records."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("claim", "blocked"):
            found.append((node.lineno, pattern_of(node.args[0])))
    return found


def pattern_of(text: ast.expr) -> str:
    """A pattern of the values that this expression may have."""
    if isinstance(text, ast.Constant):
        return re.escape(text.value)
    if isinstance(text, ast.JoinedStr):
        return "".join(map(pattern_of, text.values))
    return ".*"


def line_of(row: dict, calls: list[tuple[int, str]]) -> int:
    """Where the lesson claims this row today: it may have been edited since it was recorded."""
    fitting = [line for line, pattern in calls if re.fullmatch(pattern, row["claim"])]
    lines = fitting or [line for line, _ in calls]  # it may be gone, until results are made anew
    return min(lines, key=lambda line: abs(line - row["line"]))


Piece = tuple[str, dict]  # what was printed before a row, and the row


def pieces_of(text: str, ledger: list[dict]) -> tuple[list[Piece], str]:
    """The rows, each with what was printed since the row before; and what came after the last."""
    text = re.sub(r"^ *claim  +predicted  +measured\n", "", text, flags=re.M)
    *before, last = re.split(r"^  (?:PASS|FAIL|BLOCKED) .*\n", text, flags=re.M)
    return list(zip(before, ledger, strict=True)), last


def recorded(lesson: str) -> tuple[str, list[Piece], str]:
    """Of the recorded run: what it ran on, its rows with what was printed before each, its end."""
    path = ROOT / "results/lessons" / lesson.replace("/", "_")
    if not path.with_suffix(".json").exists():
        return "Not recorded yet.", [], ""
    told = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    asked = outline.find_lesson(lesson).predict[1]
    for row in told["ledger"]:
        if row.get("question") not in asked:  # the lesson no longer asks it
            row["question"] = None
    first, _, rest = path.with_suffix(".txt").read_text(encoding="utf-8").partition("\n")
    pieces, last = pieces_of(rest, told["ledger"])
    return f"{first}. Recorded on {told['cpus']} CPU cores, {told['date']}.", pieces, last


def output(pieces: list[Piece]) -> str:
    """What a cell's claims printed, in HTML: text as it was, rows as tables."""
    parts = []
    rows = []
    for text, row in pieces:
        if text.strip():
            parts += [table(rows), printed(text)]
            rows = []
        rows.append(row)
    return joined(*parts, table(rows))


def printed(text: str) -> str:
    """Text that a lesson printed."""
    lines = html.escape(textwrap.dedent(text.strip("\n")), quote=False)
    return covered(f'<pre class="printed">\n{lines}\n</pre>', "What it printed") if lines else ""


def covered(inside: str, what: str) -> str:
    """Markdown or HTML that the page covers as long as a question is open (static/predict.js)."""
    cover = f'{what} stays covered until each <a href="#predict">question</a> is settled.'
    return f'<div class="covered">\n<p class="cover">{cover}</p>\n\n{inside}\n\n</div>'


def table(rows: list[dict]) -> str:
    """Rows of a ledger in HTML; those that answer a question have a place for the reader's own."""
    if not rows:
        return ""
    asked = any(row.get("question") for row in rows)
    titles = ["Claim", *(["Yours"] if asked else []), "Predicted", "Measured"]
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "\n".join(row_of(row, asked) for row in rows)
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="table-wrapper ledger"><table>\n{inside}\n</table></div>'


def row_of(row: dict, asked: bool) -> str:
    """One row of a ledger in HTML."""
    verdict = row["verdict"]
    claim = f'<b class="{verdict.lower()}">{verdict}</b> {html.escape(row["claim"])}'
    if verdict == "BLOCKED":
        return f'<tr><td>{claim}</td><td colspan="{2 + asked}">needs {row["needs"]}</td></tr>'
    marks = [row["kind"]] if row["kind"] != "measured" else []
    marks += ["timed"] if row["timed"] else []
    claim += "".join(f" <i>{mark}</i>" for mark in marks)
    slack = f" ±{row['slack']:.2g}" if row["slack"] else ""
    predicted = html.escape(f"{row['sign']} {readable(row['predicted'])}{slack}")
    measured = readable(row["measured"])
    number = row["question"]
    if not number:
        yours = "<td></td>" if asked else ""
        return f"<tr><td>{claim}</td>{yours}<td>{predicted}</td><td>{measured}</td></tr>"
    cells = f'<td>{claim} <a href="#question-{number}">question {number}</a></td><td></td>'
    for value in (predicted, measured):
        cells += f'<td><span class="cover">covered</span><span class="value">{value}</span></td>'
    return f'<tr data-question="{number}">{cells}</tr>'


# Markdown


def joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def fenced(text: str, lexer: str = "python") -> str:
    fence = "``````" if "```" in text else "```"
    return f"{fence}{lexer}\n{text.rstrip()}\n{fence}"


def folded(title: str, inside: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{inside}\n\n</details>"


def toctree(names: dict[str, str], caption: str = "") -> str:
    """A part of the table of contents: pages, and what they are called there if not by title."""
    lines = []
    for page, name in names.items():
        target = f"/{page.removesuffix('.md')}"
        lines.append(f"{name} <{target}>" if name else target)
    options = ":hidden:" + (f"\n:caption: {caption}" if caption else "")
    listed = "\n".join(lines)
    return f"```{{toctree}}\n{options}\n\n{listed}\n```" if names else ""


def block(name: str) -> str:
    """What README has between its marks of that name: a table made of what was measured."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0].strip()


def target_of(name: str) -> str:
    """The path of the lesson or the exercise that prose calls so; empty if there is none."""
    if name.startswith("exercises/"):
        return name if (ROOT / name).is_dir() else ""
    fits = [path for path in LESSONS if path.startswith(name)]
    return fits[0] if len(fits) == 1 else ""


def hours(lessons: list[Lesson]) -> str:
    return f"{sum(lesson.minutes for lesson in lessons) / 60:.0f}"


def questions(lesson: Lesson) -> str:
    """What a lesson asks, with a place for each question."""
    first, asked = lesson.predict
    parts = [first] + [question(number, text) for number, text in asked.items()]
    return f'<div class="predict" data-lesson="{lesson.name}">\n\n{joined(*parts)}\n\n</div>'


def question(number: int, text: str) -> str:
    place = f'<div class="question" id="question-{number}" data-question="{number}">'
    return f"{place}\n\n**{number}.** {text}\n\n</div>"


# Pages


class Pages:
    """All pages, by path, and the other files of the repository that they need."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.files: set[str] = set()
        self.linked: set[str] = set()  # pages that links lead to

    def make(self) -> None:
        for lesson in outline.lessons():
            self.texts[self.page_of(lesson.path)] = self.lesson(lesson)
        for exercise in outline.book():
            self.texts[f"exercises/{exercise.name}/README.md"] = self.exercise(exercise)
        self.texts |= {"spine.md": self.spine(), "paths.md": self.paths()}
        self.texts["planner.md"] = (ROOT / "site/planner.md.in").read_text(encoding="utf-8")
        documents = list(chain.from_iterable(CHAPTERS.values()))
        for folder in FOLDERS:
            documents += self.others(folder)
        for page in [*documents, "launch/aws/README.md"]:
            if page not in self.texts:
                self.texts[page] = self.document(page)
        self.texts["index.md"] = self.front()
        while missing := sorted(self.linked - {*self.texts}):
            for page in missing:
                self.texts[page] = self.orphan(page)

    def write(self, folder: Path) -> None:
        """Write what has changed, and delete what is no longer a page: Sphinx reads only that."""
        wanted = {page: text.encode() for page, text in self.texts.items()}
        wanted |= {file: (ROOT / file).read_bytes() for file in self.files}
        wanted["made/plan.js"] = javascript().encode()
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            if str(path.relative_to(folder)) not in wanted:
                path.unlink()
        for name, content in wanted.items():
            path = folder / name
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    # Links

    def page_of(self, path: str) -> str:
        """The page that shows a file or folder of the repository; a picture stands for itself."""
        if path.endswith(".png"):
            self.files.add(path)
            return path
        if (ROOT / path / "README.md").exists():
            path = posixpath.join(path, "README.md")
        page = path.removesuffix(".py") if path in LESSONS else path
        page = page if page.endswith(".md") else f"{page}.md"
        self.linked.add(page)
        return page

    def prose(self, text: str, page: str) -> str:
        """Text whose links lead to pages, and in which lessons and exercises are links."""

        def link(found: re.Match) -> str:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[1]))
            if not (ROOT / path).exists() and path not in self.texts:
                raise ValueError(f"{page} links to {path}, which is not there")
            return f"]({relative(self.page_of(path), page)}{found[2] or ''})"

        def sized(found: re.Match) -> str:
            path, width, words = found.groups()
            path = relative(self.page_of(posixpath.join(posixpath.dirname(page), path)), page)
            return f"```{{image}} {path}\n:width: {width}px\n:alt: {words}\n```"

        def named(found: re.Match) -> str:
            name = found["code"].strip("`") if found["code"] else found[0]
            target = target_of(name) if re.fullmatch(NAME, name) else ""
            return f"[{found[0]}]({relative(self.page_of(target), page)})" if target else found[0]

        text = re.sub(r'^<img src="(\S+)" width="(\d+)" alt="(.*)">$', sized, text, flags=re.M)
        text = re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", link, text)
        text = re.sub(r"^\+ ", r"\\+ ", text, flags=re.M)  # a sum goes on here, and no list begins
        return PROSE.sub(named, text)

    # Lessons and exercises

    def lesson(self, lesson: Lesson) -> str:
        page = self.page_of(lesson.path)
        source = lesson.file.read_text(encoding="utf-8")
        first, *cells = cells_of(source)
        about, pieces, last = recorded(lesson.path)
        calls = calls_of(source)
        at = [(line_of(row, calls), (text, row)) for text, row in pieces]
        plumbing = next(n for n, cell in enumerate(cells) if cell.text.startswith("## Plumbing"))
        parts = [self.asking(lesson, page, about)]
        parts.append(folded("Imports and constants", fenced(first.text)))
        for cell in cells[:plumbing]:
            parts.append(self.cell(cell, page))
            if "savefig(" in cell.text:
                parts.append(self.figure(lesson, page))
            parts.append(output([piece for line, piece in at if line in cell.lines]))
        parts.append(printed(last))
        rest = [fenced(cell.text) for cell in cells[plumbing:] if not cell.prose]
        parts.append(folded("Plumbing, the same in every lesson", joined(*rest)))
        return joined(*parts, self.afterwards(lesson, page))

    def cell(self, cell: Cell, page: str) -> str:
        if not cell.prose:
            return fenced(cell.text)
        if not cell.text.startswith("## What you should have seen"):
            return self.prose(cell.text, page)
        heading, _, answers = cell.text.partition("\n")
        answers = re.sub(r"^(\d+\. +\d+)\. ", r"\1\\. ", answers, flags=re.M)  # "96." is no list
        inside = f'<div class="seen">\n\n{self.prose(answers.strip(), page)}\n\n</div>'
        return joined(heading, covered(inside, "What you should have seen"))

    def asking(self, lesson: Lesson, page: str, about: str) -> str:
        """A lesson's docstring: its questions, each with a place, and how it is run."""
        before, _, rest = lesson.docstring.partition("**Predict**")
        _, after = re.split(r"\n\n(?=\*\*)", rest, maxsplit=1)
        title, _, asked = before.split("\n", 2)
        name = Path(lesson.path).name
        self.files.add(lesson.path)
        facts = f"{lesson.minutes} minutes · {lesson.folder} · {{download}}`{name} <{name}>`"
        ran = f'<p class="recorded">{html.escape(about)}</p>'
        asked = joined(self.prose(asked.strip(), page), "## Predict", questions(lesson))
        run = self.prose(after.removeprefix("**Run.**").lstrip("\n"), page)
        return joined(f"# {title}", facts, asked, "## Run it", run, ran)

    def figure(self, lesson: Lesson, page: str) -> str:
        """What a lesson drew, with the words that its folder's README has for it."""
        path = "results/lessons/" + lesson.path.replace("/", "_").replace(".py", ".png")
        if not (ROOT / path).exists():
            return ""
        readme = (ROOT / lesson.folder / "README.md").read_text(encoding="utf-8")
        words = re.search(rf"!\[([^]]+)\]\(\.\./{path}\)", readme)
        target = relative(self.page_of(path), page)
        return covered(f"![{words[1] if words else lesson.title}]({target})", "What it drew")

    def afterwards(self, lesson: Lesson, page: str) -> str:
        """The exercises to which a lesson leads."""
        items = []
        for one in outline.exercises_after(lesson):
            link = relative(f"exercises/{one.name}/README.md", page)
            items.append(f"- [{one.number:02d} {one.title}]({link})")
        return joined("## Exercises", "\n".join(items)) if items else ""

    def exercise(self, exercise: Exercise) -> str:
        """Task and hints, each hint folded; never the solution."""
        page = f"exercises/{exercise.name}/README.md"
        parts = [self.prose(exercise.readme.strip(), page), "## Hints"]
        for number, hint in enumerate(exercise.hints, 1):
            parts.append(folded(f"Hint {number}", self.prose(hint, page)))
        for lesson in outline.lessons():
            if exercise.name in lesson.exercises:
                link = relative(self.page_of(lesson.path), page)
                parts.append(f"The lesson before this: [{lesson.title}]({link}).")
        return joined(*parts)

    # Documents, and what leads to all these

    def document(self, page: str) -> str:
        """A README or another document, with the pages below it in the table of contents."""
        text = (ROOT / page).read_text(encoding="utf-8")
        return joined(self.prose(text.strip(), page), toctree(self.below(page)))

    def below(self, page: str) -> dict[str, str]:
        folder, _, name = page.rpartition("/")
        names = {}
        if page == "exercises/README.md":
            for one in outline.book():
                subject = one.title.partition(":")[0].replace("`", "")
                names[f"exercises/{one.name}/README.md"] = f"{one.number:02d} {subject}"
        elif page == "launch/README.md":
            names["launch/aws/README.md"] = ""
        elif name == "README.md" and folder in FOLDERS:
            for one in outline.lessons()[1:]:  # the first one leads the spine
                if one.folder == folder and not one.spine:
                    names[self.page_of(one.path)] = f"{one.number} {one.subject}"
            names |= dict.fromkeys(self.others(folder), "")
        return names

    def others(self, folder: str) -> list[str]:
        """A folder's documents, its README apart."""
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob("[a-z]*.md"))]

    def orphan(self, page: str) -> str:
        """A page for a file that some document links to, or for the files of such a folder."""
        header = "---\norphan: true\n---"
        path = ROOT / page
        if path.exists():
            return joined(header, self.prose(path.read_text(encoding="utf-8"), page))
        path = path.with_suffix("")
        parts = [header, f"# {page.removesuffix('.md')}"]
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            lexer = LEXERS.get(file.suffix, "none")
            parts += [f"## {file.name}"] if path.is_dir() else []
            parts.append(fenced(file.read_text(encoding="utf-8"), lexer))
        return joined(*parts)

    def spine(self) -> str:
        lessons = outline.lessons()
        path = [lessons[0], *(lesson for lesson in lessons if lesson.spine)]
        names = {self.page_of(one.path): f"{one.name} {one.subject}" for one in path}
        first = f"[Check your machine]({self.page_of(lessons[0].path)}) first, if you like."
        about = f"Six lessons on which the others build: {hours(path[1:])} hours. {first}"
        parts = ["# The spine", about, self.prose(block("spine"), "spine.md"), toctree(names)]
        return joined(*parts)

    def paths(self) -> str:
        """What a reader with one goal does, in order, and how long its lessons take."""
        parts = ["# Paths by goal", "Hours are those of the lessons; exercises come on top."]
        for path in outline.paths():
            parts.append(f"## {path.goal[0].upper()}{path.goal[1:]}")
            page = path.page.partition("#")[0].removesuffix("/README.md").removesuffix(".md")
            more = f"[{page}]({path.page})"
            parts.append(f"{path.hours} hours. To read along: {more}.")
            rows = ["| Step | Lesson or exercise | Minutes |", "|--:|---|--:|"]
            for number, step in enumerate(path.steps, 1):
                lesson = isinstance(step, Lesson)
                target = step.path if lesson else f"exercises/{step.name}"
                name = step.title if lesson else f"Exercise {step.number:02d}: {step.title}"
                minutes = step.minutes if lesson else ""
                rows.append(f"| {number} | [{name}]({target}) | {minutes} |")
            parts.append("\n".join(rows))
        return self.prose(joined(*parts), "paths.md")

    def goals(self) -> str:
        rows = ["| Your goal | Hours | Lessons | Exercises |", "|---|--:|--:|--:|"]
        for path in outline.paths():
            link = f"paths.md#{re.sub(r'[^a-z0-9 ]', '', path.goal.lower()).replace(' ', '-')}"
            n = len(path.lessons)
            cells = [f"[{path.goal}]({link})", path.hours, n, len(path.steps) - n]
            rows.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(rows)

    def front(self) -> str:
        """The first page: site/front.md.in, and what is counted."""
        lessons = outline.lessons()
        spine = [lesson for lesson in lessons if lesson.spine]
        ledgers = [recorded(lesson.path)[1] for lesson in lessons]
        topics = (ROOT / "exercises/interview_topics.md").read_text(encoding="utf-8")
        text = Template((ROOT / "site/front.md.in").read_text(encoding="utf-8")).substitute(
            lessons=len(lessons),
            hours=hours(lessons),
            exercises=len(outline.book()),
            questions=len(re.findall(r"^\*\*\d+\. ", topics, re.MULTILINE)),
            spine_hours=hours(spine),
            rows=f"{sum(map(len, ledgers)):,}",
            one=self.one_question(),
            goals=self.goals(),
            ran=block("ran"),
            spine=block("spine"),
            folders=block("folders"),
        )
        chapters = [toctree(pages, caption) for caption, pages in CHAPTERS.items()]
        return joined(self.prose(text, "index.md"), *chapters)

    def one_question(self) -> str:
        """A question of one lesson, to be tried at once, with the rows that answer it."""
        path, number = TRY
        lesson = outline.find_lesson(path)
        rows = [row for _, row in recorded(path)[1] if row.get("question") == number]
        first, asked = lesson.predict
        place = f'<div class="predict" data-lesson="{lesson.name}">'
        parts = [lesson.question, first, question(number, asked[number]), table(rows)]
        return joined(place, *parts, "</div>")


def main() -> None:
    folder = Path(sys.argv[1])
    pages = Pages()
    pages.make()
    pages.write(folder)
    print(f"{len(pages.texts)} pages in {folder}")


if __name__ == "__main__":
    main()
