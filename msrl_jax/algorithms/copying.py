"""Copies of algorithms as your own files: the config and the loop in sight, from the source text of the package.

A copy has the definitions that the config needs of its own module and of `algorithms.loops`. All else is imported. Text is cut
from the sources, so comments and formatting stay.
"""

import ast
import builtins
import functools
import importlib.metadata
import inspect
import io
import keyword
import os
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from symtable import SymbolTable, symtable
from typing import Any, TypeAlias

from msrl_jax._checks import as_path, writing
from msrl_jax._tracebacks import entry
from msrl_jax.algorithms import files, registry
from msrl_jax.algorithms.config import ALGORITHMS

Import: TypeAlias = tuple[str, str | None, str]  # module, name in it (None: the module itself), name here
LOOPS = "msrl_jax.algorithms.loops."
WIDTH = 128  # of a line
IN_LOOPS = re.compile(r"in\s`loops/\w+\.py`(\sand\s`loops/\w+\.py`)?\.(\s?)")


@dataclass(frozen=True)
class Definition:
    """A class, a function or a constant of a module."""

    module: str
    name: str
    text: str  # with its comments and the string that documents it

    @property
    def node(self) -> ast.stmt:
        """The statement."""
        return ast.parse(self.text).body[0]

    @property
    def is_block(self) -> bool:
        """Whether it is a class or a function."""
        return isinstance(self.node, ast.ClassDef | ast.FunctionDef)


@dataclass(frozen=True)
class Source:
    """A module: its docstring, its imports and its definitions, by name and in order."""

    doc: str
    imports: dict[str, Import]
    definitions: dict[str, Definition]


def read(module: str) -> Source:
    """Reads the source of a module."""
    return parsed(module, inspect.getsource(importlib.import_module(module)))


@functools.cache
def parsed(module: str, text: str) -> Source:
    """What the text of a module has."""
    tree, lines = ast.parse(text), text.splitlines()
    imports: dict[str, Import] = {}
    definitions: dict[str, Definition] = {}
    end, last = 0, ""
    for node in tree.body:
        block = "\n".join(lines[end : node.end_lineno]).strip("\n")
        end = node.end_lineno or end
        if isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name: (alias.name, None, alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imports[alias.asname or alias.name] = (node.module or "", alias.name, alias.asname or alias.name)
        elif isinstance(node, ast.Expr) and last:
            definitions[last] = Definition(module, last, f"{definitions[last].text}\n{block}")
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign):
            target: Any = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = target.id if target is not None else node.name  # type: ignore[union-attr]
            definitions[name] = Definition(module, name, block)
            last = "" if target is None else name
    return Source(ast.get_docstring(tree, clean=False) or "", imports, definitions)


def resolved(own: str, module: str, name: str) -> Definition | Import | None:
    """What a name of a module is in a copy of an algorithm of the module `own`; None for a name of the language."""
    source = read(module)
    if name in source.definitions and (module == own or module.startswith(LOOPS)):
        return source.definitions[name]
    if name not in source.imports:
        return None
    origin, attribute, here = source.imports[name]
    return resolved(own, origin, attribute or "") if origin.startswith(LOOPS) else (origin, attribute, here)


def global_names(definition: Definition) -> set[str]:
    """The names of its module that a definition uses; those in annotations that are strings are names of definitions."""

    def of(table: SymbolTable) -> Iterator[str]:
        top = table.get_type() == "module"
        yield from (s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global()))
        for child in table.get_children():
            yield from of(child)

    words = {getattr(node, "value", None) for node in ast.walk(definition.node) if isinstance(node, ast.Constant)}
    return {*of(symtable(definition.text, "copy", "exec")), *(n for n in read(definition.module).definitions if n in words)}


def needed_at_once(node: ast.AST) -> Iterator[str]:
    """The names without which a definition cannot be made: all but those in the bodies of functions."""
    if isinstance(node, ast.Name):
        yield node.id
    for field, value in ast.iter_fields(node):
        if not (isinstance(node, ast.FunctionDef | ast.Lambda) and field == "body"):
            for child in value if isinstance(value, list) else [value]:
                yield from needed_at_once(child) if isinstance(child, ast.AST) else ()


