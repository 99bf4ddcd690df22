"""The order that a name means: ORDER of the file ``orders/NAME.py``.

    config.order, config.packing --> order_named (this file) --> the object that all rooms ask

A new order is one file in ``orders/``. Nothing else lists orders, and no room compares their names.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from sixfold.blending.errors import BlendingError

if TYPE_CHECKING:
    from sixfold.blending.orders.interface import Order

CONCATENATED = "concatenate"  # documents end to end, cut anywhere
_FOLDER = "sixfold.blending.orders"


def order_named(name: Any, packing: Any = CONCATENATED) -> "Order":
    """The order ``name``, or the one that packs its documents.

    Raises:
        BlendingError: there is none.
    """
    known = orders()
    names = [each for each, order in known.items() if not order.packs]
    if not isinstance(name, str) or name not in names:
        raise BlendingError(f"order is {name!r}; it is one of {_listed(names)}")
    if packing == CONCATENATED:
        return known[name]
    packings = [each for each, order in known.items() if order.packs]
    if not isinstance(packing, str) or packing not in packings:
        raise BlendingError(f"packing is {packing!r}; it is one of {_listed([CONCATENATED, *packings])}")
    if name != names[0]:
        raise BlendingError(
            f'packing is "{packing}" with order "{name}", whose samples are cut from documents end to end; leave one '
            "of them out"
        )
    return known[packing]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@cache
def orders() -> dict[str, "Order"]:
    """All orders by name, the one that is taken by default first."""
    files = [import_module(f"{_FOLDER}.{found.name}") for found in iter_modules(import_module(_FOLDER).__path__)]
    found: list[Order] = [file.ORDER for file in files if hasattr(file, "ORDER")]
    return {order.name: order for order in sorted(found, key=lambda order: (order.indexed, order.by_name, order.name))}
