"""Makes what the site has beside the pages of `docs/`: the reference, and files of the repository that pages link to.

A hook of MkDocs (mkdocs.yml). The reference is read from the code when the site is built, so it cannot be stale.
"""

import io
import posixpath
import re
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.fields import meanings, plain_annotation, section_types
from configs.run import RunConfig
from flows import cli
from flows.reporting.formats import config_value
from storage.read.views import all_views
from storage.schemas.contract import SLICE_COLUMNS, Column
from storage.schemas.stage_tables import TABLES

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
"""The relative target of a link, and its heading; an address has a colon."""
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
OUTSIDE = re.compile(r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*\shref=["']?(?:https?:)?//""")
"""What a browser would load from another host when it opens a page."""
SUFFIXES = {".py": "python", ".sql": "sql", ".toml": "toml", ".yaml": "yaml", ".sh": "bash", ".md": "markdown"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Say at the foot of each page which version of the program it describes, and the day of its last commit."""
    log = subprocess.run(["git", "log", "-1", "--format=, %cs"], cwd=ROOT, capture_output=True, text=True, check=False)
    config.copyright = f"Stagecoach {version('stagecoach-rl')}{log.stdout.rstrip()}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file of the repository that a page of the site links to. Raises PluginError where none is."""
    open_pages = [Path(page.abs_src_path or "") for page in files.documentation_pages()]
    known: set[Path] = set()
    while open_pages:
        page = open_pages.pop()
        for target in _targets(page):
            if target in known or _in_docs(target):
                continue
            known.add(target)
            name, content = _repository_page(target), _content(page, target)
            files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
            if target.suffix == ".md":
                open_pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the generated part of a page, and make its links to files of the repository links to their pages."""
    uri = page.file.src_uri
    source = ROOT / "docs" / uri
    if page.file.generated_by:
        source = ROOT / uri.removeprefix("repository/")
        if source.suffix != ".md" or not source.is_file():  # what we wrote ourselves
            return markdown
    for mark, write in PARTS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, write())
    return _outside_code(markdown, lambda text: _relink(text, source, uri))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Leave a page as it is. Raises PluginError where a browser would load something from another host for it."""
    if found := OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found.group()}")
    return output


def _outside_code(text: str, change: Any) -> str:
    """Return `text` with all but its code changed."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def _targets(page: Path) -> Iterator[Path]:
    """Yield the files and directories that the links of a page lead to."""
    for target, _ in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        yield (page.parent / target).resolve()


def _in_docs(target: Path) -> bool:
    """Tell whether a file or directory is itself a part of the site."""
    return target.is_relative_to(ROOT / "docs") and target.suffix != ".py"


def _repository_page(target: Path) -> str:
    """Return the name of the page that shows a file or directory of the repository."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        return f"repository/{name}/index.md"
    return f"repository/{name}" if target.suffix == ".md" else f"repository/{name}.md"


def _content(page: Path, target: Path) -> str:
    """Return the Markdown that shows `target`. Raises PluginError where there is no such file in the repository."""
    where = page.relative_to(ROOT)
    if not target.is_relative_to(ROOT) or not target.exists():
        raise PluginError(f"{where}: its link leads to {target}, which is no file of this repository")
    title = target.relative_to(ROOT).as_posix()
    hidden = "---\nsearch:\n  exclude: true\n---\n"
    if target.is_dir():
        entries = sorted(f"{each.name}/" if each.is_dir() else each.name for each in target.glob("[!._]*"))
        return f"{hidden}# {title}\n\nA directory of the repository:\n\n" + "".join(f"- `{each}`\n" for each in entries)
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return hidden + text
    fence = "````"
    return f"{hidden}# {title}\n\n{fence}{SUFFIXES.get(target.suffix, 'text')}\n{text}\n{fence}\n"


def _relink(text: str, source: Path, uri: str) -> str:
    """Return `text` of the file `source` with its links leading to pages of the site, seen from the page `uri`."""

    def change(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        inside = _in_docs(target)
        if inside and not target.is_dir():
            name = target.relative_to(ROOT / "docs").as_posix()
        elif inside:
            name = f"{target.relative_to(ROOT / 'docs').as_posix()}/README.md"
        else:
            name = _repository_page(target)
        return posixpath.relpath(name, posixpath.dirname(uri)) + (link[2] or "")

    return LINK.sub(change, text)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"


def _table(head: tuple[str, ...], rows: list[str]) -> str:
    return _row(*head) + _row(*["---"] * len(head)) + "".join(rows) + "\n"


def config_keys() -> str:
    """Return a table for each section of a config: its keys, with type, default and meaning."""
    return "".join(_sections(RunConfig, "", "The run itself", set()))


def _sections(model: type[BaseModel], prefix: str, title: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """Yield the headings and tables of a section and of those inside it that are not in `seen`."""
    rows, inner, documented = [], [], meanings(model)
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        models = section_types(field.annotation)
        inside = f"{key}.*." if get_origin(plain_annotation(field.annotation)) is tuple else f"{key}."
        inner += [(each, inside, _title(each, inside)) for each in models if each not in seen]
        meaning = documented.get(name) or (_summary(models[0]) if len(models) == 1 else "")
        kind = f"{'list of sections' if inside.endswith('*.') else 'section'}" if models else _type(field)
        rows.append(_row(f"`{key}`", kind, _default(field, bool(models)), meaning))
    about = "" if model is RunConfig else _summary(model)
    yield f"## {title}\n\n{about}\n\n" + _table(("key", "type", "default", "meaning"), rows)
    # Before any of them is listed: what stands here is not listed again further inside.
    seen.update(each for each, _, _ in inner)
    for each, inside, heading in inner:
        yield from _sections(each, inside, heading, seen)


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().partition("\n\n")[0]


def _title(model: type[BaseModel], prefix: str) -> str:
    kind = model.model_fields.get("type")
    return f"`{prefix.rstrip('.*')}`" + (f" with type `{kind.default}`" if kind and kind.default else "")


def _type(field: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(each, name)}" for each in field.metadata for name, sign in LIMITS if hasattr(each, name)
    ]
    return ", ".join([_annotation(field.annotation), *limits])


LIMITS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


def _annotation(annotation: Any) -> str:
    annotation, origin = plain_annotation(annotation), get_origin(plain_annotation(annotation))
    inside = get_args(annotation)
    if origin is Literal:
        return " or ".join(f'`"{each}"`' if isinstance(each, str) else f"`{each}`" for each in inside)
    if origin in (Union, UnionType):
        return " or ".join("null" if each is type(None) else _annotation(each) for each in inside)
    if origin is tuple:
        return f"list of {_annotation(inside[0])}"
    if isinstance(origin, type) and len(inside) == 2:
        return f"table of {_annotation(inside[1])}"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any value"}
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo, is_section: bool) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if is_section or isinstance(value, BaseModel):
        return "null" if value is None else ""
    return f"`{config_value(value)}`" if value != "" else "empty"


def commands() -> str:
    """Return the help of each command, by group, as the command line prints it."""
    parts = []
    for line in _printed("--help").splitlines():
        if heading := GROUP.match(line):
            parts.append(f"## {heading[1]}\n\n")
        elif entry := ENTRY.match(line):
            name = entry[1]
            parts.append(f"### stagecoach {name}\n\n```text\n{_printed(name, '--help')}\n```\n\n")
    if len(parts) < 20:
        raise PluginError("the page of commands is nearly empty: `stagecoach --help` prints another form of list")
    return "".join(parts)


GROUP = re.compile(r"(?:╭─ )?([A-Z][a-z]+)(?: ─+╮|:)$")
ENTRY = re.compile(r"(?:│ | {2})([a-z][a-z-]*) {2,}\S")
"""A heading and a command of what `stagecoach --help` prints, with or without a frame."""


def _printed(*arguments: str) -> str:
    with redirect_stdout(io.StringIO()) as written:
        cli.main(arguments)
    return "\n".join(line.rstrip() for line in written.getvalue().strip().splitlines())


def tables() -> str:
    """Return the columns of each table of a store, with type and meaning, and those of its views."""
    parts = ["## Columns of every row\n\n", _columns(SLICE_COLUMNS)]
    for table in TABLES.values():
        names = ", ".join(f"`{name}`" for name in table.row_id)
        parts += [f"## {table.name}\n\nA row is {table.row}. {names} name it.\n\n", _columns(table.columns)]
    for view in all_views().values():
        rows = [_row(f"`{name}`", meaning) for name, meaning in view.columns.items()]
        parts += [f"## {view.name}\n\nA view: a row is {view.row}.\n\n", _table(("column", "meaning"), rows)]
    return "".join(parts)


def _columns(columns: tuple[Column, ...]) -> str:
    rows = [_row(f"`{each.name}`", f"{each.type}", "yes" if each.nullable else "", each.meaning) for each in columns]
    return _table(("column", "type", "may be null", "meaning"), rows)


PARTS = {
    "<!-- generated: config keys -->": config_keys,
    "<!-- generated: commands -->": commands,
    "<!-- generated: tables -->": tables,
}
"""What takes the place of a mark in a page."""
