"""Between two readings of a clock, a function calls something that waits for the device.

A kernel and an NCCL collective return to the host before they have begun, and `Work.wait()` holds
back the stream, not the host: a clock around them alone tells how long it takes to ask.
"""

import ast
from collections.abc import Iterator

import pytest

from course.lessons import LESSONS, ROOT, file_of_tests
from course.shared_code import plumbing_of

CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns"}
WAITS = {"synchronize", "item", "tolist", "cpu", "elapsed_time"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """All that runs when the function does: nothing of the functions that are defined in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, FUNCTIONS):
            yield node
            yield from own_nodes(node)


def called(node: ast.AST) -> str:
    """The last part of the name of what a call calls; empty if this is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def waits_for_the_device(node: ast.AST, patient: set[str]) -> bool:
    """A call of WAITS, or of `f` or `self.f` where f is one of the file's own `patient`."""
    if called(node) in WAITS:
        return True
    if called(node) not in patient:
        return False
    owner = getattr(node.func, "value", None)
    return owner is None or getattr(owner, "id", "") == "self"


def reads_a_clock(node: ast.AST, clocks: set[str]) -> bool:
    name = called(node)
    if name == "time":
        return isinstance(node.func, ast.Attribute)  # time.time()
    return name in clocks


def impatient(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each function that stops a clock and has not waited."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    bodies = {function: list(own_nodes(function)) for function in functions}
    clocks = set(CLOCKS)
    patient: set[str] = set()
    for _ in range(5):  # functions that call functions that wait
        for function, nodes in bodies.items():
            if any(waits_for_the_device(node, patient) for node in nodes):
                patient.add(function.name)
            only_returns = [type(line) for line in function.body] == [ast.Return]
            if only_returns and any(reads_a_clock(node, clocks) for node in nodes):
                clocks.add(function.name)
    for function, nodes in bodies.items():
        readings = [node.lineno for node in nodes if reads_a_clock(node, clocks)]
        waits = [node.lineno for node in nodes if waits_for_the_device(node, patient)]
        if len(readings) > 1:
            first = min(readings)
            last = max(readings)
            if not any(first <= line <= last for line in waits):
                yield first, function.name


def spared(lesson: str) -> set[str]:
    """The functions that NO_DEVICE in the lesson's file of tests names: {function: why}."""
    for node in ast.parse(file_of_tests(lesson).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NO_DEVICE":
            return {*ast.literal_eval(node.value)}
    return set()


def test_no_clock_stops_before_the_device() -> None:
    wrong = []
    for lesson in LESSONS:
        source = (ROOT / lesson).read_text().removesuffix(plumbing_of(lesson))
        found = dict((name, line) for line, name in impatient(source))
        for name in found.keys() - spared(lesson):
            wrong.append(f"{lesson}:{found[name]}: {name} does not wait for the device")
        for name in spared(lesson) - found.keys():
            wrong.append(f"{lesson}: NO_DEVICE names {name}, which waits, or is no more")
    assert not wrong, "\n".join(wrong)


WAITING = """
def start(): return time.perf_counter()

def settled(x):
    torch.cuda.synchronize()

def timed(x):
    begin = start()
    dist.all_reduce(x).wait()
    settled(x)
    return time.perf_counter() - begin
"""


def test_a_clock_that_waits_is_right() -> None:
    assert list(impatient(WAITING)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    settled(x)\n", ""),
        ("    torch.cuda.synchronize()\n", "    x.wait()\n"),
        ("    settled(x)\n", "    x.settled()\n"),  # of something else
        ("    begin", "    settled(x)\n    begin"),  # too early, if it is all
    ],
)
def test_a_clock_that_does_not_wait_is_found(old: str, new: str) -> None:
    changed = WAITING.replace(old, new)
    if old == "    begin":
        changed = changed.replace("wait()\n    settled(x)\n", "wait()\n")
    assert [name for _, name in impatient(changed)] == ["timed"]
