"""A shop: departments, products with tabs, a cart, three steps to an order, orders, an account."""
# ruff: noqa: D102 - overrides keep the contract that the base class documents

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from envs.contract.actions import Action
from envs.suites.embedded.app import App
from envs.suites.embedded.apps.application import AppScene, Page, Question, Way, paragraph
from envs.suites.embedded.controls import Button, CheckBox, radios, tabs
from envs.suites.embedded.menus import Entry
from envs.suites.embedded.tasks import words
from envs.suites.embedded.tasks.desk import reach
from envs.suites.embedded.widgets import Gap, Label, Sized, Widget, column, row

DEPARTMENTS: Mapping[str, tuple[str, ...]] = {
    "Kitchen": ("Bread knife", "Egg timer", "Frying pan", "Kettle", "Tea pot", "Whisk"),
    "Garden": ("Bird house", "Flower pot", "Garden hose", "Rake", "Spade", "Watering can"),
    "Office": ("Desk lamp", "Notebook", "Paper clips", "Pencil case", "Stapler", "Wall clock"),
    "Sport": ("Basketball", "Bike lock", "Head torch", "Rope", "Swim cap", "Yoga mat"),
}
DEPARTMENT_OF = {product: name for name, products in DEPARTMENTS.items() for product in products}
ABOUT = ("Details", "Reviews", "Delivery")
PAYMENTS = ("Card", "Invoice", "Voucher")
SPEEDS = ("Standard", "Express")
MOST = 9  # pieces of one product in the cart
HOME = Page("home")


