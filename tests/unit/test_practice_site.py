"""The practice site: tasks, their scoring, and pages that the simulator and a browser see alike."""

import json
import urllib.request
from html.parser import HTMLParser
from threading import Thread

import pytest

from cpu.demonstrations import expert_episode
from cpu.practice_browser import SimulatedEpisode
from cpu.practice_pages import Form, Split, html_text, make_site, observation_text, page_at, submit_path
from cpu.practice_site import PracticeServer, write_rows
from cpu.practice_tasks import SCORING_KEYS, TaskKind, make_tasks, score

BASE_URL = "http://127.0.0.1:8077"
COUNTS = {Split.TRAIN: 90, Split.VALIDATION: 50, Split.DEMONSTRATION: 90}
TASKS = {split: make_tasks(split, count) for split, count in COUNTS.items()}
ALL_TASKS = [task for tasks in TASKS.values() for task in tasks]


def test_tasks_are_the_same_every_time():
    assert [task.row(BASE_URL) for task in make_tasks(Split.TRAIN, 90)] == [t.row(BASE_URL) for t in TASKS[Split.TRAIN]]


@pytest.mark.parametrize("split", list(Split))
def test_a_split_has_distinct_tasks_of_every_kind_in_turn(split):
    tasks = TASKS[split]
    assert len({task.task_id for task in tasks}) == len({task.question for task in tasks}) == COUNTS[split]
    assert {task.split for task in tasks} == {split}
    for start in range(0, len(tasks), len(TaskKind)):
        assert {task.kind for task in tasks[start : start + len(TaskKind)]} == set(TaskKind)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Split.TRAIN, Split.VALIDATION),
        (Split.DEMONSTRATION, Split.VALIDATION),
        (Split.DEMONSTRATION, Split.TRAIN),
    ],
)
def test_splits_share_no_site_no_question_and_no_pair_of_words(first, second):
    def pairs(task):
        site = task.site
        placed = {(item, site.place) for item in site.codes}
        clubs = {(site.club, task.target)} if task.kind is TaskKind.FORM else set()
        return placed | clubs | set(site.codes.items())

    one, other = TASKS[first], TASKS[second]
    assert not {task.site.root for task in one} & {task.site.root for task in other}
    assert not {task.question for task in one} & {task.question for task in other}
    assert not set().union(*map(pairs, one)) & set().union(*map(pairs, other))


def test_every_scoring_key_is_used_in_training_and_validation():
    for split in (Split.TRAIN, Split.VALIDATION):
        keys = [tuple(task.verifier_metadata) for task in TASKS[split]]
        assert all(len(key) == 1 for key in keys)
        assert {key[0] for key in keys} == set(SCORING_KEYS)


def test_the_expert_solves_every_task_in_at_most_four_calls_and_doing_nothing_solves_none():
    for task in ALL_TASKS:
        assert SimulatedEpisode(task, BASE_URL).reward == 0.0, task.task_id
        episode = expert_episode(task, BASE_URL)
        assert episode.finished and episode.reward == 1.0, task.task_id


@pytest.mark.parametrize(
    ("spec", "url", "answer", "reward"),
    [
        ({"answer_equals": "kilo"}, "/", " kilo ", 1.0),
        ({"answer_equals": "kilo"}, "/", None, 0.0),
        ({"final_url": BASE_URL + "/delta/40"}, "/delta/40", None, 1.0),
        ({"final_url": BASE_URL + "/delta/40"}, "/delta/40/list", None, 0.0),
        ({"url_contains": "/list"}, "/delta/40/list", None, 1.0),
        ({"url_contains": "/list"}, "/delta/40/shop", None, 0.0),
        ({"dom_contains": "DELTA Home"}, "/delta/40", None, 1.0),
        ({"dom_contains": "member mia"}, "/delta/40", None, 0.0),
    ],
)
def test_scoring_follows_the_environment(spec, url, answer, reward):
    assert score(spec, page_at(BASE_URL + url), answer) == reward


