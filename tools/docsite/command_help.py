"""The help of the commands, as JSON: ``python tools/docsite/command_help.py sixfold.gpt.commands.cli ...``.

a command's module --> its parser, caught as it begins to parse --> texts (this file) --> hooks.py

Needs the six packages and what they need. Each verb's help follows that of its command, at one width.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys


class Caught(BaseException):
    """Carries the parser out of the command's ``main``."""


def parser_of(module: str) -> argparse.ArgumentParser:
    def catch(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Caught(self)

    usual = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = catch  # type: ignore[method-assign, assignment]
    try:
        importlib.import_module(module).main()
    except Caught as caught:
        parser: argparse.ArgumentParser = caught.args[0]
        return parser
    finally:
        argparse.ArgumentParser.parse_known_args = usual  # type: ignore[method-assign]
    raise RuntimeError(f"{module}.main() parsed no arguments")


def texts(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Help by command and verb."""
    found = {parser.prog: parser.format_help()}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in dict.fromkeys(action.choices.values()):
                found |= texts(verb)
    return found


if __name__ == "__main__":
    os.environ["COLUMNS"] = "90"  # what fits the page beside its lists
    modules, sys.argv = sys.argv[1:], ["command", "--help"]
    with contextlib.redirect_stdout(sys.stderr):
        found = {module: texts(parser_of(module)) for module in modules}
    print(json.dumps(found))
