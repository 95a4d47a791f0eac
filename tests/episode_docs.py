"""The tables of docs/episode_log.md, made of the docstrings in episode_record.py.

python -m tests.episode_docs     writes them anew
"""

import ast
import sys

import episode_record
from cpu.training_run import REPO_ROOT

PAGE = REPO_ROOT / "docs" / "episode_log.md"
_TABLES = ("AttemptRecord", "ObservationRecord", "TurnRecord", "ModelCallRecord", "RowRecord")
_SETS = ("AttemptOutcome", "CallKind", "TextsLeftOut")
_BEGIN, _END = "<!-- made by tests/episode_docs.py -->", "<!-- end -->"


def described(class_name: str) -> dict[str, tuple[str, str]]:
    """Return annotation (or value) and docstring of each field of a class in episode_record.py."""
    module = ast.parse((REPO_ROOT / "episode_record.py").read_text())
    (cls,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found = {}
    for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign | ast.Assign):
            continue
        is_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = " ".join(str(after.value.value).split()) if is_doc else ""
        if isinstance(node, ast.AnnAssign):
            found[node.target.id] = (ast.unparse(node.annotation), text)
        else:
            found[node.targets[0].id] = (ast.literal_eval(node.value), text)
    return found


def tables() -> str:
    """Return the tables as Markdown."""
    parts = []
    for name in _TABLES:
        summary = getattr(episode_record, name).__doc__.splitlines()[0]
        rows = [f"| `{key}` | {kind.replace('|', 'or')} | {text} |" for key, (kind, text) in described(name).items()]
        parts += [f"## {name}", "", summary, "", "| key | type | what |", "|---|---|---|", *rows, ""]
    for name in _SETS:
        summary = getattr(episode_record, name).__doc__.splitlines()[0]
        rows = [f"| `{value}` | {text} |" for value, text in described(name).values() if value]
        parts += [f"## {name}", "", summary, "", "| value | what |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def page_with(text: str, made: str) -> str:
    """Return the page with these tables between the marks."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}\n\n{made}\n{_END}{rest.partition(_END)[2]}"


def main() -> int:
    """Write the page and return 0."""
    PAGE.write_text(page_with(PAGE.read_text(), tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
