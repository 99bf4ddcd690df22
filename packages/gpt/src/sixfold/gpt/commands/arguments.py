"""Values of the command's options, refused by argparse in one line.

text of an option --> at_least_one, above_zero, seconds and others (this file) --> cli.py, plan_and_doctor.py
"""

import argparse


def at_least_one(text: str) -> int:
    """A whole number >= 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 1")
    return int(text)


def at_least_zero(text: str) -> int:
    """A whole number >= 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 0")
    return int(text)


def minutes(text: str) -> float:
    """A number of minutes > 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes > 0")
    return value


def above_zero(text: str) -> float:
    """A number > 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number > 0")
    return value


def seconds(text: str) -> float:
    """A number of seconds >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number >= 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = seconds(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share, 0 to 1")
    return value