class ShopScene(AppScene):
    """The shop with a task, which a subclass plans and solves."""

    title = "Shop"
    name = "shop"
    first = HOME

    def begin(self) -> None:
        rng = self.rng
        everything = [product for products in DEPARTMENTS.values() for product in products]
        shelf = [rng.sample(products, rng.randint(4, 6)) for products in DEPARTMENTS.values()]
        self.shelves = dict(zip(DEPARTMENTS, shelf, strict=True))
        self.prices = {product: rng.randint(3, 60) for product in everything}
        in_stock = [product for products in self.shelves.values() for product in products]
        sample = rng.sample(in_stock, 4)
        self.cart = {product: rng.randint(1, 3) for product in sample[:2]}
        self.wishes = sample[2:3]
        numbers = rng.sample(range(1000, 9999), 3)
        self.orders = {
            str(number): rng.choice(["On its way", "Packed"]) for number in sorted(numbers)
        }
        self.placed: list[tuple[str, str, str]] = []  # town, payment, speed
        self.towns = rng.sample(words.CITIES, 3)
        self.newsletter = rng.random() < 0.5
        self.has_account = True
        self.town, self.payment, self.speed = self.towns[0], PAYMENTS[0], SPEEDS[0]

    def facts(self) -> dict[str, Any]:
        return {
            **{f"{count} in the cart: {product}": True for product, count in self.cart.items()},
            **{f"order {number}": state for number, state in self.orders.items()},
            "wish list": sorted(self.wishes),
            "new orders": list(self.placed),
            "newsletter": self.newsletter,
            "account": self.has_account,
        }

    def some_product(self) -> str:
        """Return a product that is neither in the cart nor on the wish list."""
        return self.rng.choice(
            [
                product
                for products in self.shelves.values()
                for product in products
                if product not in self.cart and product not in self.wishes
            ]
        )

    # --- the pages ----------------------------------------------------------------------------------

    def contents(self) -> Mapping[str, Callable[[str], Widget]]:
        return {
            "home": self._home,
            "department": self._department,
            "product": self._product,
            "reviews": self._reviews,
            "delivery": self._delivery,
            "cart": self._cart,
            "address": self._address,
            "payment": self._payment,
            "review order": self._review,
            "thank you": self._thanks,
            "orders": self._orders,
            "order": self._order,
            "wish list": self._wish_list,
            "account": self._account,
            "no account": self._no_account,
        }

    def heading(self) -> str:
        if self.page.kind == "order":
            return f"Order {self.page.subject}"
        return super().heading()

    def menus(self) -> Mapping[str, Sequence[Entry]]:
        def entry(kind: str) -> Entry:
            return Entry(f"do.{kind}", kind.capitalize(), partial(self.go, Page(kind)))

        return {
            "Shop": (entry("wish list"), entry("cart")),
            "You": (entry("orders"), entry("account")),
        }

    def questions(self) -> Mapping[str, Question]:
        cancel = "Cancel order {subject}?"
        return {
            "cancel": Question("Cancel order", cancel, "Cancel order", self._cancel),
            "pay": Question("Pay", "Place this order with costs?", "Pay", self._pay),
            "delete": Question("Delete account", "Delete it for good?", "Delete", self._close),
        }

    def _home(self, _: str) -> Widget:
        rows = [
            self.link(
                f"department.{department}",
                department,
                Page("department", department),
                icon="folder",
            )
            for department in DEPARTMENTS
        ]
        cart = Button(
            "open.cart", f"Cart ({sum(self.cart.values())})", partial(self.go, Page("cart"))
        )
        wishes = Button("open.wishes", "Wish list", partial(self.go, Page("wish list")))
        orders = Button("open.orders", "Orders", partial(self.go, Page("orders")))
        return column(
            row(cart, wishes, orders, gap=6), Label("Departments", muted=True), *rows, gap=6, pad=10
        )

    def _department(self, name: str) -> Widget:
        rows = [
            self.link(
                f"product.{product}",
                product,
                Page("product", product),
                note=f"{self.prices[product]} EUR",
            )
            for product in self.shelves[name]
        ]
        return column(*rows, gap=0)

    def _tabs(self, product: str, active: str) -> Widget:
        kinds = dict(zip(ABOUT, ("product", "reviews", "delivery"), strict=True))
        return tabs("tab", ABOUT, active, lambda label: self.show(Page(kinds[label], product)))

    def _product(self, product: str) -> Widget:
        wished = product in self.wishes
        wish = Button("wish", "Forget" if wished else "Wish for it", partial(self._wish, product))
        return column(
            self._tabs(product, "Details"),
            column(
                Label(f"{self.prices[product]} EUR", size=1.5),
                paragraph(f"From our department {DEPARTMENT_OF[product]}, made to last for years."),
                row(
                    Button("add", "Put into cart", partial(self._add, product), primary=True), wish
                ),
                gap=12,
                pad=12,
            ),
            gap=0,
        )

    def _reviews(self, product: str) -> Widget:
        texts = ("Does what it should.", "Came late, but it is fine.", "I would buy it again.")
        lines = [
            paragraph(f"{stars} of 5: {text}") for stars, text in zip((4, 3, 5), texts, strict=True)
        ]
        return column(self._tabs(product, "Reviews"), column(*lines, gap=10, pad=12), gap=0)

    def _delivery(self, product: str) -> Widget:
        text = "Standard takes four days, Express one day. It can be sent back for a month."
        return column(
            self._tabs(product, "Delivery"), column(paragraph(text), gap=10, pad=12), gap=0
        )

    def _cart(self, _: str) -> Widget:
        gap = Gap()
        lines: list[Widget] = [
            row(
                Sized(Label(product), 120),
                Button(f"less.{product}", "-", partial(self._count, product, -1)),
                Sized(Label(str(count)), 16),
                Button(f"more.{product}", "+", partial(self._count, product, 1)),
                Button(f"take.{product}", "Remove", partial(self._take, product), pad=7),
            )
            for product, count in self.cart.items()
        ]
        total = sum(self.prices[product] * count for product, count in self.cart.items())
        start = Button(
            "checkout",
            "Continue",
            partial(self.go, Page("address")),
            primary=True,
            enabled=bool(self.cart),
        )
        if not lines:
            lines = [Label("The cart is empty.", muted=True)]
        return column(
            *lines, row(Label(f"Total {total} EUR"), gap, start, grow=[gap]), gap=8, pad=12
        )

    def _address(self, _: str) -> Widget:
        choices = radios("town", self.towns, self.town, partial(setattr, self, "town"))
        return self._step("Where to?", choices, Page("payment"))

    def _payment(self, _: str) -> Widget:
        ways = radios("payment", PAYMENTS, self.payment, partial(setattr, self, "payment"))
        speeds = radios("speed", SPEEDS, self.speed, partial(setattr, self, "speed"))
        return self._step("How will you pay, and how fast?", [*ways, *speeds], Page("review order"))

    def _step(self, text: str, choices: Sequence[Widget], after: Page) -> Widget:
        onwards = Button("next", "Next", partial(self.go, after), primary=True)
        return column(Label(text), *choices, onwards, gap=8, pad=12, align="start")

    def _review(self, _: str) -> Widget:
        summary = (
            f"{sum(self.cart.values())} pieces to {self.town}, by {self.payment}, {self.speed}"
        )
        pay = Button("pay", "Pay", partial(self.ask, "pay"), primary=True, enabled=bool(self.cart))
        return column(paragraph(summary), pay, gap=12, pad=12, align="start")

    def _thanks(self, _: str) -> Widget:
        onwards = Button("onwards", "Start page", partial(self.home, HOME))
        return column(Label("Your order has been placed.", size=1.2), onwards, gap=14, pad=20)

    def _orders(self, _: str) -> Widget:
        rows = [
            self.link(f"order.{number}", f"Order {number}", Page("order", number), note=state)
            for number, state in self.orders.items()
        ]
        return column(*rows, gap=0)

    def _order(self, number: str) -> Widget:
        state = self.orders[number]
        cancel = Button(
            "cancel", "Cancel order", partial(self.ask, "cancel"), enabled=state != "Cancelled"
        )
        return column(Label(state, size=1.2), cancel, gap=12, pad=14, align="start")

    def _wish_list(self, _: str) -> Widget:
        rows = [
            self.link(f"product.{product}", product, Page("product", product))
            for product in self.wishes
        ]
        return column(*rows, gap=0) if rows else Label("  Nothing here.", muted=True)

    def _account(self, _: str) -> Widget:
        return column(
            CheckBox("newsletter", "Send me the newsletter", self.newsletter, self._subscribe),
            Button("delete", "Delete account", partial(self.ask, "delete")),
            gap=14,
            pad=14,
            align="start",
        )

    def _no_account(self, _: str) -> Widget:
        return column(Label("Your account is gone.", size=1.3), gap=10, pad=30)

    # --- handlers -------------------------------------------------------------------------------------

    def _add(self, product: str) -> None:
        self.cart[product] = min(MOST, self.cart.get(product, 0) + 1)
        self.note = f"{product} is in the cart."

    def _wish(self, product: str) -> None:
        if product in self.wishes:
            self.wishes.remove(product)
        else:
            self.wishes.append(product)

    def _count(self, product: str, by: int) -> None:
        self.cart[product] = min(max(1, self.cart[product] + by), MOST)

    def _take(self, product: str) -> None:
        del self.cart[product]

    def _pay(self) -> None:
        self.placed.append((self.town, self.payment, self.speed))
        self.cart.clear()
        self.home(Page("thank you"))

    def _cancel(self) -> None:
        self.orders[self.page.subject] = "Cancelled"

    def _subscribe(self) -> None:
        self.newsletter = not self.newsletter

    def _close(self) -> None:
        self.has_account = False
        self.home(Page("no account"))

    # --- the oracle -----------------------------------------------------------------------------------

    def way(self, page: Page) -> Way:
        match page.kind:
            case "department":
                return Way(HOME, f"department.{page.subject}")
            case "product":
                parent = Page("department", DEPARTMENT_OF[page.subject])
                return Way(parent, f"product.{page.subject}")
            case "cart":
                return Way(HOME, "open.cart")
            case "orders":
                return Way(HOME, "open.orders")
            case "order":
                return Way(Page("orders"), f"order.{page.subject}")
            case "address":
                return Way(Page("cart"), "checkout")
            case "payment":
                return Way(Page("address"), "next")
            case "review order":
                return Way(Page("payment"), "next")
            case "account":
                return Way(HOME, "do.account", menu="You")
            case _:
                return Way(HOME, "onwards")


