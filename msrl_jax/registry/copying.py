"""Copies the file of an algorithm, so that you can edit it. The copy registers the algorithm under another name.

The rest of the file does not change: the copy has the same imports, and a diff with the original shows your changes. A
`variant`, an algorithm with other defaults, is copied as the class of its base algorithm with the defaults of the variant.
"""

import ast
import importlib.metadata
import importlib.util
import itertools
import keyword
import os
import re
import sys
from pathlib import Path
from typing import Any

from msrl_jax._files import as_path, replacing
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.registry import files, lookup
from msrl_jax.registry.table import ALGORITHMS


@entry
def copy(algorithm: str | type, file: str | os.PathLike) -> Path:
    """Copies the file of an algorithm to a new file, which registers the algorithm under the name of the new file.

    Args:
      algorithm: its name, or another argument that `algorithms.get` accepts.
      file: the new file; `my_ppo.py` registers the algorithm `my_ppo`. The class keeps its name.

    Returns:
      The path of the file.

    Raises:
      ValueError: if the algorithm is unknown (the message suggests the nearest name); if the file exists, its folder does not
        exist, or its name is not valid for an algorithm; and if the algorithm has no file, or shares its file with others.
    """
    path, kind = as_path("file", file), lookup.get(algorithm)
    if path.suffix != ".py":
        raise ValueError(f"{path} does not end in .py; name a file such as my_{kind.name}.py")
    if not (name := path.stem).isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{path}: {name!r} cannot be a name in Python; use letters, digits and _, such as my_{kind.name}.py")
    other_names = [n.lower() for n, c in ALGORITHMS.items() if not files.reference(c).startswith(f"{path.absolute()}:")]
    if name.lower() in other_names:
        raise ValueError(f"{path}: an algorithm named {name!r} is registered already; choose another name")
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        raise ValueError(f"{path} would hide the module {name!r} from programs in its folder; choose another name")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; create it first, or choose another one")
    if path.exists():
        raise ValueError(f"{path} exists; name another file, or delete it first")
    text = _text(kind, name)
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")
    return path


def _text(kind: Any, name: str) -> str:
    """Returns the source of a config's file, edited to register only that config, under another name."""
    file, class_name = files.file_of(kind.__module__), kind.__qualname__
    text, variants = _without_variants(Path(file).read_text("utf-8") if os.path.exists(file) else "")
    base = str(variants.get(class_name, class_name))
    if re.search(rf"^class {base}\b", text, re.MULTILINE) is None:
        raise ValueError(f"the config {class_name} is not in a file, as in a notebook; write it to a file, and copy that")
    configs = files.configs(sys.modules[kind.__module__])
    if other_configs := sorted(configs.keys() - {base, *variants}):
        raise ValueError(
            f"{file} has the config {other_configs[0]} too, which a copy would register again; move it to another file"
        )
    old = configs[base].name
    text = text if class_name == base else _as_variant(text, configs[base], kind)
    text = _without_unused(text) if variants else text
    text, count = re.subn(rf"""(\bconfig\(\s*(?:name=)?)(["']){old}\2""", rf'\1"{name}"', text)
    if count == 0:
        raise ValueError(f"{file} has no decorator with the name {old!r}; write @config({old!r}) before the class {base}")
    origin = f"msrl_jax {importlib.metadata.version('msrl-jax')}" if kind.__module__.startswith("msrl_jax.") else file
    return f"# A copy of `{kind.name}` of {origin}.\n{text}"


def _without_variants(source: str) -> tuple[str, dict[str, str]]:
    """Removes the variants from a source file; returns the rest, and the base class of each variant."""
    lines, variants = source.split("\n"), dict[str, str]()
    for previous, node in reversed([*itertools.pairwise(ast.parse(source).body)]):
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name("variant"), [ast.Name(base), *_])):
                variants[name] = base
                del lines[previous.end_lineno : node.end_lineno]
    return "\n".join(lines), variants


def _without_unused(source: str) -> str:
    """Removes unused names from the `from` imports of a source file."""
    nodes = [*ast.walk(ast.parse(source))]
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    for name in imported - {node.id for node in nodes if isinstance(node, ast.Name)}:
        source = re.sub(rf"\s*\b{name}\b,(?=\s)|,\s*{name}\b", "", source, count=1)
    return source


def _as_variant(source: str, base: Any, variant: Any) -> str:
    """Turns the base class in a source file into its variant, with the variant's name, docstring and defaults."""
    tree = ast.parse(source)
    (class_node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
    edits: list[tuple[Any, str]] = [(class_node.body[0], f'"""{variant.__doc__}"""')]
    edits += [(node, variant.__name__) for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == base.__name__]
    for node in class_node.body:
        match node:
            case ast.AnnAssign(ast.Name(name), value=ast.Call(keywords=kwargs)) if getattr(variant, name) != getattr(
                base, name
            ):
                default = repr(getattr(variant, name)).replace("'", '"')
                edits += [(k.value, default) for k in kwargs if k.arg == "default"]
    lines = [line.encode() for line in source.split("\n")]  # `ast` gives offsets in bytes
    for node, text in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
        first, last = node.lineno - 1, node.end_lineno - 1
        lines[first : last + 1] = [lines[first][: node.col_offset] + text.encode() + lines[last][node.end_col_offset :]]
    return re.sub(rf"^class {base.__name__}\b", f"class {variant.__name__}", b"\n".join(lines).decode(), flags=re.MULTILINE)
