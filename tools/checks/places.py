"""Folders, limits and options of the sessions; nothing is done here."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
CONSTRAINTS = ROOT / "constraints.txt"
SHARED = ROOT / ".nox" / "shared"
WHEELS = ROOT / ".nox" / "wheels"
BASES = ROOT / ".nox" / "bases"
BUILDER = ROOT / ".nox" / "builder"
SOURCES = ROOT / ".nox" / "sources"  # held while setuptools writes into a package's folder
LOGS = ROOT / ".nox" / "ci"
RELEASE = ROOT / ".nox" / "release"
DOCS = ROOT / ".nox" / "docs"
DOCS_REQUIREMENTS = (ROOT / "docs" / "requirements.txt", ROOT / "docs" / "peers.txt")
DOCS_LOGS = ROOT / ".nox" / "docs-logs"
DOCS_LANES = 3  # of two cores: pages about hangs wait, and so do browsers
RANKTEST = ROOT / "tools" / "ranktest"
INTEGRATION = ROOT / "tests-integration"
ONCE = ROOT / "tools" / "once"  # the folder of a pytest plugin: what passed in isolation is not run again by ci
# Options under which the tests run whole, not in the default command's samples.
FULL: dict[str, tuple[str, ...]] = dict.fromkeys(PACKAGES, ()) | {
    "indexed-data": ("--kills=1000",),
    "dist-ckpt": ("--save-kills=1000", "--corruptions=10400", "--mangled=3000"),
    "pipeline": ("--full-matrix", "--mutants=1000", "--random-runs=1000", "--all-bubbles", "--all-exports"),
    "fsdp": ("--all-pairs", "--random-programs=200"),
    "gpt": (
        "--resume-matrix", "--random-layouts=100", "--all-meshes", "--memory-matrix", "--compiled-ranks",
        "--expert-layouts", "--context-matrix", "--same-bits-matrix", "--instants=400", "--random-models=30",
    ),
    "ranktest": (),
    "tests-integration": ("--all-jobs",),
}  # fmt: skip
# What fills memory with NaN once it is given up or handed back; each package's tests pass with it.
NAN_MODES = {"fsdp": "--fill-freed", "pipeline": "--debug-memory", "dist-ckpt": "--fill-recycled"}
FULL_DEADLINE_S = 3600  # of one test: a whole matrix may be one
# What the isolated venv of a package finds installed, besides pytest: installed once, seen through a .pth file.
# tools/check_isolation.py asserts that the package's own metadata asks for all of it.
BASES_OF = {"indexed-data": ("numpy",), "blending": ("numpy",), "gpt": ("numpy", "torch")}
BASE_DEFAULT = ("torch",)
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
LOADED_BY_MOST = "pytest, hypothesis, torch.distributed.checkpoint, torch.distributed.fsdp, torch._dynamo"
# Further runs of a package's tests where it stands alone: blending as installed where no compiler is.
ALSO_ISOLATED = {"blending": [["--without-extension", "-k", "test_order or test_quota or test_sample or test_native"]]}
WHEEL_LIMIT_BYTES = {
    "indexed-data": 130_000, "blending": 245_000, "dist-ckpt": 460_000, "fsdp": 285_000, "gpt": 500_000,
    "pipeline": 352_000,
}  # fmt: skip
WHEEL_LIMIT_DEFAULT_BYTES = 200_000
TURNS = 24  # parts of the slow tests: `ci` runs one of them, by the commit
CORES_FOR_ALL = 8  # where so many are, ci runs all parts
LANES = 4  # sessions of `ci` that run at a time: two for the cores of the smallest machine, two while ranks wait
SESSION_DEADLINE_S = 1800.0
NO_TESTS_COLLECTED = 5  # pytest's exit status
# Of every process of a session. Bytecode is kept even where the user's own variable says otherwise: hundreds of
# processes load torch, in three times the time where each compiles it.
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def source_of(distribution: str) -> Path:
    return RANKTEST if distribution == "ranktest" else ROOT / "packages" / distribution


def distribution_folders() -> list[Path]:
    return [RANKTEST, *(ROOT / "packages" / name for name in PACKAGES)]


def tests_of(name: str) -> Path:
    """All tests of a package, of ranktest or of tests-integration."""
    return INTEGRATION if name == INTEGRATION.name else source_of(name) / "tests"


def rank_tests(name: str) -> list[Path]:
    folder = tests_of(name) if name == "ranktest" else tests_of(name) / "ranks"
    return sorted(folder.glob("test_*.py"))


def c_sources(folder: Path) -> list[Path]:
    """What a distribution compiles, and how: setup.py and native/, if it has them; an editable is built from it too."""
    return sorted(path for pattern in ("setup.py", "native/*.[ch]") for path in folder.glob(pattern))


def module_of(package: str) -> str:
    return "sixfold." + package.replace("-", "_")
