"""What makes Python hard to read aloud, found on the syntax tree."""

import ast
from collections.abc import Iterator
from itertools import chain

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NO_OPS = {"id", "int", "float", "str", "bool", "len", "print", "type"}


def tricks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong there)."""
    for node in ast.walk(tree):
        for rule, found in RULES.items():
            if found(node):
                yield node.lineno, rule


def walrus_in_a_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return contain(ast.NamedExpr, *node.args, *(keyword.value for keyword in node.keywords))


def contain(kinds: type | tuple[type, ...], *nodes: ast.AST) -> bool:
    """Whether any of the nodes, or any node below them, is of one of these kinds."""
    below = chain.from_iterable(ast.walk(node) for node in nodes)
    return any(isinstance(node, kinds) for node in below)


def unrelated_names_bound_at_once(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    if not isinstance(node.targets[0], ast.Tuple):
        return False
    names = {target.id for target in node.targets[0].elts if isinstance(target, ast.Name)}
    used = {sub.id for sub in ast.walk(node.value) if isinstance(sub, ast.Name)}
    plain = (ast.Constant, ast.Name, ast.UnaryOp)
    swaps = bool(names & used)
    return not swaps and not all(isinstance(value, plain) for value in node.value.elts)


def expression_for_its_effect(node: ast.AST) -> bool:
    effects = (ast.IfExp, ast.BoolOp, ast.Tuple, *COMPREHENSIONS)
    return isinstance(node, ast.Expr) and isinstance(node.value, effects)


def two_loops_in_a_comprehension(node: ast.AST) -> bool:
    return isinstance(node, COMPREHENSIONS) and len(node.generators) > 1


def comprehension_in_a_comprehension(node: ast.AST) -> bool:
    if not isinstance(node, COMPREHENSIONS):
        return False
    made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    return contain((ast.ListComp, ast.SetComp, ast.DictComp), *made)


def sequence_times_truth(node: ast.AST) -> bool:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = [node.left, node.right]
    return any(map(is_sequence, sides)) and any(map(is_truth, sides))


def is_sequence(node: ast.AST) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, (ast.List, ast.JoinedStr))


def is_truth(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "bool"
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return negated or isinstance(node, (ast.Compare, ast.BoolOp))


def builtin_that_does_nothing(node: ast.AST) -> bool:
    """`work: Callable = id`: a built-in as the default of a callback."""
    if isinstance(node, ast.IfExp) and isinstance(node.orelse, ast.Name):
        return node.orelse.id in NO_OPS
    if not isinstance(node, ast.arguments):
        return False
    defaults = [*node.defaults, *(default for default in node.kw_defaults if default)]
    return any(isinstance(one, ast.Name) and one.id in NO_OPS for one in defaults)


def getattr_called_at_once(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Call)):
        return False
    return getattr(node.func.func, "id", "") == "getattr"


def conditional_in_a_conditional(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return contain(ast.IfExp, node.test, node.body, node.orelse)


RULES = {
    ":= inside a call's arguments": walrus_in_a_call,
    "one statement binds unrelated names": unrelated_names_bound_at_once,
    "an expression used as a statement": expression_for_its_effect,
    "a comprehension with two fors": two_loops_in_a_comprehension,
    "a comprehension inside a comprehension": comprehension_in_a_comprehension,
    "a sequence multiplied by a truth value": sequence_times_truth,
    "a built-in as a no-op": builtin_that_does_nothing,
    "getattr(...)() chain": getattr_called_at_once,
    "a conditional inside a conditional": conditional_in_a_conditional,
}
