"""One file per order: what a user may say, which samples a dataset has, how several are blended, what a state keeps.

``config/order_names.py`` finds the object ORDER in the file of that name.

From outside: interface.
"""
