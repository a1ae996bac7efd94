"""The planner's formulas in JavaScript, made from course/plan.py, so that there is one source.

It knows the Python that those files use, and refuses the rest with file and line. NumPy's functions
become those of numbers: a page plans one layout at a time. tests/site/test_site.py holds a thousand
results against the Python.
"""

import ast
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# static/planner.js has these for one layout; the data come as JSON.
LEFT_OUT = {"layers_of_stages", "stages_by_cost", "known_models", "known_gpus", "DATA"}
WANTED = {  # of each file these names; None: all others
    "course/plan.py": None,
    "course/planning.py": "CONTEXT HEADROOM OPTIMIZERS FORMULAS NOT_MODELED room broken_rules "
    "alternatives link",
    "course/plan_emit.py": None,
    "course/plan_command.py": "words",
}

# Python's own, for numbers, lists and objects.
PRELUDE = """\
"use strict";
const np = { maximum: Math.max, minimum: Math.min, inf: Infinity };
np.where = (is, a, b) => (is ? a : b);
const listed = (x) => (x[Symbol.iterator] ? [...x] : Object.keys(x));
const max = (...x) => (x.length === 1 ? Math.max(...x[0]) : Math.max(...x));
const min = (...x) => (x.length === 1 ? Math.min(...x[0]) : Math.min(...x));
const sum = (x) => listed(x).reduce((total, one) => total + one, 0);
const len = (x) => listed(x).length;
const list = listed;
const bool = Boolean;
const str = (x) => (x === true ? "True" : x === false ? "False" : String(x));
const either = (a, b) => (typeof a === "object" ? { ...a, ...b } : a | b);
const getattr = (x, name) => x[name];
const contains = (x, all) => (Array.isArray(all) ? all.includes(x) : x in all);
const get = (x, key, otherwise) => x[key] ?? otherwise;
const SimpleNamespace = (x) => x;
const json = { dumps: (x) => JSON.stringify(x, null, 2) };
function range(...given) {
  const [from, to, step] = given.length === 1 ? [0, given[0], 1] : [...given, 1];
  const found = [];
  for (let x = from; step > 0 ? x < to : x > to; x += step) found.push(x);
  return found;
}
"""
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%", ast.Pow: "**"}
OPERATORS |= {ast.BitAnd: "&", ast.Eq: "===", ast.NotEq: "!==", ast.Lt: "<"}
OPERATORS |= {ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.And: "&&", ast.Or: "||"}
OPERATORS |= {ast.USub: "-", ast.Not: "!"}
METHODS = {"append": "push", "lower": "toLowerCase", "endswith": "endsWith"}