def test_pages_are_small():
    for task in ALL_TASKS:
        for page in _pages_around(task):
            assert len(page.elements) <= 8, page.url
            assert len(page.text.split()) <= 25, page.url


def test_html_holds_what_the_observation_says():
    for task in TASKS[Split.VALIDATION][:10]:
        for page in _pages_around(task):
            shown = _Reader()
            shown.feed(html_text(page))
            assert shown.title == page.title
            assert " ".join(shown.body.split()) == page.text
            assert shown.elements == [element.kind for element in page.elements]


def test_observation_words_the_page_as_the_environment_does():
    site = make_site("delta", 40)
    page = page_at(f"{BASE_URL}/delta/40/club")
    assert observation_text(page) == (
        f"URL: {BASE_URL}/delta/40/club\nTITLE: {site.club} club\nELEMENTS:\n  [0] input: \n  [1] button: join\n"
        f"  [2] a: home\nTEXT:\n  {site.club} club join home"
    )


@pytest.mark.parametrize(
    "path", ["/delta", "/delta/9", "/nowhere/40", "/delta/40/list/none", "/delta/40/catalogue?page=x", "/delta/40/cart"]
)
def test_unknown_addresses_are_not_found(path):
    assert page_at(BASE_URL + path).status == 404


def test_forms_are_encoded_as_browsers_do():
    form = Form("/s", "go", field="q", hidden=(("cart", "tea.oak"),))
    assert submit_path(form, "a b~*ü&") == "/s?cart=tea.oak&q=a+b%7E*%C3%BC%26"


def test_a_cart_is_kept_in_the_address():
    site = make_site("delta", 40)
    first, second = site.sold[:2]
    cart = page_at(f"{BASE_URL}{site.root}/shop/cart?cart={first}")
    shop = page_at(BASE_URL + cart.elements[0].block.path)
    entry = page_at(BASE_URL + next(e.block.path for e in shop.elements if e.label == second))
    assert submit_path(entry.elements[0].block, "") == f"{site.root}/shop/cart?cart={first}.{second}"


def test_the_server_sends_the_modelled_pages():
    with PracticeServer("127.0.0.1", 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            url = f"{server.base_url}/delta/40/search?q=tea"
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.read().decode() == html_text(page_at(url))
        finally:
            server.shutdown()
            thread.join()


def test_rows_have_the_shape_of_nemo_gym_rollout_rows(tmp_path):
    files = tmp_path / "data" / "train.jsonl", tmp_path / "data" / "validation.jsonl"
    assert write_rows(*files, BASE_URL + "/", 20, 10) == {"train": 20, "validation": 10}
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [len(part) for part in rows] == [20, 10]
    for row in rows[0] + rows[1]:
        roles = [message["role"] for message in row["responses_create_params"]["input"]]
        assert roles == ["system", "user"]
        assert row["initial_url"].startswith(BASE_URL + "/") and "//" not in row["initial_url"][len("http://") :]
        assert all(isinstance(value, str) for value in row["responses_create_params"]["metadata"].values())
        ((key, value),) = row["verifier_metadata"].items()
        assert value and (key != "final_url" or value.startswith(BASE_URL + "/"))


def _pages_around(task):
    """Return the start page, the page that the expert ends on, and the pages that links of both lead to."""
    pages = [page_at(BASE_URL + task.initial_url), expert_episode(task, BASE_URL).page]
    links = [e.block.path for page in pages for e in page.elements if e.kind == "a"]
    return pages + [page_at(BASE_URL + path) for path in links]


class _Reader(HTMLParser):
    """Collects title, visible text and interactive elements of a page."""

    def __init__(self):
        super().__init__()
        self.title, self.body, self.elements = "", "", []
        self._in_title = False

    def handle_starttag(self, tag, attrs):
        self._in_title = self._in_title or tag == "title"
        if tag in ("a", "button") or (tag == "input" and ("type", "hidden") not in attrs):
            self.elements.append(tag)

    def handle_endtag(self, tag):
        self._in_title = self._in_title and tag != "title"

    def handle_data(self, data):
        if self._in_title:
            self.title += data
        else:
            self.body += data
