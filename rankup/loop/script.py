"""The functions of the script that run its loop: their variables, and what its loops hand from one pass to the next."""

import ast
import inspect
import linecache
import os
import re
import sys
import sysconfig
import textwrap
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType, GeneratorType
from typing import Any, NamedTuple

OWN = (os.path.dirname(os.path.dirname(__file__)) + os.sep, sysconfig.get_path("stdlib") + os.sep)
INSTALLED = re.compile(r"^<frozen|[\\/](site|dist)-packages[\\/]")
CLOCK = re.compile(r"\b(time|perf_counter|monotonic|now|elapsed_time)\b")
LOOPS = (ast.For, ast.AsyncFor, ast.While)
PASSES = {"epochs", "batches", "steps"}  # the iterators of a job that make passes over a loop's body


class Scope(NamedTuple):
    """A function of the script, or its module, that waits for the code that looks at it. `line` is the current one."""

    variables: dict[str, Any]
    module: dict[str, Any]
    file: str
    line: int

    def value(self, name: str) -> Any:
        """Return what a dotted name holds, None if that is unknown. No property and no method of the user runs."""
        first, *rest = name.split(".")
        found = self.variables.get(first, self.module.get(first))
        for part in rest:
            found = attributes(found).get(part)
        return found


def in_library(file: str | None) -> bool:
    """Return whether this file belongs to rankup, to Python or to an installed package."""
    return not file or file.startswith(OWN) or INSTALLED.search(file) is not None


def of_library(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ != "__main__" and in_library(getattr(module, "__file__", None))


def intercepts(kind: type) -> bool:
    """Return whether even a look at an object of this class may run code of the user, as for a proxy or a mock."""
    return kind in weakref.ProxyTypes or any(
        isinstance(vars(each).get(name), FunctionType | property) for each in kind.__mro__
        for name in ("__getattribute__", "__class__")
    )


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes in an object's `__dict__`, {} if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def scopes() -> list[Scope]:
    """Return the functions of the script that have led to this call, the outermost first."""
    found, main = list[Scope](), vars(sys.modules["__main__"])
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not in_library(frame.f_code.co_filename):
            found.append(Scope(_variables(frame), frame.f_globals, frame.f_code.co_filename, frame.f_lineno))
        if frame.f_globals is main and frame.f_code.co_name == "<module>":
            break  # what started the script is not part of it
        frame = frame.f_back
    return found[::-1]


def _variables(frame: Any) -> dict[str, Any]:
    names = frame.f_locals
    found = {**names}
    # Until Python 3.12 a function's frame keeps this dict, and with it a batch and a graph. `locals()` returns the same
    # dict: if the script has kept it, a third reference shows that
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13) and sys.getrefcount(names) == 3:
        names.clear()
    return found


# What loops hand on -------------------------------------------------------------------------------------------