class Translator:
    """Python's statements and expressions as JavaScript."""

    def __init__(self, path: str, arguments: dict[str, list[str]]) -> None:
        self.path = path
        self.arguments = arguments  # of the functions that are called with names

    def refuse(self, node: ast.AST) -> None:
        place = f"{self.path}:{node.lineno}"
        raise NotImplementedError(f"{place}: site/translate.py does not know {ast.unparse(node)}")

    # Statements

    def statement(self, node: ast.stmt) -> str:
        translate = getattr(self, f"do_{type(node).__name__}", self.refuse)
        return translate(node) or ""

    def block(self, body: list[ast.stmt]) -> str:
        return "{\n" + "\n".join(map(self.statement, body)) + "\n}"

    def do_FunctionDef(self, node: ast.FunctionDef) -> str:
        names = [one.arg for one in node.args.args]
        defaults = [None] * (len(names) - len(node.args.defaults)) + node.args.defaults
        said = []
        for name, default in zip(names, defaults, strict=True):
            said.append(f"{name} = {self.value(default)}" if default else name)
        assigned = sorted(names_bound(node) - {*names})
        declared = f"let {', '.join(assigned)};\n" if assigned else ""
        body = "\n".join(map(self.statement, node.body))
        return f"function {node.name}({', '.join(said)}) {{\n{declared}{body}\n}}"

    def do_ClassDef(self, node: ast.ClassDef) -> str:
        """A NamedTuple: its defaults."""
        fields = []
        for one in node.body:
            if isinstance(one, ast.AnnAssign):
                value = self.value(one.value) if one.value else "undefined"
                fields.append(f"{one.target.id}: {value}")
        usual = f"{{ {', '.join(fields)} }}"
        return f"const {node.name} = (x) => ({{ ...{usual}, ...x }});"

    def do_Return(self, node: ast.Return) -> str:
        return f"return {self.value(node.value)};"

    def do_Assign(self, node: ast.Assign) -> str:
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(target.elts[-2], ast.Starred):
            *first, starred, last = target.elts  # only the last may be ...starred in JavaScript
            rest = self.value(starred.value)
            names = ", ".join([*map(self.value, first), f"...{rest}"])
            return f"[{names}] = {self.value(node.value)};\n{self.value(last)} = {rest}.pop();"
        return f"{self.target(node.targets[0])} = {self.value(node.value)};"

    def do_AugAssign(self, node: ast.AugAssign) -> str:
        if isinstance(node.value, ast.List):  # a list grows
            return f"{self.value(node.target)}.push(...{self.value(node.value)});"
        sum_ = ast.BinOp(node.target, node.op, node.value)
        return f"{self.value(node.target)} = {self.value(sum_)};"

    def do_Expr(self, node: ast.Expr) -> str:
        return "" if isinstance(node.value, ast.Constant) else f"{self.value(node.value)};"

    def do_If(self, node: ast.If) -> str:
        otherwise = f" else {self.block(node.orelse)}" if node.orelse else ""
        return f"if ({self.value(node.test)}) {self.block(node.body)}{otherwise}"

    def do_For(self, node: ast.For) -> str:
        each = f"{self.target(node.target)} of listed({self.value(node.iter)})"
        return f"for ({each}) {self.block(node.body)}"

    def do_Raise(self, node: ast.Raise) -> str:
        return f"throw new Error({self.value(node.exc.args[0])});"

    def do_ImportFrom(self, node: ast.ImportFrom) -> str:
        return ""

    do_Import = do_ImportFrom

    # Expressions

    def value(self, node: ast.expr) -> str:
        translate = getattr(self, f"of_{type(node).__name__}", self.refuse)
        return translate(node)

    def target(self, node: ast.expr) -> str:
        if isinstance(node, ast.Tuple):
            return f"[{', '.join(map(self.target, node.elts))}]"
        if isinstance(node, ast.Name) and node.id == "_":
            return ""
        return self.value(node)

    def of_Constant(self, node: ast.Constant) -> str:
        if node.value is None:
            return "null"
        if isinstance(node.value, bool):
            return str(node.value).lower()
        return json.dumps(node.value)

    def of_Name(self, node: ast.Name) -> str:
        return node.id

    def of_Attribute(self, node: ast.Attribute) -> str:
        return f"{self.value(node.value)}.{node.attr}"

    def of_Subscript(self, node: ast.Subscript) -> str:
        whole = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            return f"Object.values({whole}).slice(0, {self.value(node.slice.upper)})"
        return f"{whole}[{self.value(node.slice)}]"

    def of_Tuple(self, node: ast.Tuple) -> str:
        return f"[{', '.join(map(self.value, node.elts))}]"

    of_List = of_Tuple

    def of_Starred(self, node: ast.Starred) -> str:
        return f"...{self.value(node.value)}"

    def of_Dict(self, node: ast.Dict) -> str:
        pairs = zip(node.keys, node.values, strict=True)
        return "({" + ", ".join(f"[{self.value(k)}]: {self.value(v)}" for k, v in pairs) + "})"

    def of_IfExp(self, node: ast.IfExp) -> str:
        parts = [self.value(one) for one in (node.test, node.body, node.orelse)]
        return "({} ? {} : {})".format(*parts)

    def of_UnaryOp(self, node: ast.UnaryOp) -> str:
        return f"({OPERATORS[type(node.op)]}{self.value(node.operand)})"

    def of_BoolOp(self, node: ast.BoolOp) -> str:
        return "(" + f" {OPERATORS[type(node.op)]} ".join(map(self.value, node.values)) + ")"

    def of_BinOp(self, node: ast.BinOp) -> str:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Mult) and left.startswith('"'):  # a text, so many times
            return f"{left}.repeat({right})"
        if isinstance(node.op, ast.BitOr):  # of truths, or of dicts
            return f"either({left}, {right})"
        if isinstance(node.op, ast.FloorDiv):
            return f"Math.floor({left} / {right})"
        return f"({left} {OPERATORS[type(node.op)]} {right})"

    def of_Compare(self, node: ast.Compare) -> str:
        parts = []
        values = [self.value(one) for one in (node.left, *node.comparators)]
        for left, op, right in zip(values, node.ops, values[1:], strict=False):
            if isinstance(op, ast.In | ast.NotIn):
                not_ = "!" if isinstance(op, ast.NotIn) else ""
                parts.append(f"{not_}contains({left}, {right})")
            else:
                parts.append(f"{left} {OPERATORS[type(op)]} {right}")
        return f"({' && '.join(parts)})"

    def of_JoinedStr(self, node: ast.JoinedStr) -> str:
        parts = []
        for one in node.values:
            value = self.value(one.value) if isinstance(one, ast.FormattedValue) else ""
            if not value:
                parts.append(json.dumps(one.value))
            elif one.format_spec is None:
                parts.append(f"str({value})")
            elif ast.unparse(one.format_spec) == "f'.0f'":
                parts.append(f"({value}).toFixed(0)")
            else:
                self.refuse(one)
        return "(" + " + ".join(parts or ['""']) + ")"

    def of_ListComp(self, node: ast.ListComp) -> str:
        (loop,) = node.generators
        found = f"listed({self.value(loop.iter)})"
        each = f"({self.target(loop.target)})"
        for test in loop.ifs:
            found += f".filter({each} => {self.value(test)})"
        return f"{found}.map({each} => {self.value(node.elt)})"

    of_GeneratorExp = of_ListComp

    def of_DictComp(self, node: ast.DictComp) -> str:
        (loop,) = node.generators
        pair = f"[{self.value(node.key)}, {self.value(node.value)}]"
        each = f"listed({self.value(loop.iter)}).map(({self.target(loop.target)}) => {pair})"
        return f"Object.fromEntries({each})"

    def of_Call(self, node: ast.Call) -> str:
        given = [self.value(one) for one in node.args]
        called = self.value(node.func)
        if isinstance(node.func, ast.Attribute) and not called.startswith(("np.", "json.")):
            return self.method(node, given)
        named = {one.arg: self.value(one.value) for one in node.keywords}
        if named and called in self.arguments:
            order = self.arguments[called][len(given) :]
            given += [named.get(name, "undefined") for name in order]
        elif named:
            given.append("{ " + ", ".join(f"{k}: {v}" for k, v in named.items()) + " }")
        return f"{called}({', '.join(given)})"

    def method(self, node: ast.Call, given: list[str]) -> str:
        name = node.func.attr
        whole = self.value(node.func.value)
        if name in ("items", "values", "keys"):
            return f"Object.{name.replace('items', 'entries')}({whole})"
        if name == "get":
            return f"get({', '.join([whole, *given])})"
        if name == "join":
            return f"listed({given[0]}).join({whole})"
        if name not in METHODS:
            self.refuse(node)
        return f"{whole}.{METHODS[name]}({', '.join(given)})"


