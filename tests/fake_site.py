"""A web without a browser: pages as Python data, and a browser's view of them as interactive_browser renders it.

Mirrors nemo-gym 0.7.0, resources_servers/interactive_browser/browser/{base,page}.py, and Chromium's error texts in
tests/data/recordings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlencode, urljoin, urlsplit

MAX_ELEMENTS = 50
MAX_TEXT_CHARS = 2000
GYM_FILES = "file:///GYM/resources_servers/interactive_browser/"
UNSAFE_PORTS = (1, 7, 9, 25)


class BrowserError(Exception):
    """What Playwright raises; the text is what the server passes on. `kind` is the name of Playwright's class."""

    kind = "Error"


class BrowserTimeoutError(BrowserError):
    """Playwright's TimeoutError."""

    kind = "TimeoutError"


class BrowserClosedError(BrowserError):
    """Playwright's TargetClosedError."""

    kind = "TargetClosedError"


class DriverGoneError(BrowserError):
    """What asyncio raises when Playwright's driver process is gone."""

    kind = "RuntimeError"


@dataclass(frozen=True)
class Link:
    """An `a` element."""

    label: str
    href: str
    tag: str = "a"


@dataclass(frozen=True)
class Field:
    """An `input` element. What is typed goes to `name` in the form's query; a value of the page itself shows."""

    name: str
    value: str = ""
    disabled: bool = False
    tag: str = "input"


@dataclass(frozen=True)
class Button:
    """A `button` element: submits the page's fields to `action` (GET), or sets the title, with {field} filled in."""

    label: str
    action: str | None = None
    title: str | None = None
    tag: str = "button"


@dataclass(frozen=True)
class Page:
    """One page. The visible text is `text` and then the labels of links and buttons, as on a page without styling."""

    title: str
    text: str = ""
    elements: tuple[Link | Field | Button, ...] = ()
    whole_text: str | None = None
    """All of the visible text, where it stands in another order than that; None: text and labels."""


@dataclass(frozen=True)
class Dead:
    """An address that does not load: the network error, or "hang" for a page that never answers."""

    error: str


Site = Mapping[str, Page | Dead]

GYM_SITE: Site = {
    "about:blank": Page(""),
    f"{GYM_FILES}site/index.html": Page(
        "Home", "Lexmount Test Home", (Link("Go to form", "form.html"), Link("About", "about.html"))
    ),
    f"{GYM_FILES}site/form.html": Page("Form", "Login Form", (Field("user"), Button("Submit", title="Welcome {user}"))),
    f"{GYM_FILES}site/about.html": Page("About", "About Lexmount Secret code: ALPHA-42"),
}
"""The pages that ship with interactive_browser."""


class Browser(Protocol):
    """What the environment needs of a browser: FakeBrowser's methods, raising BrowserError where Playwright would."""

    url: str
    title: str
    death: str | None

    def goto(self, url: str) -> None: ...

    def observe(self, max_elements: int = ...) -> str: ...

    def click(self, element_id: int) -> None: ...

    def type(self, element_id: int, text: str) -> None: ...

    def text(self) -> str: ...


