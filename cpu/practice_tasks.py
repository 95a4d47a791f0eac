"""Tasks on the practice site: what is asked, where it starts and how it is scored; and NeMo Gym rows of them."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from browser_prompts import SYSTEM_PROMPT
from cpu.practice_pages import PLACES, SITE_NUMBERS, Page, Site, Split, make_site, names_for_club

SCORING_KEYS = ("final_url", "url_contains", "dom_contains", "answer_equals")
"""The keys of a scoring spec that the environment knows; a task has exactly one."""

TASKSET = "practice_site"


class TaskKind(StrEnum):
    """What a task exercises."""

    LIST = "list"
    FORM = "form"
    SEARCH = "search"
    PAGING = "paging"
    SHOP = "shop"


@dataclass(frozen=True)
class Task:
    """One task; its addresses are paths, because the server's port is known only when it runs."""

    task_id: str
    question: str
    initial_url: str
    """Path of the start page."""
    verifier_metadata: Mapping[str, str]
    """Scoring spec with one key; the value of `final_url` is a path."""
    kind: StrEnum
    split: Split
    site: Site
    target: str
    """The word that the policy has to click or type."""

    def scoring_spec(self, base_url: str) -> dict[str, str]:
        """Return the scoring spec for a site that is served at base_url."""
        return {k: base_url + v if k == "final_url" else v for k, v in self.verifier_metadata.items()}

    def row(self, base_url: str) -> dict:
        """Return the task as a NeMo Gym rollout row."""
        return {
            "responses_create_params": {
                "input": [
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": self.question},
                ],
                "metadata": {
                    "task_id": self.task_id,
                    "kind": str(self.kind),
                    "taskset": TASKSET,
                    "split": str(self.split),
                },
            },
            "initial_url": base_url + self.initial_url,
            "verifier_metadata": self.scoring_spec(base_url),
        }


def score(scoring_spec: Mapping[str, str], page: Page, answer: str | None) -> float:
    """Return the reward that the environment's /verify would give for this page and answer.

    Source: `_score` in NeMo Gym 0.7.0, resources_servers/interactive_browser/app.py.
    """
    if "answer_equals" in scoring_spec:
        return float((answer or "").strip() == scoring_spec["answer_equals"].strip())
    if "final_url" in scoring_spec:
        return float(page.url == scoring_spec["final_url"])
    if "url_contains" in scoring_spec:
        return float(scoring_spec["url_contains"] in page.url)
    return float(scoring_spec["dom_contains"].lower() in f"{page.title} {page.text}".lower())


def make_task(kind: TaskKind, site: Site, rng: random.Random) -> Task:
    """Return a task of this kind on the site, its target drawn by rng."""
    question, path, spec, target = _MAKERS[kind](site, rng)
    return Task(
        task_id=f"{site.split}-{kind}-{site.place}-{site.number}-{target}",
        question=question,
        initial_url=site.root + path,
        verifier_metadata=spec,
        kind=kind,
        split=site.split,
        site=site,
        target=target,
    )


def _list_task(site: Site, rng: random.Random) -> tuple[str, str, dict[str, str], str]:
    item = rng.choice(site.listed)
    return f"Tell the code of {item} in the {site.place} list.", "/list", {"answer_equals": site.codes[item]}, item


def _form_task(site: Site, rng: random.Random) -> tuple[str, str, dict[str, str], str]:
    name = rng.choice(names_for_club(site))
    return f"Join the {site.club} club as {name}.", "/club", {"dom_contains": f"member {name}"}, name


def _search_task(site: Site, rng: random.Random) -> tuple[str, str, dict[str, str], str]:
    item = rng.choice(sorted(site.codes))
    return f"Search {item} at {site.place} and tell the code.", "/search", {"answer_equals": site.codes[item]}, item


def _paging_task(site: Site, rng: random.Random) -> tuple[str, str, dict[str, str], str]:
    item = rng.choice(site.catalogue)
    spec = {"final_url": f"{site.root}/catalogue/{item}"}
    return f"Open {item} in the {site.place} catalogue.", "/catalogue", spec, item


def _shop_task(site: Site, rng: random.Random) -> tuple[str, str, dict[str, str], str]:
    item = rng.choice(site.sold)
    spec = {"url_contains": f"/shop/cart?cart={item}"}
    return f"Buy {item} in the {site.place} shop.", "/shop", spec, item


_MAKERS: dict[TaskKind, Callable[[Site, random.Random], tuple[str, str, dict[str, str], str]]] = {
    TaskKind.LIST: _list_task,
    TaskKind.FORM: _form_task,
    TaskKind.SEARCH: _search_task,
    TaskKind.PAGING: _paging_task,
    TaskKind.SHOP: _shop_task,
}


def random_task(split: Split, rng: random.Random) -> Task:
    """Return a task of a random kind on a random site of the split, paging twice as often as any other kind.

    Paging needs the one decision that no copying solves: whether the wanted item is on this page at all.
    """
    site = make_site(rng.choice(PLACES), rng.choice(SITE_NUMBERS[split]))
    return make_task(rng.choice([*TaskKind, TaskKind.PAGING]), site, rng)


def make_tasks(split: Split, count: int) -> list[Task]:
    """Return distinct tasks of the split, always the same ones, the kinds taking turns.

    The kinds take turns so that a batch of consecutive rows holds each kind; with a kind missing from a batch, its
    habits drift in that step.

    Raises:
        ValueError: the split has fewer distinct tasks than count.
    """
    rng = random.Random(f"practice tasks {split}")
    kinds = list(TaskKind)
    tasks: list[Task] = []
    seen: set[str] = set()
    for _ in range(100 * count):
        if len(tasks) == count:
            break
        site = make_site(rng.choice(PLACES), rng.choice(SITE_NUMBERS[split]))
        task = make_task(kinds[len(tasks) % len(kinds)], site, rng)
        if task.question not in seen:
            seen.add(task.question)
            tasks.append(task)
    if len(tasks) < count:
        raise ValueError(f"the split {split} has fewer than {count} distinct tasks")
    return tasks


def write_rows(
    train_file: Path,
    val_file: Path,
    base_url: str,
    train_count: int = 90,
    validation_count: int = 50,
    tasks: Callable[[Split, int], Sequence[Task]] = make_tasks,
) -> dict[str, int]:
    """Write both files of rows and return how many rows each split got, by split name.

    Args:
        train_file: JSON lines file of training rows, overwritten.
        val_file: JSON lines file of validation rows, overwritten.
        base_url: where the practice site is served, such as `http://127.0.0.1:8077`, without a slash at the end.
        train_count: number of training rows.
        validation_count: number of validation rows.
        tasks: returns that many tasks of a split.
    """
    written = {}
    for split, path, count in ((Split.TRAIN, train_file, train_count), (Split.VALIDATION, val_file, validation_count)):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [task.row(base_url.rstrip("/")) for task in tasks(split, count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        written[str(split)] = len(rows)
    return written
