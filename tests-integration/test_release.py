"""What is released agrees with what is here: versions, change logs, public names, licences, the forge's sessions.

The pure parts of tools/release; `nox -s release` builds and installs.
"""

import importlib.util
import io
import re
import tarfile
import zipfile

import pytest
from repository_helpers import PACKAGE_NAMES, ROOT


def load(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / f"tools/release/{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


affected, versions, artefacts = load("affected"), load("versions"), load("artefacts")

ARROWS = {  # as the page of the repository's design draws them; blending's is by its extra
    "indexed-data": set(),
    "blending": {"indexed-data"},
    "dist-ckpt": set(),
    "pipeline": set(),
    "fsdp": set(),
    "gpt": {"indexed-data", "blending", "dist-ckpt", "pipeline", "fsdp"},
}
RANKED = {*PACKAGE_NAMES, "ranktest"} - {"indexed-data"}
SESSIONS = re.compile(r"^def (\w+)\(session", re.MULTILINE)


def sessions_of_noxfile():
    return set(SESSIONS.findall((ROOT / "noxfile.py").read_text()))


# ---- affected


def test_the_arrows_are_those_of_the_design():
    assert affected.arrows() == ARROWS


@pytest.mark.parametrize(
    ("path", "packages"),
    [
        ("packages/fsdp/src/sixfold/fsdp/layout.py", "fsdp gpt"),
        ("packages/indexed-data/pyproject.toml", "blending gpt indexed-data"),
        ("packages/gpt/tests/commands/test_cli.py", "gpt"),
        ("packages/fsdp/README.md", ""),
        ("packages/fsdp/benchmarks/bench_x.py", ""),
        ("docs/design/x.md", ""),
        ("CITATION.cff", ""),
        ("tests-integration/test_docs.py", ""),
        ("noxfile.py", " ".join(sorted(PACKAGE_NAMES))),
        ("constraints.txt", " ".join(sorted(PACKAGE_NAMES))),
        ("tools/ranktest/src/ranktest/run.py", " ".join(sorted(PACKAGE_NAMES))),
        ("a/new/folder", " ".join(sorted(PACKAGE_NAMES))),
    ],
)
def test_a_change_concerns_its_package_and_those_that_depend_on_it(path, packages):
    found = affected.concern([path], ARROWS, RANKED)
    assert " ".join(found.packages) == packages
    assert {f"tests({package})" for package in found.packages} <= set(found.sessions)


def test_sessions_of_a_change_are_those_of_its_packages_and_no_others():
    of_fsdp = affected.concern(["packages/fsdp/src/x.py"], ARROWS, RANKED).sessions
    each = {f"{name}({package})" for package in ("fsdp", "gpt") for name in ("isolation", "tests", "ranks", "lowest")}
    assert set(of_fsdp) == {*each, "lint", "types", "integration", "docs"}
    assert affected.concern(["README.md"], ARROWS, RANKED).sessions == ("docs", "lint")
    example = affected.concern(["packages/gpt/examples/x.py"], ARROWS, RANKED).sessions
    assert example == ("docs", "integration", "lint")
    assert "ranks(indexed-data)" not in affected.concern(["noxfile.py"], ARROWS, RANKED).sessions


def test_every_session_that_is_asked_for_exists():
    everything = affected.concern(["noxfile.py"], affected.arrows(), affected.ranked()).sessions
    assert {session.split("(")[0] for session in everything} <= sessions_of_noxfile()
    assert affected.ranked() >= {"ranktest", "fsdp", "pipeline"}


# ---- versions

BEFORE = """\
# sixfold.x
LIMIT: int
@dataclass(frozen=True)
class Thing(_Base)
    size_bytes: int = 3
    def resize(self, a) -> None
    @property def name(self) -> str
def call(x: int) -> None
"""
NOW = """\
# sixfold.x
class Thing(_Base)
    size_bytes: int = 3
    def renamed(self, a) -> None
    @property def name(self) -> str
def call(x: int, y: int=3) -> None
def more() -> None
"""
LOG = "# Changelog\n\n## 0.2.0\n\n- `LIMIT` went; `Thing.resize` is `renamed`.\n\n## 0.1.0\n\n- all\n"


def test_names_that_went_are_seen_with_fields_and_methods():
    assert versions.removed_names(BEFORE, NOW) == ["sixfold.x.LIMIT", "sixfold.x.Thing.resize"]
    without = "# sixfold.x\nLIMIT: int\ndef call(x: int) -> None\n"
    assert versions.removed_names(BEFORE, without) == ["sixfold.x.Thing"]


@pytest.mark.parametrize(
    ("last", "now", "may"),
    [
        ("0.1.0", "0.2.0.dev0", True),
        ("0.1.0", "0.1.1", False),
        ("0.9.0", "1.0.0", True),
        ("1.2.0", "1.3.0", False),
        ("1.2.0", "2.0.0", True),
    ],
)
def test_a_name_goes_with_a_new_minor_version_before_1_and_a_major_one_after(last, now, may):
    log = LOG.replace("0.2.0", now).replace("0.1.0", last)
    faults = versions.faults_of(now, log, NOW, last, BEFORE)
    assert bool(faults) != may
    assert may or "that needs a new" in faults[0]


def test_a_name_that_went_stands_in_the_change_log_above_the_last_release():
    silent = LOG.replace("`LIMIT` went; ", "").replace("- all", "- `LIMIT`")
    (fault,) = versions.faults_of("0.2.0", silent, NOW, "0.1.0", BEFORE)
    assert fault.startswith("sixfold.x.LIMIT went since 0.1.0")


def test_a_change_log_begins_with_the_version_and_the_version_grows():
    assert "CHANGELOG.md begins with 0.2.0" in versions.faults_of("0.3.0", LOG, NOW, "0.1.0", BEFORE)[0]
    assert "is released" in versions.faults_of("0.2.0", LOG, NOW, "0.2.0", NOW)[0]
    assert versions.faults_of("0.2.0", LOG, NOW, None, "") == []


def test_a_range_that_leaves_its_sibling_out_is_a_fault():
    (fault,) = versions.sibling_faults(["sixfold-fsdp>=0.2,<0.3", "torch>=2.11"], {"fsdp": "0.3.0"})
    assert "leaves out 0.3.0" in fault
    assert versions.sibling_faults(["sixfold-fsdp>=0.2.0.dev0,<0.3"], {"fsdp": "0.2.0.dev0"}) == []


@pytest.mark.parametrize("package", PACKAGE_NAMES)
def test_version_change_log_and_public_names_agree_with_the_last_release(package):
    assert versions.last_release(package), f"no public names of a release in {versions.golden(package)}"
    assert versions.faults(package) == []


def test_a_tag_releases_the_version_that_is_there_and_none_of_development():
    here = {"dist-ckpt": "0.2.0", "fsdp": "0.3.0.dev0"}
    assert versions.package_of_tag("dist-ckpt-v0.2.0", here) == "dist-ckpt"
    for tag, told in [
        ("dist-ckpt-v0.2.1", "has version 0.2.0"),
        ("fsdp-v0.3.0.dev0", "development"),
        ("v1", "no package"),
    ]:
        with pytest.raises(ValueError, match=told):
            versions.package_of_tag(tag, here)


# ---- artefacts

METADATA = "Metadata-Version: 2.4\nName: sixfold-x\nVersion: 0.2.0\n\n# x\n"


def make_wheel(folder, name="sixfold_x-0.2.0-py3-none-any.whl", leave_out="", also=()):
    info = "sixfold_x-0.2.0.dist-info"
    names = ["sixfold/x/__init__.py", "sixfold/x/py.typed", f"{info}/licenses/LICENSE", f"{info}/METADATA", *also]
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for member in names:
            if not leave_out or not member.endswith(leave_out):
                wheel.writestr(member, METADATA if member.endswith("METADATA") else "x")
    return folder / name


def make_sdist(folder, version="0.2.0"):
    path = folder / f"sixfold_x-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("PKG-INFO", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src/sixfold/x/py.typed"):
            content = METADATA.replace("0.2.0", version).encode()
            member = tarfile.TarInfo(f"sixfold_x-{version}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_what_is_wrong_inside_a_file_is_told(tmp_path):
    project = {"version": "0.2.0"}
    assert artefacts.faults(make_wheel(tmp_path), "x", project) == []
    assert artefacts.faults(make_sdist(tmp_path), "x", project) == []
    for wrong, told in [
        ({"leave_out": "LICENSE"}, "holds no LICENSE"),
        ({"leave_out": "py.typed"}, "holds no sixfold/x/py.typed"),
        ({"also": ["sixfold/__init__.py"]}, "which is not of sixfold.x"),
        ({"also": ["tests/test_x.py"]}, "which is not of sixfold.x"),
    ]:
        (fault,) = artefacts.faults(make_wheel(tmp_path, **wrong), "x", project)
        assert told in fault
    (fault,) = artefacts.faults(make_wheel(tmp_path), "x", {"version": "0.2.1"})
    assert "says version 0.2.0, pyproject.toml 0.2.1" in fault


def test_what_to_upload_is_told_and_a_wheel_of_this_machine_is_not_among_it(tmp_path):
    make_sdist(tmp_path)
    make_wheel(tmp_path)
    make_wheel(tmp_path, name="sixfold_x-0.2.0-cp311-abi3-linux_x86_64.whl")
    text = artefacts.tell("x", tmp_path)
    upload = next(line for line in text.splitlines() if "twine upload" in line)
    assert "py3-none-any.whl" in upload
    assert ".tar.gz" in upload
    assert "linux_x86_64" not in upload
    assert "git tag -a x-v0.2.0 " in text
    assert "cibuildwheel" in text


def test_a_version_of_development_is_not_for_upload(tmp_path):
    make_sdist(tmp_path, version="0.2.0.dev0")
    text = artefacts.tell("x", tmp_path)
    assert "Not for upload" in text
    assert "git tag" not in text


# ---- files


@pytest.mark.parametrize("package", PACKAGE_NAMES)
def test_each_package_carries_the_licence(package):
    assert (ROOT / "packages" / package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_release_tools_are_pinned():
    lines = (ROOT / "tools/release/requirements.txt").read_text().splitlines()
    assert all("==" in line for line in lines if line and not line.startswith("#"))


def test_the_forge_calls_sessions_and_files_that_exist():
    text = "\n".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    called = set(re.findall(r'nox -s "(\w+)', text))
    assert called
    assert called <= sessions_of_noxfile()
    for path in re.findall(r"(?:python|-r|-c) ([\w./-]+\.(?:py|txt))", text):
        assert (ROOT / path).exists(), path


def test_the_forges_files_are_whole():
    """Jobs need jobs that exist, every step does one thing, every dependency of an expression is declared."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with other test tools")
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        jobs = workflow["jobs"]
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in jobs.items():
            needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
            assert set(needs) <= jobs.keys(), name
            assert set(re.findall(r"needs\.(\w+)\.", str(job))) <= set(needs), name
            steps = {step.get("id") for step in job["steps"]}
            assert set(re.findall(r"steps\.(\w+)\.", str(job))) <= steps, name
            assert all(("uses" in step) != ("run" in step) for step in job["steps"]), name
            # What comes from outside, such as a branch's name, reaches a shell as a variable, never as its text.
            assert not any("${{" in step.get("run", "") for step in job["steps"]), name


def test_an_issue_asks_for_what_doctor_prints_and_names_every_package():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with other test tools")
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            continue
        asked = {field["id"]: field for field in template["body"]}
        assert set(PACKAGE_NAMES) <= set(asked["package"]["attributes"]["options"])
        assert "sixfold doctor" in asked["doctor"]["attributes"]["label"]


def test_the_citation_names_the_version_of_the_packages():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with other test tools")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "version", "license"}
    assert citation["version"] in versions.versions_here().values()