@dataclass
class FakeBrowser:
    """One browser with one page; raises BrowserError where Playwright would."""

    site: Site
    url: str = "about:blank"
    page: Page = Page("")
    title: str = ""
    values: dict[str, str] = field(default_factory=dict)
    handles: list[Link | Field | Button] = field(default_factory=list)
    death: str | None = None
    """None, or how it died: "closed" (process killed), "crashed" (renderer killed), "driver" (driver killed)."""

    def goto(self, url: str) -> None:
        shown = f"{url}/" if url == "://".join(_origin(url)) else url
        log = f'\nCall log:\n  - navigating to "{shown}", waiting until "domcontentloaded"\n'
        self._require_alive("Page.goto", log)
        if url.startswith("chrome://crash"):
            self.death = "crashed"
            raise BrowserError(f"Page.goto: net::ERR_ABORTED at {url}{log}")
        target = self._look_up(url)
        if isinstance(target, Page):
            self._show(url, target)
        elif target.error == "hang":
            raise BrowserTimeoutError(f"Page.goto: Timeout 30000ms exceeded.{log}")
        elif target.error.startswith("net::"):
            self._show_error_page(url)
            raise BrowserError(f"Page.goto: {target.error} at {url}{log}")
        else:
            raise BrowserError(f"Page.goto: {target.error}{log}")

    def observe(self, max_elements: int = MAX_ELEMENTS) -> str:
        self.handles.clear()
        self._require_alive("Locator.count")
        self.handles.extend(self.page.elements[:max_elements])
        lines = [f"URL: {self.url}", f"TITLE: {self.title}", "ELEMENTS:"]
        lines += [f"  [{i}] {e.tag}: {_name(e)}" for i, e in enumerate(self.handles)]
        if len(self.page.elements) > max_elements:
            lines.append(f"  ... (truncated at {max_elements} elements)")
        if text := self.text():
            lines += ["TEXT:", f"  {text[:MAX_TEXT_CHARS]}"]
            if len(text) > MAX_TEXT_CHARS:
                lines.append("  ... (truncated)")
        return "\n".join(lines)

    def text(self) -> str:
        if self.page.whole_text is not None:
            return self.page.whole_text
        labels = [e.label for e in self.page.elements if not isinstance(e, Field)]
        return " ".join(" ".join([self.page.text, *labels]).split())

    def click(self, element_id: int) -> None:
        element = self._require(element_id)
        self._require_alive("ElementHandle.click")
        if isinstance(element, Link):
            self._follow(urljoin(self.url, element.href))
        elif isinstance(element, Button) and element.title is not None:
            fields = {e.name: e.value for e in self.page.elements if isinstance(e, Field)}
            self.title = element.title.format(**{**fields, **self.values})
        elif isinstance(element, Button) and element.action is not None:
            fields = {e.name: self.values.get(e.name, e.value) for e in self.page.elements if isinstance(e, Field)}
            self._follow(f"{urljoin(self.url, element.action)}?{urlencode(fields)}")

    def type(self, element_id: int, text: str) -> None:
        element = self._require(element_id)
        self._require_alive("ElementHandle.fill")
        log = (
            f'\nCall log:\n    - fill("{text}")\n  - attempting fill action\n'
            "    - waiting for element to be visible, enabled and editable\n"
        )
        if not isinstance(element, Field):
            kinds = "<input>, <textarea>, <select> or [contenteditable]"
            role = "does not have a role allowing [aria-readonly]"
            raise BrowserError(f"ElementHandle.fill: Error: Element is not an {kinds} and {role}{log}")
        if element.disabled:
            raise BrowserTimeoutError(
                f"ElementHandle.fill: Timeout 5000ms exceeded.{log}      - element is not enabled\n"
            )
        self.values[element.name] = text

    def _require(self, element_id: int) -> Link | Field | Button:
        if not 0 <= element_id < len(self.handles):
            raise BrowserError(f"'element_id {element_id} not in last observation; call browser_observe first'")
        return self.handles[element_id]

    def _require_alive(self, method: str, log: str = "") -> None:
        if self.death == "closed":
            raise BrowserClosedError(f"{method}: Target page, context or browser has been closed")
        if self.death == "crashed":
            what = f"Page crashed{log}" if method == "Page.goto" else "Target crashed "
            raise BrowserError(f"{method}: {what}")
        if self.death == "driver":
            transport = "<WriteUnixTransport closed=True reading=False 0x7f9934ed2400>"
            raise DriverGoneError(f"{method}: unable to perform operation on {transport}; the handler is closed")

    def _follow(self, url: str) -> None:
        """Load a page after a click, which Playwright reports as done even where the page does not load."""
        target = self._look_up(url)
        if isinstance(target, Page):
            self._show(url, target)
        elif target.error == "hang":
            done = "    - click action done\n    - waiting for scheduled navigations to finish\n"
            raise BrowserTimeoutError(f"ElementHandle.click: Timeout 5000ms exceeded.\nCall log:\n{done}")
        else:
            self._show_error_page(url)

    def _show(self, url: str, page: Page) -> None:
        self.url, self.page, self.title, self.values = url, page, page.title, {}

    def _show_error_page(self, url: str) -> None:
        page = Page(urlsplit(url).hostname or url, "This site can’t be reached", (Button("Reload"),))
        self._show("chrome-error://chromewebdata/", page)

    def _look_up(self, url: str) -> Page | Dead:
        if url in self.site:
            return self.site[url]
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return Dead("Protocol error (Page.navigate): Cannot navigate to invalid URL")
        if parts.scheme == "file":
            return Dead("net::ERR_FILE_NOT_FOUND")
        if parts.scheme in ("http", "https"):
            if any(_origin(known) == _origin(url) for known in self.site):
                return Page("404 page", "nope")
            if port in UNSAFE_PORTS:
                return Dead("net::ERR_UNSAFE_PORT")
            refused = parts.hostname in ("127.0.0.1", "localhost")
            return Dead("net::ERR_CONNECTION_REFUSED" if refused else "net::ERR_NAME_NOT_RESOLVED")
        if parts.scheme:
            return Dead("net::ERR_ABORTED")
        return Dead("Protocol error (Page.navigate): Cannot navigate to invalid URL")


def _name(element: Link | Field | Button) -> str:
    return " ".join((element.value if isinstance(element, Field) else element.label).split())[:80]


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
