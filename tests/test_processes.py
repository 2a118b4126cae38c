"""Several processes that run one program, as on several hosts. What each of them
checks is in `one_process.py`."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


# Each process starts JAX anew.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
COUNT = 2


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(folder, script, *args):
    """Runs a script in several processes of two devices each, and returns what each
    prints. The arguments begin with those of `jax.distributed.initialize`."""
    env = {
        **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    address = f"127.0.0.1:{free_port()}"
    files = [folder / f"{i}.txt" for i in range(COUNT)]
    processes = []
    try:
        for i, file in enumerate(files):
            # Where hashes differ, so does the order of a set.
            mine = {**env, "PYTHONHASHSEED": str(i)}
            command = [sys.executable, script, address, str(COUNT), str(i), *args]
            with file.open("w") as f:
                processes.append(
                    subprocess.Popen(command, env=mine, stdout=f, stderr=f)
                )
        end = time.monotonic() + 150
        while time.monotonic() < end:
            status = [p.poll() for p in processes]
            # Who waits for a process that failed would wait for long.
            if None not in status or any(status):
                break
            time.sleep(0.1)
    finally:
        for p in processes:
            p.kill()
            p.wait()
    texts = [file.read_text() for file in files]
    assert [p.returncode for p in processes] == [0] * COUNT, "\n".join(texts)
    return texts


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_processes_compute_and_tell_the_same(axes, tmp_path):
    texts = run(tmp_path, ROOT / "tests/one_process.py", axes)
    found = [json.loads(text.strip().splitlines()[-1]) for text in texts]
    assert found[0] == found[1]
    assert found[0]["names"] == ["model/first", "model/second"]
    rows = [found[0][k].splitlines()[2:] for k in ("table", "summaries")]
    values, summaries = ([row.split() for row in x] for x in rows)
    assert len(values) == 4
    # One says the shape of what the other counts.
    assert [row[-6:] for row in values] == [row[-6:] for row in summaries]


def test_the_guide(tmp_path):
    text = (ROOT / "docs/guides/sharding.md").read_text()
    _, section = text.split("## Several processes\n")
    code = re.search(r"^```py\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[1]
    shown = re.search(r"^```text\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[1]
    script = tmp_path / "script.py"
    start = "jax.distributed.initialize("
    here = f"import sys\n{start}sys.argv[1], *map(int, sys.argv[2:])"
    assert start in code
    script.write_text(code.replace(start, here))
    first, second = run(tmp_path, script)
    assert first.endswith(shown)
    assert "model/layers" not in second
