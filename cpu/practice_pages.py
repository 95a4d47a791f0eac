"""The practice site as a model: which page stands at a URL, and what the browser environment shows of it.

The HTML that the server sends and the observation that the simulator shows are both made from `Page`, so a
demonstration in the simulator looks byte for byte like an episode in a real browser. A page is a function of its URL
alone (searches, pages of a catalogue and carts are in the query), so sessions can't disturb each other.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from html import escape
from urllib.parse import parse_qsl, quote_plus, urlsplit

ITEMS = (
    "tea bus cat map sun jam fox ink oak pie rug owl kettle lamp boat chair drum fork glove hat "
    "jar kite leaf mug nest pen quilt rope sock tent vase wheel yarn broom candle desk easel flute globe hammer"
).split()
CODES = (
    "kilo lima nova zeta echo alfa tango sigma omega gamma beta vega luna mars lyra orion polar comet quark boson "
    "radon xenon argon neon topaz ruby pearl amber coral ivory jade onyx opal quartz silver copper cobalt nickel "
    "zinc cedar"
).split()
PLACES = (
    "delta harbor meadow summit valley canyon forest island prairie desert "
    "lagoon glacier orchard village castle bridge garden tower market station"
).split()
NAMES = (
    "mia leo ana tom eva sam ida max zoe ben amy jon liv kai ada rex una gus ivy ned "
    "pia ron tia vic wes abe bea cal dot eli fay gil hal ira joy ken lou meg nat ola"
).split()
LABELS = ("next", "previous", "back", "home", "shop", "add", "join", "search")
"""Labels of elements that are no item."""

_CATALOGUE_PAGE_SIZE = 3


class Split(StrEnum):
    """Three sets of sites that share no site and no pair of words."""

    VALIDATION = "validation"
    TRAIN = "train"
    DEMONSTRATION = "demonstration"


SITE_NUMBERS = {Split.VALIDATION: range(10, 20), Split.TRAIN: range(20, 40), Split.DEMONSTRATION: range(40, 100)}
_RESIDUES = {Split.VALIDATION: (0,), Split.TRAIN: (1,), Split.DEMONSTRATION: (2, 3, 4)}


@dataclass(frozen=True)
class Site:
    """One small site: its words are drawn by its place and number."""

    place: str
    number: int
    listed: tuple[str, ...]
    """Items of the list."""
    catalogue: tuple[str, ...]
    """Items of the catalogue, in the order of its pages."""
    sold: tuple[str, ...]
    """Items of the shop."""
    codes: dict[str, str]
    """The code of every item of the site; the search finds these items."""
    club: str
    """The item that the site's club is named after."""

    @property
    def root(self) -> str:
        """Return the path of the site's home page."""
        return f"/{self.place}/{self.number}"

    @property
    def split(self) -> Split:
        """Return the split that the site belongs to."""
        return split_of_number(self.number)


def split_of_number(number: int) -> Split:
    """Return the split of the sites with this number.

    Raises:
        KeyError: no site has this number.
    """
    for split, numbers in SITE_NUMBERS.items():
        if number in numbers:
            return split
    raise KeyError(number)


def pairs_allowed(split: Split, first: int, second: int) -> bool:
    """Return whether sites of the split may put the words with these two indices together.

    An item meets a code, a place or a name in one split only, so no validation task repeats a combination that the
    policy was trained on, although every single word is familiar.
    """
    return (first + second) % 5 in _RESIDUES[split]


def names_for_club(site: Site) -> list[str]:
    """Return the names that may join the site's club in the site's split."""
    club = ITEMS.index(site.club)
    return [name for i, name in enumerate(NAMES) if pairs_allowed(site.split, club, i)]


