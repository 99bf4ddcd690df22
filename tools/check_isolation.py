"""Assert that one installed package stands alone; run by `nox -s isolation` with the fresh venv's Python.

    python check_isolation.py <package folder name>

Looks at what is installed and at what an import loads. Imports nothing of the repository but the package.
"""

import importlib
import importlib.util
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
        code = "import sys, sixfold.gpt.config; sys.exit('torch' in sys.modules)"
        if subprocess.run([sys.executable, "-c", code], check=False).returncode:
            wrong.append("importing sixfold.gpt.config loaded torch; a wrong config is to fail within seconds")
    return wrong


def main() -> None:
    module = sys.argv[1].replace("-", "_")
    if wrong := check(module):
        sys.exit("\n".join(wrong))
    print(f"sixfold.{module} stands alone: {'no torch, ' if module in WITHOUT_TORCH else ''}no sibling loaded")


if __name__ == "__main__":
    main()
