"""The practice site for the fake environment: browsers that walk cpu.practice_pages without a browser or a server.

    async with FakeEnvironment(browser_factory=practice_browsers("http://127.0.0.1:8077")) as environment:
        ...  # rows: task.row("http://127.0.0.1:8077")

An observation reads as the real server's on the served site does; every fault of the kit works on these browsers too.
For tests and benchmarks that train, `PracticeEnvironment` runs it as a program of its own, on two sites: rows of
TRAIN_SITE, whose seeds fail in a share of the sessions, and rows of VALIDATION_SITE, whose never do.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import quote, urljoin, urlsplit

from cpu import practice_pages
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.fake_site import GYM_SITE, Button, Dead, FakeBrowser, Field, Link, Page

# The small policy has read addresses of this form alone; nothing is served at these.
TRAIN_SITE, VALIDATION_SITE = "http://127.0.0.1:8077", "http://127.0.0.1:8078"
LAUNCH_REFUSED = "Error('BrowserType.launch: Target page, context or browser has been closed')"


class PracticeEnvironment:
    """The fake environment over the practice site as a running program; leaving the block ends it."""

    def __init__(
        self, failing_share: float = 0.0, seed: int = 0, failing_first: int = 0, observe_s: float = 0.0
    ) -> None:
        """Start it; `failing_first` seeds fail before the share applies, an observe takes `observe_s` seconds."""
        root = Path(__file__).resolve().parent.parent
        command = [
            sys.executable,
            "-m",
            "tests.practice_environment",
            *map(str, (failing_share, seed, failing_first, observe_s)),
        ]
        self._process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.url = self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        self._process.stdin.close()
        self._process.stdout.close()

    def stop(self) -> None:
        """End the program at once; from now on its address refuses connections."""
        self._process.kill()
        self._process.wait()


async def _serve(failing_share: float, seed: int, failing_first: int, observe_s: float) -> None:
    fault = Fault(Do.STATUS, path="/seed_session", site=TRAIN_SITE, text=LAUNCH_REFUSED)
    faults = [replace(fault, times=failing_first), replace(fault, share=failing_share)]
    browsers = practice_browsers(TRAIN_SITE, VALIDATION_SITE)
    latency_s = {"/browser_observe": observe_s}
    async with FakeEnvironment(browser_factory=browsers, faults=faults, seed=seed, latency_s=latency_s) as environment:
        print(environment.url, flush=True)  # noqa: T201 - a program whose output is its address
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def practice_browsers(*base_urls: str) -> Callable[[], PracticeBrowser]:
    """Return the browser factory for practice sites that seem to be served at these addresses (no slash at the end)."""
    origins = tuple(urlsplit(url)[:2] for url in base_urls)
    return lambda: PracticeBrowser(GYM_SITE, origins=origins)


@dataclass(frozen=True)
class _Submit(Button):
    """A form's button; `field` names the page's field that goes with it."""

    form: practice_pages.Form | None = None
    field: str | None = None


@dataclass
class PracticeBrowser(FakeBrowser):
    """A browser to which the practice site's addresses are the page model's; all others are the fake site's."""

    origins: tuple[tuple[str, str], ...] = ()
    """Scheme and host with port of each address of the practice site."""

    def click(self, element_id: int) -> None:
        element = self._require(element_id)
        if not isinstance(element, _Submit):
            super().click(element_id)
            return
        self._require_alive("ElementHandle.click")
        self._follow(urljoin(self.url, practice_pages.submit_path(element.form, self.values.get(element.field, ""))))

    def _look_up(self, url: str) -> Page | Dead:
        if urlsplit(url)[:2] not in self.origins:
            return super()._look_up(url)
        page = practice_pages.page_at(url)
        return Page(page.title, elements=_elements(page), whole_text=page.text)

    def _show(self, url: str, page: Page) -> None:
        super()._show(_as_shown(url), page)


def _elements(page: practice_pages.Page) -> tuple[Link | Field | Button, ...]:
    elements: list[Link | Field | Button] = []
    field = None
    for number, element in enumerate(page.elements):
        match element.block:
            case practice_pages.Link(path=path):
                elements.append(Link(element.label, path))
            case form if element.kind == "input":
                field = f"{number}"
                elements.append(Field(field))
            case form:
                elements.append(_Submit(element.label, form=form, field=field if form.field is not None else None))
    return tuple(elements)


def _as_shown(url: str) -> str:
    """Return an address as a browser shows it: with a path, and what no address may hold percent-encoded."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return url
    return parts._replace(
        path=quote(parts.path or "/", safe="/%:@!$&'()*+,;=~"), query=parts.query.replace(" ", "%20")
    ).geturl()


if __name__ == "__main__":
    share, *counts, observe = [*sys.argv[1:], *["0"] * (5 - len(sys.argv))]
    asyncio.run(_serve(float(share), *map(int, counts), float(observe)))