def names_bound(function: ast.FunctionDef) -> set[str]:
    """What a function assigns, inner functions apart."""
    found = set()
    waiting = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id != "_":
            found.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return found


def name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign):
        return node.targets[0].id
    return getattr(node, "name", "")


def data() -> str:
    """The models and GPUs that the planner knows by name; those that see images apart."""
    folder = ROOT / "course/plan_data"
    models = json.loads((folder / "models.json").read_text(encoding="utf-8"))
    models = {name: one for name, one in models.items() if one.get("model_type") != "resnet"}
    gpus = json.loads((folder / "gpus.json").read_text(encoding="utf-8"))
    return f"const MODELS = {json.dumps(models)};\nconst GPUS = {json.dumps(gpus)};"


def javascript() -> str:
    """All of it, in one script."""
    trees = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in WANTED}
    arguments = {}
    for tree in trees.values():
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        arguments |= {one.name: [argument.arg for argument in one.args.args] for one in functions}
    parts = [PRELUDE]
    for path, tree in trees.items():
        translator = Translator(path, arguments)
        wanted = WANTED[path].split() if WANTED[path] else {*map(name_of, tree.body)} - LEFT_OUT
        for node in tree.body:
            if name_of(node) and name_of(node) in wanted:
                const = "const " if isinstance(node, ast.Assign) else ""
                parts.append(const + translator.statement(node))
    return "\n\n".join([*parts, data()]) + "\n"
