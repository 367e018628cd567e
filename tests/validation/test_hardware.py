"""The machine is named with numbers that can be true."""

import torch

from drafttrain.validation.hardware import cpu_model, describe_hardware, matrix_gflops


def test_a_cpu_is_described():
    facts = describe_hardware("cpu")
    assert facts["device"] == "cpu" and "gpu" not in facts
    assert facts["cpu"] == cpu_model() != ""
    assert facts["cores"] >= 1 and facts["threads"] == torch.get_num_threads()
    assert facts["torch"] == torch.__version__


def test_gflops_count_two_operations_per_product(monkeypatch):
    """With a clock that says one second for each product, n = 64 gives 2 * 64^3 / 1e9."""
    times = iter(range(100))
    monkeypatch.setattr("drafttrain.validation.hardware.time.perf_counter", lambda: next(times))
    assert matrix_gflops("cpu", 64) == 2 * 64**3 / 1e9