def ordered(own: str, name: str) -> tuple[list[Definition], list[Import]]:
    """The definitions that the config `name` needs, in an order in which each can be made; and the imports.

    Those of its module come first and the loops after them, but for what has to be there before.
    """
    uses: dict[Definition, set[Definition]] = {}
    imports: dict[Import, None] = {}

    def collect(definition: Definition) -> None:
        found = {x: resolved(own, definition.module, x) for x in sorted(global_names(definition))}
        imports.update({x: None for x in found.values() if isinstance(x, tuple)})
        at_once = set(needed_at_once(definition.node))
        uses[definition] = {x for n, x in found.items() if isinstance(x, Definition) and n in at_once} - {definition}
        for x in found.values():
            if isinstance(x, Definition) and x not in uses:
                collect(x)

    collect(read(own).definitions[name])
    written: dict[Definition, None] = {}

    def write(definition: Definition) -> None:
        for x in sorted(uses[definition], key=place):
            if x not in written:
                write(x)
        written[definition] = None

    modules = [own, *dict.fromkeys(x.module for x in uses if x.module != own)]
    place = {d: (modules.index(d.module), list(read(d.module).definitions).index(d.name)) for d in uses}.__getitem__
    for definition in sorted(uses, key=place):
        if definition not in written:
            write(definition)
    names = [d.name for d in written] + [here for _, _, here in imports]
    if twice := [x for x in names if names.count(x) > 1]:
        raise ValueError(f"{own} and its loops have two things named {twice[0]}, so they cannot be one file; rename one")
    return list(written), list(imports)


def import_lines(imports: list[Import]) -> str:
    """The imports as ruff sorts them."""

    def section(module: str) -> int:
        top = module.partition(".")[0]
        return 0 if top in sys.stdlib_module_names else 2 if top == "msrl_jax" else 1

    def kind(name: str) -> tuple[int, str]:  # constants, classes, the rest
        return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2), name.lower()

    texts: dict[int, list[str]] = {}
    for module, _, here in sorted(i for i in imports if i[1] is None):
        texts.setdefault(section(module), []).append(f"import {module}" + (f" as {here}" if here != module else ""))
    for module in sorted({module for module, name, _ in imports if name is not None}):
        pairs = sorted({(n, here) for m, n, here in imports if m == module and n}, key=lambda pair: kind(pair[0]))
        plain = [n for n, here in pairs if n == here]
        line = f"from {module} import {', '.join(plain)}"
        if len(line) > WIDTH:
            line = f"from {module} import (\n" + "".join(f"    {n},\n" for n in plain) + ")"
        several = [line] * bool(plain) + [f"from {module} import {n} as {here}" for n, here in pairs if n != here]
        texts.setdefault(section(module), []).extend(several)
    return "\n\n".join("\n".join(texts[number]) for number in sorted(texts))


def renamed(definition: Definition, old: str, new: str) -> str:
    """A definition with another name of the config, in code only; a line `def ...:` that becomes too long is split."""
    lines = definition.text.splitlines()
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(definition.text).readline) if (t.type, t.string) == (1, old)]
    for token in reversed(tokens):
        (row, start), (_, end) = token.start, token.end
        lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
    text, node = "\n".join(lines), definition.node
    if not tokens or not isinstance(node, ast.FunctionDef):
        return text
    first, after = node.lineno - 1, node.body[0].lineno - 1
    header = "".join(line.strip() + " " * line.endswith(",") for line in lines[first:after])
    if ", )" not in header and (len(header) > WIDTH or after > first + 1):
        start, end = header.index("(") + 1, header.rindex(")", 0, (header.rfind(" -> ") + 1) or None)
        parts = [header[:start], f"    {header[start:end].strip()}", header[end:]] if len(header) > WIDTH else [header]
        lines[first:after] = parts
    return "\n".join(lines)


