"""Click through a report's page in Chromium and print what was seen, as JSON; runs in the server's environment.

    .venv-gym/bin/python tests/contract/report_clicks.py PAGE RETRIED FOREST HOSTILE OTHER

The last four are indices of attempts: one of a rollout with several, one with several contexts and discarded calls, one
with hostile texts, and one that the page does not hold turn by turn.
"""

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

WIDE = {"width": 1200, "height": 900}
PHONE = {"width": 390, "height": 844}


def focused(page: Page) -> str:
    """Return the id of what has the focus, or its tag and position in the list."""
    return page.evaluate(
        "(e => e.id || `${e.tagName.toLowerCase()} ${e.dataset.position ?? ''}`.trim())(document.activeElement)"
    )


def rows(page: Page) -> list[str]:
    """Return the texts of the list's rows."""
    return page.locator("#list tbody tr").all_inner_texts()


def overflow(page: Page) -> int:
    """Return how many pixels the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def walk_the_list(page: Page) -> dict[str, Any]:
    """Search, filter, order and walk the list with the keyboard."""
    seen: dict[str, Any] = {"all": page.inner_text("#found"), "first page": len(rows(page))}
    page.keyboard.press("/")
    seen["slash focuses"] = focused(page)
    page.keyboard.type("kettle session_lost")
    seen["search found"], seen["search rows"] = page.inner_text("#found"), rows(page)
    page.fill("#search", "no such episode")
    seen["nothing found"] = (page.inner_text("#found"), len(rows(page)))
    page.fill("#search", "")
    page.select_option("#outcome", label="invalid")
    page.select_option("#split", label="train")
    page.select_option("#order", "seconds")
    seen["invalid found"], seen["invalid rows"] = page.inner_text("#found"), rows(page)
    seen["seconds"] = [float(t) for t in page.locator("#list td[data-name=seconds]").all_inner_texts()]
    page.evaluate("document.getElementById('filters').reset(); applyFilters()")
    page.evaluate("document.activeElement.blur()")
    seen["walked"] = []
    for key in ("j", "j", "ArrowDown", "k", "ArrowUp"):
        page.keyboard.press(key)
        seen["walked"].append(focused(page))
    page.click("#after")
    seen["second page"] = page.inner_text("#page")
    page.click("#before")
    page.keyboard.press("j")
    first = page.locator("#list tr[aria-current] a").get_attribute("href")
    page.keyboard.press("Enter")
    seen["enter opens"] = (first, page.evaluate("location.hash"), focused(page), page.is_visible("#overview"))
    page.keyboard.press("n")
    seen["next episode"] = page.evaluate("location.hash")
    page.keyboard.press("p")
    seen["previous episode"] = page.evaluate("location.hash")
    page.keyboard.press("Escape")
    seen["escape"] = (page.is_visible("#overview"), page.is_visible("#viewer"), focused(page))
    return seen


def open_attempt(page: Page, index: int) -> None:
    """Open an attempt by its address within the page."""
    page.evaluate(f"location.hash = '#attempt-{index}'")
    page.wait_for_selector("#viewer:not([hidden])")


def turn_text(page: Page) -> dict[str, Any]:
    """Return what the viewer shows of the current turn."""
    return {"turn": page.inner_text("#turn"), "columns": page.locator("#columns .turn").all_inner_texts()}


def walk_an_episode(page: Page, retried: int, other: int) -> dict[str, Any]:
    """Open a retried rollout, walk its turns, add another rollout beside it."""
    open_attempt(page, retried)
    seen: dict[str, Any] = {
        "attempts": page.locator("#columns h3").all_inner_texts(),
        "choices": page.locator("#beside label").count(),
        "first turn": turn_text(page),
    }
    page.keyboard.press("ArrowRight")
    seen["right"] = turn_text(page)
    page.keyboard.press("j")
    seen["j"] = page.inner_text("#turn")
    page.keyboard.press("k")
    page.keyboard.press("ArrowLeft")
    seen["back at the first"] = (page.inner_text("#turn"), page.is_disabled("#previous-turn"))
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    seen["last turn"] = (page.inner_text("#turn"), page.is_disabled("#next-turn"))
    boxes = page.locator("#beside input")
    for number in range(boxes.count()):
        boxes.nth(number).check()
    seen["all beside"] = page.locator("#columns .episode").count()
    tops = page.locator("#columns .episode").evaluate_all("all => all.map(e => e.getBoundingClientRect().top)")
    seen["in one line"] = len(set(tops)) == 1
    open_attempt(page, other)
    seen["not held"] = page.inner_text("#columns")
    return seen


def draw_a_forest(page: Page, forest: int) -> dict[str, Any]:
    """Open an episode with several contexts and return what is drawn of its calls."""
    open_attempt(page, forest)
    column = page.locator(
        f"#columns .episode:has(svg):nth-child({page.evaluate('open.beside.indexOf(open.index) + 1')})"
    )
    seen = {
        "calls": column.locator("g[data-call]").evaluate_all(
            "all => all.map(e => ({id: e.dataset.call, words: [...e.querySelectorAll('text')].map(t => t.textContent), "
            "class: e.getAttribute('class'), x: +e.querySelector('rect').getAttribute('x'), "
            "y: +e.querySelector('rect').getAttribute('y')}))"
        ),
        "edges": column.locator("svg path").count(),
        "rows": column.locator(".rows tbody tr").all_inner_texts(),
    }
    column.locator(".rows button").first.focus()
    seen["marked"] = column.locator("g.of-row").evaluate_all("all => all.map(e => e.dataset.call)")
    return seen


def change_colours(page: Page) -> dict[str, Any]:
    """Return ground and text colours of the page and of a chart under each setting."""
    ask = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, "
        "getComputedStyle(document.querySelector('svg.chart text')).fill]"
    )
    page.evaluate("location.hash = '#success'")
    seen = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        seen[f"system {scheme}"] = page.evaluate(ask)
    page.click("#theme")
    seen["chosen light"], seen["button"] = page.evaluate(ask), page.inner_text("#theme")
    page.emulate_media(color_scheme="light")
    page.click("#theme")
    seen["chosen dark"] = page.evaluate(ask)
    return seen


def look_on_a_phone(page: Page, address: str, retried: int, forest: int) -> dict[str, int]:
    """Return by how many pixels each part is too wide."""
    page.set_viewport_size(PHONE)
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    seen = {"overview": overflow(page)}
    for name, index in (("retried", retried), ("forest", forest)):
        open_attempt(page, index)
        seen[name] = overflow(page)
    return seen


def main() -> int:
    """Print what was seen and return 0."""
    address = Path(sys.argv[1]).resolve().as_uri()
    retried, forest, hostile, other = map(int, sys.argv[2:6])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch()
        page = browser.new_page(viewport=WIDE)
        said: list[str] = []
        requests: list[str] = []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        seen: dict[str, Any] = {"list": walk_the_list(page)}
        seen["episode"] = walk_an_episode(page, retried, other)
        seen["forest"] = draw_a_forest(page, forest)
        open_attempt(page, hostile)
        seen["hostile"] = {"text": page.inner_text("#viewer"), "images": page.locator("img").count()}
        seen["colours"] = change_colours(page)
        seen["phone"] = look_on_a_phone(page, address, retried, forest)
        seen |= {"said": said, "requests": sorted({url for url in requests if url != address})}
        browser.close()
    sys.stdout.write(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
