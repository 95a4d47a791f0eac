"""What stands in a report's page, read back with an HTML parser."""

import json
from html.parser import HTMLParser
from typing import Any


class PageReader(HTMLParser):
    """Collects the tables by caption, the scripts by id, and every tag that was opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        """Texts of elements with an id."""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._rows: list[list[str]] = []
        self._caption: list[str] | None = None
        self._script = ""
        self._cell = False
        self._id = ""
        self.feed(page)
        self.close()

    def index(self) -> dict[str, Any]:
        """Return the list of all attempts."""
        return json.loads(self.scripts["index"])

    def details(self) -> dict[int, dict[str, Any]]:
        """Return the lines that the page holds turn by turn, by index of the attempt."""
        texts = {name: text for name, text in self.scripts.items() if name.startswith("details-")}
        return {int(name.removeprefix("details-")): json.loads(text) for name, text in texts.items()}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self._id = attributes.get("id") or ""
        match tag:
            case "table":
                self._rows = []
            case "caption":
                self._caption = []
            case "tr":
                self._rows.append([])
            case "th" | "td":
                self._cell = True
                self._rows[-1].append("")
            case "script":
                self._script = attributes.get("id") or "program"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self._cell = False
        if tag == "caption":
            self.tables["".join(self._caption or [])] = self._rows
            self._caption = None
        elif tag == "script":
            self._script = ""
        self._cell = False
        self._id = ""

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif self._caption is not None:
            self._caption.append(data)
        elif self._cell:
            self._rows[-1][-1] = (self._rows[-1][-1] + data).strip()
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data