class Accesses(ast.NodeVisitor):
    """How code accesses variables, attributes and elements, in order of evaluation. `first`: whether the first access
    to each is a read. `assigned`: the values that the code assigns to each, None for one that is not written out."""

    def __init__(self, *code: ast.AST) -> None:
        self.first: dict[str, bool] = {}
        self.read: set[str] = set()
        self.assigned: dict[str, list[ast.expr | None]] = {}
        for each in code:
            self.visit(each)

    def handed_on(self) -> list[str]:
        """Return what the code reads before it assigns to it, so that a loop of this code hands it on."""
        return [
            name for name, is_read in self.first.items()
            if is_read and name in self.assigned and re.match(r"[\w.]+(\[|$)", name)
            and all(self.first.get(each, True) for each in _prefixes(name))
            and not all(map(self._tells_time, self.assigned[name]))
        ]

    def _tells_time(self, value: ast.expr | None) -> bool:
        values = self.assigned.get(value.id, [value]) if isinstance(value, ast.Name) else [value]
        return all(each is not None and CLOCK.search(ast.unparse(each)) for each in values)

    def _access(self, node: Any, value: ast.expr | None = None, *, read: bool = False) -> None:
        self.generic_visit(node)
        name = ast.unparse(node)
        if read or isinstance(node.ctx, ast.Load):
            self.first.setdefault(name, True)
            self.read.add(name)
        else:
            self.first.setdefault(name, False)
            self.assigned.setdefault(name, []).append(value)

    visit_Name = visit_Attribute = visit_Subscript = _access

    def visit_Assign(self, node: Any) -> None:
        if node.value is not None:
            self.visit(node.value)
            for each in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(each, ast.Name | ast.Attribute | ast.Subscript):
                    self._access(each, node.value)
                else:
                    self.visit(each)

    visit_AnnAssign = visit_NamedExpr = visit_Assign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._access(node.target, read=True)
        self.visit(node.value)
        self._access(node.target)

    def visit_For(self, node: Any) -> None:
        for each in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(each)

    visit_AsyncFor = visit_For

    def visit_ListComp(self, node: Any) -> None:
        inner = Accesses(*(part for each in node.generators for part in (each.iter, each.target, *each.ifs)))
        for each in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            inner.visit(each)
        outer = [name for name in inner.read if all(inner.first.get(each, True) for each in (*_prefixes(name), name))]
        self.read.update(outer)
        for name in sorted(outer):
            self.first.setdefault(name, True)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_FunctionDef(self, node: Any) -> None:
        """Pass over a body that runs later, if ever."""
        if name := getattr(node, "name", ""):
            self._access(ast.Name(name, ast.Store()))

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef


def _prefixes(name: str) -> list[str]:
    """Return the names of the objects that hold `name`: a and a.b for a.b.c."""
    parts = re.split(r"\.|(?=\[)", name.partition("[")[0])
    whole = [".".join(parts[:number]) for number in range(1, len(parts) + 1)]
    return whole if "[" in name else whole[:-1]


def around(tree: ast.AST, line: int) -> list[Any]:
    """Return the function that has this line, if any, and its `for` and `while` statements whose bodies hold the line,
    the outermost first."""
    found: list[Any] = []
    for node in ast.walk(tree):  # breadth first
        if getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", 0) or 0):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found = [node]
            elif isinstance(node, LOOPS) and line <= (node.body[-1].end_lineno or 0):
                found.append(node)
    return found


def handed_on(found: list[Scope], known: Callable[[Any], bool], *, outer: bool, inner: bool) -> list[str]:
    """Return the variables that the loops around the current lines hand from one pass to the next, also in attributes
    of `self` that functions called in these loops change, and the index of an `enumerate` around a job's own iterator.
    `known`: whether a checkpoint holds a value, or it is rankup's. `outer`: whether this attempt resumed in the middle
    of the loop over epochs, or of the outermost one. `inner`: of the loops in it."""
    trees = [_tree(each) for each in found]
    chain = [(scope, node) for scope, tree in zip(found, trees, strict=True) for node in around(tree, scope.line)]
    while chain and not isinstance(chain[0][1], LOOPS):
        chain.pop(0)
    passes = [_passes(scope, node) for scope, node in chain]
    epochs = next((number for number, names in enumerate(passes) if "epochs" in names), 0)
    begin = next((n for n, (_, node) in enumerate(chain) if n > epochs and isinstance(node, LOOPS)), len(chain))
    kept = {
        name for scope in found for name in _names(scope)
        if known(value := scope.value(name)) and not hasattr(type(value), "named_modules")  # is no module
    }
    names, fresh, over = dict[str, None](), set[str](), False
    for number, (scope, node) in enumerate(chain):
        is_loop, lost = isinstance(node, LOOPS), outer if number < begin else inner
        if is_loop and over:
            continue  # no loop in the body of one over batches goes on from one step to the next
        over |= bool(passes[number] & {"batches", "steps"})
        head = [node.test] if isinstance(node, ast.While) else [node.target] if is_loop else []
        accesses = Accesses(*head, *node.body)
        fresh |= {name for name, is_read in accesses.first.items() if number > epochs and not is_read}
        for name in [*accesses.handed_on(), *_index(node, passes[number], accesses)]:
            short, own = name.partition("[")[0], name.startswith("self.")
            held = any(known(scope.value(each)) for each in (*_prefixes(name), short))
            if (own or is_loop) and (lost or (outer and own and name not in fresh)) and not held and not any(
                _restored(tree, name, kept) for tree in trees
            ):
                names[short] = None
    return [*names]


