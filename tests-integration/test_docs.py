"""What the documentation tells a reader to run does run, as written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import site_pages
from repository_helpers import PACKAGE_NAMES, PACKAGES, ROOT, Package
from warm_helpers import start_warm

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_README_LINES = {"pipeline": 42, "fsdp": 42, "dist-ckpt": 42}  # their programs run under torchrun too
EXAMPLES = [path for package in PACKAGES for path in sorted((package.folder / "examples").glob("*.py"))]

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def environment() -> dict[str, str]:
    """One thread: other tests run beside it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def run_python(arguments: list[str], folder: Path) -> str:
    """Run Python in ``folder`` as a reader would; its output."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_warm(arguments: list[str], folder: Path) -> str:
    """The same in a process that has torch loaded."""
    output, errors = folder / "stdout", folder / "stderr"
    program = start_warm(arguments, folder=folder, environment=environment(), output=output, errors=errors)
    try:
        status = program.wait(300)
    finally:
        program.kill()
    assert status == 0, f"exit status {status}\n{output.read_text()}\n{errors.read_text()}"
    return output.read_text()


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in FENCED.findall(text) if found == language]


@each_package
@pytest.mark.slow
def test_the_python_block_of_a_readme_runs(package: Package, tmp_path):
    found = blocks((package.folder / "README.md").read_text(), "python")
    assert len(found) == 1, f"packages/{package.name}/README.md has {len(found)} python blocks; it has one"
    lines = found[0].count("\n")
    most = MOST_README_LINES.get(package.name, 25)
    assert lines <= most, f"the block has {lines} lines; at most {most}"
    (tmp_path / "block.py").write_text(found[0])
    run_python(["block.py"], tmp_path)


@pytest.mark.slow
def test_the_program_of_dist_ckpts_readme_saves_on_two_ranks_and_goes_on_from_there_on_one(tmp_path):
    """In processes that have torch loaded; the test above starts a Python for it."""
    readme = (ROOT / "packages/dist-ckpt/README.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(blocks(readme, "python")[0])
    run_warm(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)], tmp_path)
    printed = run_warm([str(script)], tmp_path)  # its output follows that of the two ranks
    (shown,) = blocks(readme, "text")
    assert [line.partition(" loss ")[0] for line in printed.splitlines()] == [
        line.partition(" loss ")[0] for line in shown.splitlines()[:-1]
    ]
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines()]
    assert losses[0] > max(losses[2:]), printed  # each is of one batch


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: f"{path.parts[-3]}/{path.name}")
@pytest.mark.slow
def test_an_example_runs_and_prints(example, tmp_path, pytestconfig):
    """With nox -s full in a Python that is started for it, as the blocks of the READMEs above are always."""
    if "from transformers " in example.read_text():
        pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    cold = pytestconfig.getoption("--every-case")
    output = run_python([str(example)], tmp_path) if cold else run_warm([str(example)], tmp_path)
    assert output.strip(), f"{example.name} printed nothing"


@each_package
def test_a_readme_and_its_page_install_from_folders_that_have_all_siblings(package: Package):
    """True before a publication and after one: an index is named only as one that has a release."""
    wanted = {package.name, *(PACKAGE_NAMES if package.name == "gpt" else ())}
    for page in (package.folder / "README.md", ROOT / f"docs/start/{package.name}.md"):
        lines = re.findall(r"pip install ([^\n`#]*\./packages/[^\n`#]*)", page.read_text())
        assert lines, f"{page} does not say how to install the package"
        for line in lines:
            patterns = [re.sub(r"\[.*\]$", "", argument).removeprefix("./") for argument in shlex.split(line)]
            folders = [path.name for pattern in patterns for path in ROOT.glob(pattern)]
            assert wanted | ({"indexed-data"} if "[indexed]" in line else set()) == set(folders), line


def test_no_page_takes_a_package_from_an_index_without_saying_when():
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
        for line in path.read_text().splitlines()
        if re.search(r'pip install "?sixfold-[a-z-]+\b(?! @)', line) and "an index that has a release" not in line
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", ["pip install nox && nox -s demo", "pip install nox && nox"])
def test_the_two_commands_of_the_root_readme_stand_alone(command):
    bodies = [body.strip() for _, body in FENCED.findall((ROOT / "README.md").read_text())]
    assert command in bodies, f"README.md has no fenced block that is `{command}` and nothing else"


def test_the_first_run_of_the_root_readme_is_that_of_its_start_page():
    """`nox -s docs` runs the blocks of docs/start/gpt.md; here are the same configuration and commands."""
    start = (ROOT / "docs/start/gpt.md").read_text().splitlines()
    readme = (ROOT / "README.md").read_text()
    found = [line for language in ("toml", "sh") for block in blocks(readme, language) for line in block.splitlines()]
    assert "sixfold prepare fox.jsonl --out fox" in found
    places = [start.index(line) for line in found if line]
    assert places == sorted(places)


@pytest.mark.slow
def test_links_between_documents_lead_somewhere():
    made = {ROOT / "docs" / address for address in site_pages.pages()}  # from the code, when the site is built
    wrong = []
    for document in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
            place = (document.parent / target).resolve()
            if "://" not in target and not place.exists() and place not in made:
                wrong.append(f"{document.relative_to(ROOT)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_every_test_that_a_document_names_exists():
    """Design notes say which test keeps a promise or stops a wait; a renamed test must not leave them talking."""
    files = [
        path for folder in ("packages", "tests-integration", "tools") for path in (ROOT / folder).rglob("test_*.py")
    ]
    known = {path.stem for path in files}
    known |= {
        name for path in files for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    documents = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    wrong = [
        f"{document.relative_to(ROOT)}: {name}"
        for document in documents
        for name in re.findall(r"(?<![\w/.*-])test_\w+(?![\w*])", document.read_text())
        if name not in known
    ]
    assert not wrong, "\n".join(wrong)
