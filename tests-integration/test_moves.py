"""The pages docs/move/*.md: a difference is that of its two programs, figures are those of the results, both programs
print what the page says.

One page runs here; the others with `--whole-site`, which `nox -s docs` gives, each where its peer is installed, in
processes that have torch loaded; with `--every-case` as well each is started as its reader starts it.
"""

import importlib.util
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import moves
import pytest
import site_told
from repository_helpers import ROOT
from warm_helpers import start_warm

PAGES = {path.stem: path for path in moves.pages()}
IN_EVERY_RUN = {"grain"}  # of it the second program where Grain is not
PEERS = {  # what the first program imports
    "megatron-datasets": "megatron.core",
    "megatron-dist-checkpointing": "megatron.core",
    "torch-dcp": "torch",
    "fsdp2": "torch",
    "torch-pipelining": "torch",
    "megatron-fsdp": "megatron_fsdp",
    "grain": "grain",
    "mosaicml-streaming": "streaming",
    "olmo-core": "olmo_core",  # no peer of `nox -s docs`: run by hand
}
WITHOUT_FIGURES = {"mosaicml-streaming", "olmo-core"}
ON_CPU = {  # what runs a first program where its peer asks for CUDA
    "megatron-fsdp": ROOT / "tests-integration/megatron_fsdp_on_cpu.py",
    "mosaicml-streaming": ROOT / "tests-integration/streaming_on_cpu.py",
}
each_page = pytest.mark.parametrize("page", PAGES)


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def arguments_of(command, page):
    """What follows `python` for a command of a page. torchrun finds a port of its own: others may run beside it."""
    first, *rest = command.split()
    if page in ON_CPU and "before.py" in rest:
        rest.insert(rest.index("before.py"), str(ON_CPU[page]))
    if first == "python":
        return rest
    assert first == "torchrun", f"a page's command is {command!r}"
    return ["-m", "torch.distributed.run", "--standalone", *rest]


def run(arguments, folder, *, warm):
    """Status, output and errors of ``python *arguments``; warm in processes forked from one with torch loaded."""
    environment, output, errors = {**os.environ, "OMP_NUM_THREADS": "1"}, folder / "stdout", folder / "stderr"
    output.unlink(missing_ok=True)
    errors.unlink(missing_ok=True)
    if warm:
        program = start_warm(arguments, folder=folder, environment=environment, output=output, errors=errors)
    else:
        with output.open("wb") as out, errors.open("wb") as err:
            program = subprocess.Popen(
                [sys.executable, *arguments], cwd=folder, env=environment, stdout=out, stderr=err
            )
    try:
        status = program.wait(300)
    finally:
        program.kill()
    return status, output.read_text(), errors.read_text()


@each_page
def test_a_difference_is_that_of_its_two_programs(page):
    text = PAGES[page].read_text()
    assert moves.with_difference(text) == text, "write it with `python tools/docsite/moves.py --write`"
    move = moves.move_of(text)
    assert [line for line in move.commands if "before.py" in line]
    assert [line for line in move.commands if "after.py" in line]


def test_a_page_without_its_blocks_and_a_stale_difference_are_seen():
    text = PAGES["fsdp2"].read_text()
    with pytest.raises(ValueError, match="each page has"):
        moves.move_of(text.replace("```text", "```sh"))
    stale = text.replace("\n+sharded =", "\n+shared =")
    assert stale != text
    assert moves.with_difference(stale) == text


@each_page
def test_every_figure_of_a_page_names_its_row(page):
    """What stands under "here" and under the peer is told in docs/told.toml, of the file that the page links."""
    figures = re.compile(r"^(\| [^|]+ \| [^|]+ \| [^|]+ \|) \[[^]]+\]\(([^)]+)\) \|$", re.MULTILINE)
    rows = figures.findall(PAGES[page].read_text())
    assert bool(rows) != (page in WITHOUT_FIGURES), f"{page}: {len(rows)} figures"
    place = PAGES[page].relative_to(ROOT).as_posix()
    known = {(one.says, one.file) for one in site_told.told(ROOT) if one.page == place}
    for row, target in rows:
        assert any(row.endswith(says) and f"/{file}.md" in target for says, file in known), f"{page}: {row} of {target}"


@each_page
@pytest.mark.slow
def test_both_programs_print_what_the_page_says(page, tmp_path, request):
    whole = request.config.getoption("--whole-site")
    if page not in IN_EVERY_RUN and not whole:
        pytest.skip("with --whole-site, as in `nox -s docs`")
    move = moves.move_of(PAGES[page].read_text())
    (tmp_path / "before.py").write_text(move.before)
    (tmp_path / "after.py").write_text(move.after)
    has_peer = installed(PEERS[page])
    commands = [command for command in move.commands if has_peer or "before.py" not in command]
    warm = page not in IN_EVERY_RUN and not request.config.getoption("--every-case")
    for command in commands:
        status, printed, errors = run(arguments_of(command, page), tmp_path, warm=warm)
        assert status == 0, f"{command}\n{printed}\n{errors}"
        assert printed == move.printed, command
    if not has_peer and whole:
        pytest.skip(f"{PEERS[page]} is not installed (docs/peers.txt): ours alone ran, and printed what the page says")


def test_torchtitans_own_manager_saves_and_loads_by_one_line(tmp_path, monkeypatch):
    """What the page of torch DCP says of torchtitan 0.3.0, with its own two methods that call DCP."""
    titan = pytest.importorskip(
        "torchtitan.components.checkpointer.dcp", reason="torchtitan is a peer (docs/peers.txt)"
    )
    import torch
    import torch.distributed as dist

    from sixfold.dist_ckpt import dcp

    monkeypatch.setattr(titan, "dcp", dcp)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        manager = SimpleNamespace(pg=dist.new_group(backend="gloo"), sd_adapter=None, states={}, stager=None)
        for mode in (titan.AsyncMode.DISABLED, titan.AsyncMode.ASYNC):
            place, state = str(tmp_path / mode), {"w": torch.arange(6.0), "step": torch.tensor(3)}
            save, load = titan.CheckpointManager.dcp_save, titan.CheckpointManager.dcp_load
            saving = save(manager, state, checkpoint_id=place, async_mode=mode, enable_garbage_collection=False)
            if mode == titan.AsyncMode.ASYNC:
                saving.result()
            loaded = {"w": torch.zeros(6), "step": torch.tensor(0)}
            load(manager, loaded, checkpoint_id=place, from_hf=False, from_quantized=False)
            assert loaded["step"] == 3
            assert torch.equal(loaded["w"], state["w"])
            assert (tmp_path / mode / "integrity.json").exists()
    finally:
        dist.destroy_process_group()
