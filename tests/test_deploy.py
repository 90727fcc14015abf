"""Files of `deploy/`: the Slurm script runs with stand-ins for Slurm and Ray; the manifest names what there is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from headway.config.loading import load

DEPLOY = Path(__file__).parents[1] / "deploy"
STANDINS = {
    "scontrol": "echo node-a; echo node-b; echo node-c",
    # Runs what it is given here, with what it was asked for before it.
    "srun": 'while [[ $1 == --* ]]; do asked="$asked $1"; shift; done; export ASKED="$asked"; exec "$@"',
    "hostname": "case $1 in -i) echo ::1 127.0.1.1 ;; -I) echo fd00::2 10.0.0.7 10.1.0.7 ;; esac",
    "ray": 'echo "$ASKED | ray $* | $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" >> "$SAID"',
    # Waits for all of Ray, like the script that it stands for.
    "python": """until [[ $(grep -c ray "$SAID") -ge $((SLURM_JOB_NUM_NODES > 1 ? 2 : 1)) ]]; do sleep 0.01; done
echo "$ASKED | python ${*: -2}" >> "$SAID"; exit "${JOINED:-0}\"""",
    "headway": 'echo "$ASKED | headway $*" >> "$SAID"',
}


def slurm(tmp_path: Path, machines: int, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    for name, script in STANDINS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    said = tmp_path / "said"
    said.touch()
    job = {"SLURM_JOB_NODELIST": "node-[a-c]", "SLURM_JOB_NUM_NODES": str(machines), "SAID": str(said)}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(DEPLOY / "slurm.sh"), "recipe.yaml", "run.dir=/shared/one"]
    done = subprocess.run(
        command, env={"PATH": path, **job, **environment}, capture_output=True, text=True, timeout=30, check=False
    )
    return done, sorted(said.read_text().splitlines())


@pytest.mark.parametrize("machines", [1, 3])
def test_a_slurm_job_starts_ray_on_each_machine_and_the_run_on_the_first(tmp_path: Path, machines: int):
    done, said = slurm(tmp_path, machines)
    assert (done.returncode, done.stderr) == (0, "")
    first = " --overlap --nodes=1 --ntasks=1 --nodelist=node-a"
    others = " --overlap --nodes=2 --ntasks=2 --exclude=node-a"
    expected = [
        f"{first} | headway train recipe.yaml run.dir=/shared/one cluster.address=10.0.0.7:6379 --restarts 3",
        f"{first} | python 10.0.0.7:6379 {machines}",
        f"{first} | ray start --head --node-ip-address=10.0.0.7 --port=6379 --block | token 64",
        *([f"{others} | ray start --address=10.0.0.7:6379 --block | token 64"] if machines > 1 else []),
    ]
    assert said == sorted(expected)


def test_a_slurm_job_whose_machines_do_not_all_come_says_so_and_trains_nothing(tmp_path: Path):
    done, said = slurm(tmp_path, 3, JOINED="124")
    assert done.returncode == 1
    assert "of 3 machines not all joined Ray at 10.0.0.7:6379 within 300 s" in done.stderr
    assert not [line for line in said if "headway" in line]


def test_the_manifests_command_is_one_that_headway_takes():
    spec = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))["spec"]
    words = spec["entrypoint"].split()
    recipe = DEPLOY.parent / words[2].removeprefix("/opt/headway/")
    config = load(recipe, [word for word in words[3:] if "=" in word]).config
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    wanted = (config.trainer, config.rollout)
    assert sum(role.nnodes * role.n_gpus_per_node for role in wanted) == gpus
    assert words[-2:] == ["--restarts", "3"]
    paths = [config.model.path, config.data.train, config.data.val, config.run.dir]
    assert all(str(path).startswith("/shared/") for path in paths)
    tested = (DEPLOY.parent / "constraints.txt").read_text(encoding="utf-8").split()
    assert f"ray=={spec['rayClusterSpec']['rayVersion']}" in tested