class AddScene(ShopScene):
    """Put a product into the cart."""

    def plan(self) -> None:
        self.product = self.some_product()
        self.goal[f"1 in the cart: {self.product}"] = True
        self.instruction = f"Put one {self.product} ({DEPARTMENT_OF[self.product]}) into the cart."

    def move(self, app: App) -> Action | None:
        if self.cart.get(self.product, 0) > 1:
            return self.to(app, Page("cart")) or reach(app, f"less.{self.product}")
        return self.to(app, Page("product", self.product)) or reach(app, "add")


class WishScene(ShopScene):
    """Put a product on the wish list."""

    def plan(self) -> None:
        self.product = self.some_product()
        self.goal["wish list"] = sorted([*self.wishes, self.product])
        where = DEPARTMENT_OF[self.product]
        self.instruction = f"Put the {self.product} ({where}) on the wish list."

    def move(self, app: App) -> Action | None:
        return self.to(app, Page("product", self.product)) or reach(app, "wish")


class TakeScene(ShopScene):
    """Take a product out of the cart."""

    def plan(self) -> None:
        self.product = self.rng.choice([*self.cart])
        del self.goal[f"{self.cart[self.product]} in the cart: {self.product}"]
        self.instruction = f"Remove the {self.product} from the cart."

    def move(self, app: App) -> Action | None:
        return self.to(app, Page("cart")) or reach(app, f"take.{self.product}")