def _tree(scope: Scope) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(scope.file, scope.module)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _names(scope: Scope) -> Iterator[str]:
    yield from {**scope.module, **scope.variables}
    yield from (f"self.{name}" for name in attributes(scope.variables.get("self")))


def _passes(scope: Scope, loop: Any) -> set[str]:
    """Return which iterators of a job this loop reads: epochs, batches, steps."""
    found = set[str]()
    for node in ast.walk(loop.iter) if isinstance(loop, ast.For | ast.AsyncFor) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.add(node.func.attr)
        elif isinstance(node, ast.Name | ast.Attribute):
            value = scope.value(ast.unparse(node))
            if isinstance(value, GeneratorType) and value.gi_code.co_filename.startswith(OWN[0]):
                found.add(value.gi_code.co_name)
            elif type(value).__module__.startswith("rankup."):
                found.add(type(value).__name__.lower())
    return found & PASSES


def _index(loop: Any, passes: set[str], accesses: Accesses) -> list[str]:
    """Return the index of `enumerate` in the head of a loop over a job's iterator, unless it begins at a number of the
    script's choice."""
    target = getattr(loop, "target", None)
    counts = passes and any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "enumerate" and len(node.args) == 1
        and not node.keywords for node in ast.walk(loop.iter)
    )
    first = target.elts[0] if counts and isinstance(target, ast.Tuple) else None
    return [first.id] if isinstance(first, ast.Name) and first.id in accesses.read else []


def _restored(tree: ast.AST, name: str, kept: set[str]) -> bool:
    """Return whether code sets this variable from a value that a resume restores, such as `job.step_number`."""
    for node in ast.walk(tree):
        value, targets = getattr(node, "value", None), [getattr(node, "target", None), *getattr(node, "targets", ())]
        found = {ast.unparse(part) for each in targets if each is not None for part in ast.walk(each)
                 if isinstance(part, ast.Name | ast.Attribute)}
        if isinstance(node, ast.AugAssign) or not (name in found or getattr(node, "arg", None) == name):
            continue
        if isinstance(value, ast.expr):
            parts = [part for part in ast.walk(value) if isinstance(part, ast.Name | ast.Attribute)]
            said = {ast.unparse(part) for part in parts}
            if name not in said and (said & kept or any(
                isinstance(part, ast.Attribute) and part.attr in ("step_number", "epoch") for part in parts
            )):
                return True
    return False


def overwritten(kind: type, name: str, found: list[Scope]) -> bool:
    """Return whether all code that assigns to this attribute of a class does so before it reads it. It then only shows
    a value, and hands nothing on."""
    code = [Accesses(*nodes[0].body) for each in found if (nodes := around(_tree(each), each.line))]
    for function in [each for one in kind.__mro__ for each in vars(one).values() if isinstance(each, FunctionType)]:
        if function.__name__ != "__init__" and not in_library(inspect.unwrap(function).__code__.co_filename):
            try:
                tree: Any = ast.parse(textwrap.dedent(inspect.getsource(function)))
            except (OSError, SyntaxError):  # it has no source
                continue
            code.append(Accesses(*tree.body[0].body))
    reads = [each.first[path] for each in code for path in each.assigned if path.rpartition(".")[::2][1] == name]
    return bool(reads) and not any(reads)