@cache
def make_site(place: str, number: int) -> Site:
    """Return the site of a place and number, always the same one.

    Raises:
        KeyError: the place or the number is none of the practice site's.
    """
    if place not in PLACES:
        raise KeyError(place)
    split = split_of_number(number)
    rng = random.Random(f"practice site {place} {number}")
    place_index = PLACES.index(place)
    items = [item for i, item in enumerate(ITEMS) if pairs_allowed(split, i, place_index)]
    items = rng.sample(items, 8)
    codes = {}
    for item in items:
        fitting = [code for j, code in enumerate(CODES) if pairs_allowed(split, ITEMS.index(item), j)]
        codes[item] = rng.choice([code for code in fitting if code not in codes.values()])
    return Site(
        place=place,
        number=number,
        listed=tuple(rng.sample(items, rng.randint(3, 4))),
        catalogue=tuple(rng.sample(items, 2 * _CATALOGUE_PAGE_SIZE)),
        sold=tuple(rng.sample(items, rng.randint(3, 4))),
        codes=codes,
        club=rng.choice(items),
    )


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Link:
    """A link to a path of the site."""

    label: str
    path: str


@dataclass(frozen=True)
class Form:
    """A form sent by GET: perhaps one text field, hidden values, a button."""

    action: str
    button: str
    field: str | None = None
    hidden: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Element:
    """One interactive element: the tag and label that an observation shows, and the part of the page behind it."""

    kind: str
    label: str
    block: Link | Form


@dataclass(frozen=True)
class Page:
    """A page at its URL."""

    url: str
    title: str
    blocks: tuple[Text | Link | Form, ...]
    status: int = 200

    @property
    def elements(self) -> list[Element]:
        """Return the interactive elements in document order, as the environment numbers them."""
        found = []
        for block in self.blocks:
            if isinstance(block, Link):
                found.append(Element("a", block.label, block))
            elif isinstance(block, Form):
                if block.field is not None:
                    found.append(Element("input", "", block))
                found.append(Element("button", block.button, block))
        return found

    @property
    def text(self) -> str:
        """Return the visible text, whitespace collapsed: heading, paragraphs, labels of links and buttons."""
        words = [self.title]
        for block in self.blocks:
            match block:
                case Text():
                    words.append(block.text)
                case Form():
                    words.append(block.button)
                case _:
                    words.append(block.label)
        return " ".join(words)


def observation_text(page: Page) -> str:
    """Return the page as the browser environment's observation words it.

    Source: `Observation.render` in NeMo Gym 0.7.0, resources_servers/interactive_browser/browser/base.py.
    """
    lines = [f"URL: {page.url}", f"TITLE: {page.title}", "ELEMENTS:"]
    lines += [f"  [{i}] {element.kind}: {element.label}" for i, element in enumerate(page.elements)]
    return "\n".join([*lines, "TEXT:", f"  {page.text}"])


def html_text(page: Page) -> str:
    """Return the page as HTML."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(page.title)}</title></head>',
        f"<body><h1>{escape(page.title)}</h1>",
    ]
    parts += [_block_html(block) for block in page.blocks]
    return "\n".join([*parts, "</body></html>"])


def _block_html(block: Text | Link | Form) -> str:
    if isinstance(block, Text):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Link):
        return f'<p><a href="{escape(block.path)}">{escape(block.label)}</a></p>'
    inputs = [f'<input type="hidden" name="{escape(k)}" value="{escape(v)}">' for k, v in block.hidden]
    if block.field is not None:
        inputs.append(f'<input name="{escape(block.field)}" autocomplete="off">')
    return (
        f'<form action="{escape(block.action)}" method="get"><p>{"".join(inputs)}'
        f"<button>{escape(block.button)}</button></p></form>"
    )


def submit_path(form: Form, typed: str) -> str:
    """Return the path that a browser opens when the form is sent with this text in its field."""
    values = [*form.hidden, *([(form.field, typed)] if form.field is not None else [])]
    return form.action + "?" + "&".join(f"{_form_encode(k)}={_form_encode(v)}" for k, v in values)


def _form_encode(text: str) -> str:
    # Browsers leave "*" alone and encode "~"; quote_plus has it the other way round.
    return quote_plus(text, safe="*").replace("~", "%7E")


def page_at(url: str) -> Page:
    """Return the page at an absolute URL of the practice site; a plain not-found page where there is none."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    steps = [step for step in parts.path.split("/") if step]
    if not steps:
        return Page(url, "practice site", (Link("start", f"/{PLACES[0]}/{SITE_NUMBERS[Split.DEMONSTRATION][0]}"),))
    try:
        site = make_site(steps[0], int(steps[1]))
        title, blocks = _render(site, steps[2:], query)
    except (KeyError, IndexError, ValueError):
        return Page(url, "not found", (Text("no such page"),), status=404)
    return Page(url, title, tuple(blocks))


