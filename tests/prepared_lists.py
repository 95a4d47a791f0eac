"""Task lists for tests of their preparation, and what became of them."""

import json
from pathlib import Path

from prepare_webvoyager_data import main

FILES = ("train.jsonl", "val.jsonl", "report.json")


def a_task(number=0, **changes):
    task = {
        "web_name": "Site A",
        "id": f"Site A--{number}",
        "ques": f"Find thing {number}.",
        "web": "https://a.example/",
    }
    return {k: v for k, v in (task | changes).items() if v is not None}


def lines(*tasks):
    return "\n".join(json.dumps(task, ensure_ascii=False) for task in tasks)


class Prepared:
    """The outcome of one run."""

    def __init__(self, code, folder, out, err):
        self.code, self.folder, self.out, self.err = code, folder, out, err

    def rows(self, name):
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").split("\n") if line]

    @property
    def all(self):
        """Rows of both files by task id."""
        found = self.rows("train.jsonl") + self.rows("val.jsonl")
        return {row["responses_create_params"]["metadata"]["task_id"]: row for row in found}

    @property
    def questions(self):
        return [row["responses_create_params"]["input"][-1]["content"] for row in self.all.values()]

    @property
    def report(self):
        return json.loads((self.folder / "report.json").read_text(encoding="utf-8"))


def file_of(name, value):
    Path(name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return name


def prepared(capsys, content=None, *flags, name="list.jsonl", folder="out") -> Prepared:
    """Return the outcome of preparing a list in the current folder: text, bytes or tasks, and flags."""
    if isinstance(content, list):
        content = lines(*content)
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    capsys.readouterr()
    code = main(["--input", name, "--output-dir", folder, *flags])
    return Prepared(code, Path.cwd() / folder, *capsys.readouterr())