class CountScene(ShopScene):
    """Change how many of a product are in the cart."""

    def plan(self) -> None:
        self.product = self.rng.choice([*self.cart])
        now = self.cart[self.product]
        self.count = self.rng.choice([count for count in range(1, 6) if count != now])
        del self.goal[f"{now} in the cart: {self.product}"]
        self.goal[f"{self.count} in the cart: {self.product}"] = True
        self.instruction = f"Set the number of the {self.product} in the cart to {self.count}."

    def move(self, app: App) -> Action | None:
        more = self.cart[self.product] < self.count
        name = f"{'more' if more else 'less'}.{self.product}"
        return self.to(app, Page("cart")) or reach(app, name)


class NewsletterScene(ShopScene):
    """Subscribe to the newsletter, or end it, in the account."""

    def plan(self) -> None:
        self.goal["newsletter"] = not self.newsletter
        self.instruction = f"{'End' if self.newsletter else 'Order'} the newsletter."

    def move(self, app: App) -> Action | None:
        return self.to(app, Page("account")) or reach(app, "newsletter")


class CancelScene(ShopScene):
    """Cancel an order; the application asks for confirmation."""

    def plan(self) -> None:
        self.number = self.rng.choice([*self.orders])
        self.goal[f"order {self.number}"] = "Cancelled"
        self.instruction = f"Cancel order {self.number}."

    def move(self, app: App) -> Action | None:
        away = self.to(app, Page("order", self.number))
        return away or self.confirm(app, "cancel", "cancel")


class OrderScene(ShopScene):
    """Order the contents of the cart: address, payment, and a confirmation."""

    def plan(self) -> None:
        self.choices = (
            self.rng.choice(self.towns),
            self.rng.choice(PAYMENTS),
            self.rng.choice(SPEEDS),
        )
        self.goal = {key: value for key, value in self.goal.items() if "in the cart" not in key}
        self.goal["new orders"] = [self.choices]
        town, payment, speed = self.choices
        self.instruction = f"Order what is in the cart: to {town}, pay by {payment}, {speed}."

    def move(self, app: App) -> Action | None:
        town, payment, speed = self.choices
        if self.town != town:
            return self.to(app, Page("address")) or reach(app, f"town.{town}")
        if self.payment != payment:
            return self.to(app, Page("payment")) or reach(app, f"payment.{payment}")
        if self.speed != speed:
            return self.to(app, Page("payment")) or reach(app, f"speed.{speed}")
        return self.to(app, Page("review order")) or self.confirm(app, "pay", "pay")
