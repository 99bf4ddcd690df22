"""The benchmark beside transformers runs: an import takes its model, and each of our cases gives a number."""

import importlib.util

import pytest
from repository_helpers import ROOT

pytest.importorskip("safetensors", reason="needs safetensors, of the extra hf")


@pytest.mark.slow
def test_the_benchmark_of_imports_and_exports_measures_a_model_that_it_wrote(tmp_path):
    spec = importlib.util.spec_from_file_location("compare_hf", ROOT / "packages/gpt/benchmarks/compare_hf.py")
    compare_hf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare_hf)
    parameters = 2 * 32000 * 64 + 4 * 64 * 64 + 3 * 64 * 256 + 3 * 64
    assert compare_hf.write_model(tmp_path / "hf", 1, 64) == 2 * parameters
    for case, source, target in compare_hf.CASES[:2]:
        assert compare_hf.measure(case, tmp_path / source, tmp_path / target)["seconds"] > 0
    assert (tmp_path / "again/config.json").is_file()
