"""Assert that one installed package stands alone; run by `nox -s isolation` with the fresh venv's Python.

    python check_isolation.py <package folder name> <test tool> ...

Looks at what is installed and at what an import loads. Imports nothing of the repository but the package. Whatever is
installed must be asked for by the package's own metadata, or by a test tool: else a user would not have it.
"""

import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys

SIBLINGS = {"indexed_data", "blending", "dist_ckpt", "pipeline", "fsdp", "gpt"}
WITHOUT_TORCH = {"indexed_data", "blending"}


def check(module: str) -> list[str]:
    """What is wrong with ``sixfold.<module>`` in this environment, a line each."""
    loaded = importlib.import_module(f"sixfold.{module}")
    wrong = []
    if "site-packages" not in (loaded.__file__ or ""):
        wrong.append(f"sixfold.{module} was loaded from {loaded.__file__}; only an installed wheel counts here")
    if getattr(sys.modules["sixfold"], "__file__", None):
        wrong.append(f"sixfold has a file, {sys.modules['sixfold'].__file__}; it is a namespace without __init__.py")
    if module != "gpt":
        installed = {name for name in SIBLINGS - {module} if importlib.util.find_spec(f"sixfold.{name}")}
        wrong += [f"sixfold.{name} is installed; {module} has no siblings" for name in sorted(installed)]
        brought = {name.split(".")[1] for name in sys.modules if name.startswith("sixfold.")} - {module}
        wrong += [f"importing sixfold.{module} loaded sixfold.{name}" for name in sorted(brought)]
    if module in WITHOUT_TORCH:
        if "torch" in sys.modules:
            wrong.append(f"importing sixfold.{module} loaded torch")
        if importlib.util.find_spec("torch"):
            wrong.append(f"torch is installed; {module} needs numpy only")
    if module == "gpt":
        code = "import sys, sixfold.gpt.config.train_config; sys.exit('torch' in sys.modules)"
        if subprocess.run([sys.executable, "-c", code], check=False).returncode:
            wrong.append(
                "importing sixfold.gpt.config.train_config loaded torch; a wrong config is to fail within seconds"
            )
    return wrong


def uncalled_for(roots: list[str]) -> list[str]:
    """Distributions that are installed and that no root asks for, not even by way of others; extras apart."""
    requires = {_normal(found.name): found.requires or [] for found in importlib.metadata.distributions()}
    todo, wanted = [_normal(root) for root in roots], set()
    while todo:
        name = todo.pop()
        if name not in wanted and name in requires:
            wanted.add(name)
            lines = [line for line in requires[name] if "extra ==" not in line]
            todo += [_normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines]
    return sorted(requires.keys() - wanted)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    module = sys.argv[1].replace("-", "_")
    wrong = check(module)
    extra = uncalled_for([f"sixfold-{sys.argv[1]}", "pip", "setuptools", *sys.argv[2:]])
    wrong += [f"{name} is installed, and sixfold-{sys.argv[1]} does not require it" for name in extra]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"sixfold.{module} stands alone: {'no torch, ' if module in WITHOUT_TORCH else ''}no sibling loaded")


if __name__ == "__main__":
    main()
