"""The order that a name means: ORDER of the file ``orders/NAME.py``.

    config.order --> order_named (this file) --> the object that all rooms ask

A new order is one file in ``orders/``. Nothing else lists orders, and no room compares their names.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from sixfold.blending.errors import BlendingError

if TYPE_CHECKING:
    from sixfold.blending.orders.interface import Order

_FOLDER = "sixfold.blending.orders"


def order_named(name: Any) -> "Order":
    """The order ``name``.

    Raises:
        BlendingError: there is none.
    """
    known = orders()
    if not isinstance(name, str) or name not in known:
        listed = ", ".join(f'"{each}"' for each in known)
        raise BlendingError(f"order is {name!r}; it is one of {listed}")
    return known[name]


@cache
def orders() -> dict[str, "Order"]:
    """All orders by name, the one that is taken by default first."""
    files = [import_module(f"{_FOLDER}.{found.name}") for found in iter_modules(import_module(_FOLDER).__path__)]
    found: list[Order] = [file.ORDER for file in files if hasattr(file, "ORDER")]
    return {order.name: order for order in sorted(found, key=lambda order: (order.indexed, order.by_name, order.name))}
