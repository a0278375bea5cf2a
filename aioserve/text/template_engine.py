"""Compiler and runtime of chat templates: Jinja2, in the sandbox that transformers uses.

A template prints what it prints under transformers, as the library is the same and is set up in the
same way. In addition, the compiled template reports to a `Budget`. Must not know messages.

    loops, displays, operators, prints ─┐
    calls, of methods by name too ──────┼─► Budget
    filters and tests ──────────────────┘

Features that no chat template needs and no budget can bound are left out: filters and methods for
web pages and bytes, and random text.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aioserve.text.template_budget import SCOPES, Budget
from aioserve.text.template_filters import (
    GLOBALS,
    METHODS,
    BudgetedContext,
    RefusedError,
    budgeted_filters,
    budgeted_test,
)

__all__ = ["RefusedError", "Template", "TemplateSyntaxError"]

MAX_CODE_CHARS = 1 << 17
"""Most characters of the program that a template becomes, twice that of the longest published one.

Python compiles it in one go, and other threads wait.
"""
TemplateSyntaxError = jinja2.TemplateSyntaxError
_LEFT_OUT_METHODS = frozenset(
    """
    encode format_map from_bytes fromhex maketrans striptags to_bytes translate
    """.split()  # noqa: SIM905
)


class Template:
    """A compiled template. Thread-safe.

    Raises `TemplateSyntaxError`, which has a line. Raises other errors of the compiler
    (`SyntaxError`, `RecursionError`, `MemoryError`) for templates that nest too deeply.
    """

    def __init__(self, source: str) -> None:
        self._template = _Environment().from_string(source)

    def render(self, budget: Budget, values: Mapping[str, Any]) -> str:
        """Print the template with these variables.

        Raises `RefusedError`, `BudgetSpentError`, and whatever operators and filters raise.
        """
        context = cast(BudgetedContext, self._template.new_context(dict(values)))
        context.budget = budget
        pieces: list[str] = []
        for piece in self._template.root_render_func(context):
            budget.wrote(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    def line_of(self, error: BaseException) -> int | None:
        """Return the line of the template that raised an error."""
        line, traceback = None, error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_globals.get("environment") is self._template.environment:
                line = self._template.get_corresponding_lineno(traceback.tb_lineno)
            traceback = traceback.tb_next
        return line


class _CodeGenerator(CodeGenerator):
    """Compiles operations of a template into calls of its budget."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("budget = context.budget")
        self.writeline("concat = budget.join")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        step = object.__new__(nodes.InternalName)
        nodes.Node.__init__(step, "budget.step()", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        super().visit_For(node, frame)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible  # no budget would bound computing it here
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("budget.text(")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("budget.join((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(part := node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("budget.cut(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for bound in (part.start, part.stop, part.step):
            self.visit(nodes.Const(None) if bound is None else bound, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._display(super().visit_List, node, node.items, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._display(super().visit_Tuple, node, node.items, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._display(super().visit_Dict, node, node.items, frame)

    def _display(
        self,
        visit: Callable[[Any, Frame], None],
        node: nodes.Expr,
        items: Sequence[nodes.Node],
        frame: Frame,
    ) -> None:
        if all(isinstance(item, nodes.Const) for item in items):
            visit(node, frame)
            return
        self.write("budget.made(")
        visit(node, frame)
        self.write(")")


def _operator(method: str) -> Callable[[CodeGenerator, nodes.BinExpr, Frame], None]:
    def visit(self: CodeGenerator, node: nodes.BinExpr, frame: Frame) -> None:
        self.write(f"budget.{method}(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    return visit


_CodeGenerator.visit_Add = _operator("add")
_CodeGenerator.visit_Mul = _operator("multiply")
_CodeGenerator.visit_Pow = _operator("power")
_CodeGenerator.visit_Mod = _operator("remainder")


class _GenerationMarks(Extension):
    """Marks of the assistant's part, for training: a block that prints its content."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_printed"), [], [], body).set_lineno(line)

    def _printed(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    context_class = BudgetedContext

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationMarks, loopcontrols],
            # The optimizer computes constants while compiling, and nothing bounds that.
            optimized=False,
        )
        self.filters = budgeted_filters(self.filters)
        self.tests = {name: budgeted_test(test) for name, test in self.tests.items()}
        del self.globals["lipsum"]
        self.globals |= GLOBALS

    def _compile(self, source: str, filename: str) -> types.CodeType:
        if len(source) > MAX_CODE_CHARS:
            raise TemplateSyntaxError(
                f"it becomes a program of {len(source)} characters, and at most {MAX_CODE_CHARS} "
                "are compiled",
                lineno=1,
            )
        return super()._compile(source, filename)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _LEFT_OUT_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(self, context: BudgetedContext, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        budget.step()
        if not self.is_safe_callable(function):
            raise SecurityError(f"{function!r} is not safely callable")
        if kwargs or args:
            budget.passed(args, kwargs)
        method = getattr(function, "__wrapped__", function)
        if isinstance(method, types.BuiltinMethodType | types.MethodType):
            check = METHODS.get(method.__name__)
            if check is not None and isinstance(method.__self__, str):
                given = {name: kwargs[name] for name in kwargs if name not in SCOPES}
                args = check(budget, method.__self__, *args, **given) or args
            return budget.made(context.call(function, *args, **kwargs))
        budget.enter()
        try:
            return budget.made(context.call(function, *args, **kwargs))
        finally:
            budget.leave()