def of_variant(config: type) -> tuple[str, str]:
    """The name of the class in whose text a config is, and that text with the config's own defaults and docstring."""
    definitions = read(config.__module__).definitions
    if config.__name__ not in definitions:
        raise ValueError(f"{config.__name__} is no class or variant in {config.__module__}, so its text cannot be copied")
    made = definitions[config.__name__]
    if isinstance(made.node, ast.ClassDef):
        return made.name, made.text
    call: Any = made.node.value  # type: ignore[attr-defined]  # variant(base, name, algorithm, doc, **defaults)
    segment: Any = functools.partial(ast.get_source_segment, made.text)
    base = definitions[call.args[0].id]
    lines, body, doc = base.text.splitlines(), base.node.body, segment(call.args[3])  # type: ignore[attr-defined]
    fields = {node.target.id: node.value.keywords for node in body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    for name, value in ((k.arg, segment(k.value)) for k in call.keywords):
        (old,) = (k.value for k in fields[name] if k.arg == "default")
        row = old.lineno - 1
        lines[row] = lines[row][: old.col_offset] + value + lines[row][old.end_col_offset :]
    lines[body[0].lineno - 1 : body[0].end_lineno] = ["    " + (doc if doc.startswith('"""') else f'""{doc}""')]
    return base.name, "\n".join(lines)


def as_comment(doc: str) -> str:
    """The docstring of a module as a comment."""
    parts = (part if part[0].isdigit() else textwrap.fill(part, WIDTH - 2) for part in doc.strip().split("\n\n"))
    return "\n#\n".join(textwrap.indent(part, "# ") for part in parts)


def text_of(algorithm: str | type, name: str, class_name: str) -> str:
    """The text of a copy of an algorithm, with another name and another name of its class."""
    kind: Any = registry.get(algorithm)
    own = kind.__module__
    base, text = of_variant(kind)
    text, count = re.subn(r"""(config\(\s*)["']\w+["']""", rf'\1"{name}"', text, count=1)
    definitions, imports = ordered(own, base)
    taken = {d.name for d in definitions} - {base} | {here for _, _, here in imports} | set(dir(builtins))
    if class_name in taken or not count:
        why = f"the class would be {class_name}, and the file has that already" if count else "the decorator names no algorithm"
        raise ValueError(f"{kind.name!r} cannot be copied to {name}.py: {why}; choose another name")
    doc = IN_LOOPS.sub(lambda found: "below." + ("\n" if "\n" in found[0] else found[2]), read(own).doc).strip()
    doc += f"\n\nA copy of `{kind.name}` of msrl_jax {importlib.metadata.version('msrl-jax')}."
    found = f'"""{doc}\n"""\n\n{import_lines(imports)}'
    before, below, told = False, False, set[str]()
    for d in definitions:
        is_config = (d.module, d.name) == (own, base)
        body = renamed(Definition(own, base, text) if is_config else d, base, class_name)
        if below and d.module not in (own, *told):
            told.add(d.module)
            body = f"{as_comment(read(d.module).doc)}\n\n\n{body}"
        found += ("\n\n\n" if d.is_block or before else "\n\n") + body
        before, below = d.is_block, below or is_config
    return found + "\n"


def named(algorithm: str, class_name: str, name: str) -> str:
    """The name of the class of a copy: `my_ppo` of `ppo`, whose class is `PPO`, has `MyPPO`."""
    before, is_in, after = name.partition(algorithm)
    parts = [before, class_name, after] if is_in else [name]
    return "".join(p if p == class_name else re.sub(r"(?:^|_+)([^\W_]?)", lambda found: found[1].upper(), p) for p in parts)


@entry
def copy(algorithm: str | type, file: str | os.PathLike) -> Path:
    """Writes an algorithm as your own file, with its config and its loop in sight; it trains the same bits.

    Args:
      algorithm: its name, or what else `algorithms.get` takes.
      file: a new file, such as `my_ppo.py`. Its name is that of the algorithm, and in camel case that of the config.

    Returns:
      The path of the file.

    Raises:
      ValueError: on an unknown algorithm (the message suggests the nearest one), and on a file that exists, has no folder, or
        has a name that cannot be an algorithm's.
    """
    path, kind = as_path("file", file), registry.get(algorithm)
    if path.suffix != ".py":
        raise ValueError(f"{path} does not end in .py; name a file such as my_{kind.name}.py")
    if not (name := path.stem).isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{path}: {name!r} cannot be a name in Python; use letters, digits and _, such as my_{kind.name}.py")
    others = [n.lower() for n, c in ALGORITHMS.items() if not files.reference(c).startswith(f"{path.absolute()}:")]
    if name.lower() in others:
        raise ValueError(f"{path}: an algorithm named {name!r} is registered already; choose another name")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it first, or name another one")
    if path.exists():
        raise ValueError(f"{path} exists; name another file, or delete it first")
    text, partial = text_of(kind, name, named(kind.name, kind.__name__, name)), path.with_name(f".{path.name}.partial")
    with writing(path):
        partial.write_text(text, encoding="utf-8", newline="")
        os.replace(partial, path)
    return path