def _render(site: Site, steps: list[str], query: dict[str, str]) -> tuple[str, list[Text | Link | Form]]:
    if not steps:
        sections = ("list", "catalogue", "search", "shop", "club")
        return f"{site.place} home", [Link(name, f"{site.root}/{name}") for name in sections]
    if steps[1:]:
        return _SUBPAGES[steps[0]](site, steps[1], query)
    return _SECTIONS[steps[0]](site, query)


def _list(site: Site, query: dict[str, str]) -> tuple[str, list]:
    return f"{site.place} list", [Link(item, f"{site.root}/list/{item}") for item in site.listed]


def _list_entry(site: Site, item: str, query: dict[str, str]) -> tuple[str, list]:
    return item, [Text(f"code {site.codes[item]}"), Link("back", f"{site.root}/list")]


def _catalogue(site: Site, query: dict[str, str]) -> tuple[str, list]:
    number = int(query.get("page", "1"))
    first = (number - 1) * _CATALOGUE_PAGE_SIZE
    shown = site.catalogue[first : first + _CATALOGUE_PAGE_SIZE] if number > 0 else ()
    if not shown:
        raise KeyError(number)
    blocks = [Link(item, f"{site.root}/catalogue/{item}") for item in shown]
    if number > 1:
        blocks.append(Link("previous", f"{site.root}/catalogue?page={number - 1}"))
    if first + _CATALOGUE_PAGE_SIZE < len(site.catalogue):
        blocks.append(Link("next", f"{site.root}/catalogue?page={number + 1}"))
    return f"{site.place} catalogue", blocks


def _catalogue_entry(site: Site, item: str, query: dict[str, str]) -> tuple[str, list]:
    page = site.catalogue.index(item) // _CATALOGUE_PAGE_SIZE + 1
    return item, [Text(f"page {page}"), Link("back", f"{site.root}/catalogue?page={page}")]


def _search(site: Site, query: dict[str, str]) -> tuple[str, list]:
    form = Form(f"{site.root}/search", "search", field="q")
    if "q" not in query:
        return f"{site.place} search", [form, Link("home", site.root)]
    wanted = " ".join(query["q"].split()).lower()
    found = f"{wanted} code {site.codes[wanted]}" if wanted in site.codes else "nothing found"
    return "results", [Text(found), Link("back", f"{site.root}/search")]


def _shop(site: Site, query: dict[str, str]) -> tuple[str, list]:
    cart = _cart_query(query)
    return f"{site.place} shop", [Link(item, f"{site.root}/shop/{item}{cart}") for item in site.sold]


def _shop_entry(site: Site, item: str, query: dict[str, str]) -> tuple[str, list]:
    if item == "cart":
        return "cart", [Text(" ".join(_cart(query)) or "empty"), Link("shop", f"{site.root}/shop{_cart_query(query)}")]
    site.sold.index(item)
    filled = ".".join([*_cart(query), item])
    form = Form(f"{site.root}/shop/cart", "add", hidden=(("cart", filled),))
    return item, [form, Link("back", f"{site.root}/shop{_cart_query(query)}")]


def _cart(query: dict[str, str]) -> list[str]:
    return [item for item in query.get("cart", "").split(".") if item in ITEMS]


def _cart_query(query: dict[str, str]) -> str:
    return f"?cart={'.'.join(_cart(query))}" if _cart(query) else ""


def _club(site: Site, query: dict[str, str]) -> tuple[str, list]:
    form = Form(f"{site.root}/club/member", "join", field="name")
    return f"{site.club} club", [form, Link("home", site.root)]


def _club_member(site: Site, step: str, query: dict[str, str]) -> tuple[str, list]:
    if step != "member":
        raise KeyError(step)
    name = " ".join(query["name"].split()) or "nobody"
    return f"{site.club} club", [Text(f"member {name}"), Link("home", site.root)]


_SECTIONS = {"list": _list, "catalogue": _catalogue, "search": _search, "shop": _shop, "club": _club}
_SUBPAGES = {"list": _list_entry, "catalogue": _catalogue_entry, "shop": _shop_entry, "club": _club_member}
