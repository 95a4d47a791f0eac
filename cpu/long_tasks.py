"""Long tasks on the practice site: several items are bought one after another, in nine turns without a mistake.

They stand beside the tasks of `cpu/practice_tasks.py` and never mix with them: the demo's rows stay what they are.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import parse_qsl, urlsplit

from cpu.practice_pages import PLACES, SITE_NUMBERS, Site, Split, make_site
from cpu.practice_tasks import Task

ORDER_SIZE = 3
"""Items of an order; every shop sells at least as many."""

BETWEEN_ITEMS = ", then "


class LongTaskKind(StrEnum):
    """What a long task exercises."""

    ORDER = "order"


@dataclass(frozen=True)
class OrderTask(Task):
    """A task to buy some items in order; a wrong item can't be taken out of the cart again."""

    wanted: tuple[str, ...] = ()

    def left(self, cart: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return what is still to be bought, or None if the cart can't become the order any more."""
        return self.wanted[len(cart) :] if cart == self.wanted[: len(cart)] else None


def cart_at(url: str) -> tuple[str, ...]:
    """Return the items in the cart, which stand in the address of every page of a shop."""
    cart = dict(parse_qsl(urlsplit(url).query)).get("cart", "")
    return tuple(cart.split(".")) if cart else ()


def make_order(site: Site, rng: random.Random) -> OrderTask:
    """Return an order at the site's shop, its items and their order drawn by rng."""
    wanted = tuple(rng.sample(site.sold, ORDER_SIZE))
    cart = ".".join(wanted)
    return OrderTask(
        task_id=f"{site.split}-{LongTaskKind.ORDER}-{site.place}-{site.number}-{cart}",
        question=f"Buy {BETWEEN_ITEMS.join(wanted)} in the {site.place} shop.",
        initial_url=f"{site.root}/shop",
        verifier_metadata={"url_contains": f"/shop/cart?cart={cart}"},
        kind=LongTaskKind.ORDER,
        split=site.split,
        site=site,
        target=cart,
        wanted=wanted,
    )


def random_order(split: Split, rng: random.Random) -> OrderTask:
    """Return an order on a random site of the split."""
    return make_order(make_site(rng.choice(PLACES), rng.choice(SITE_NUMBERS[split])), rng)


def make_orders(split: Split, count: int) -> list[OrderTask]:
    """Return distinct orders of the split, always the same ones.

    Raises:
        ValueError: the split has fewer distinct orders than count.
    """
    rng = random.Random(f"practice orders {split}")
    orders: dict[str, OrderTask] = {}
    for _ in range(100 * count):
        if len(orders) == count:
            break
        order = random_order(split, rng)
        orders.setdefault(order.question, order)
    if len(orders) < count:
        raise ValueError(f"the split {split} has fewer than {count} distinct orders")
    return list(orders.values())
