from pathlib import Path

from headway.cluster.machine.worker_setup import cpu_model, hardware_here


def test_the_cpu_is_called_what_the_system_calls_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Fast: CPU 9\n\nprocessor\t: 1\nmodel name\t: Fast: CPU 9\n"
    )
    assert cpu_model(info) == "Fast: CPU 9"


def test_without_a_model_it_is_called_what_the_platform_calls_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")
    assert cpu_model(tmp_path / "cpuinfo") == cpu_model(tmp_path / "missing") != ""


def test_a_process_on_the_cpu_has_no_gpu_and_at_least_a_core_and_a_thread() -> None:
    here = hardware_here("cpu")
    assert here.gpu is None and here.cores >= 1 and here.threads >= 1 and here.host
