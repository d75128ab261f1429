"""Portable programs: compiled for a level that processors share, with PyTorch's kernels of that level."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from coterie.engine.native import compiler
from coterie.engine.options import EngineOptions
from coterie.engine.precision import check_portable
from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate
from coterie.studies import config
from coterie.studies.run import run_study
from coterie.testing import tiny_federation

X86 = platform.machine().lower() in ("x86_64", "amd64")

RUN = """
import hashlib
import numpy as np
import torch
from torch import nn
from coterie import LocalTraining, METHODS, Settings, simulate
from coterie.engine.native.compiler import portable_code
from coterie.testing import tiny_federation

torch.set_num_threads(1)
body = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
net = nn.Sequential(*body, nn.Linear(54, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))
# Weights of numpy: PyTorch's normal draws differ between its kernels.
stream = np.random.default_rng(0)
for one in net.parameters():
    one.data = torch.from_numpy(stream.normal(scale=0.1, size=one.shape).astype(np.float32))
data = tiny_federation(train=20, features=(3, 8, 8))
local = LocalTraining(optimizer="adam", lr=0.01, batch_size=8)
settings = Settings(rounds=2, engine="compiled", check=False, local=local)
with portable_code():
    run = simulate(data, METHODS["local"](), model=net, settings=settings, seed=1)
print(run.engine.split(",")[0], hashlib.sha256(run.params.numpy().tobytes()).hexdigest())
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="the capabilities are those of x86-64")
def test_programs_compute_the_same_whatever_pytorch_takes() -> None:
    """With PyTorch's kernels for AVX-512, where the processor has it, and with those for AVX2."""
    said = []
    for capability in ("avx512", "avx2"):
        env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-W", "ignore", "-c", RUN]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-1000:]
        said.append(done.stdout.split())
    assert said[0][:2] == said[1][:2]
    assert said[0][0] == "compiled"
    assert said[1][-1] == "AVX2"


def test_programs_are_compiled_for_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    own = compiler.describe_machine()
    with compiler.portable_code():
        found = compiler.describe_machine()
        assert found != own
        assert found[1] in ("-march=x86-64-v3", "-march=armv8.2-a")
        assert compiler.vector_bytes() == (32 if X86 else 16)
        assert not X86 or "__AVX512F__" not in found[-1].split()
        # A program of its own in the cache.
        program, _ = compiler.load(
            'extern "C" int answer() { return __AVX2__ + 41; }'
            if X86
            else 'extern "C" int answer() { return 42; }'
        )
    assert program.answer() == 42
    assert compiler.describe_machine() == own
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with compiler.portable_code():
        assert compiler._processor_flag() == "-march=armv8.2-a"
    assert compiler._processor_flag() == "-mcpu=native"


@pytest.mark.full
@pytest.mark.option("Settings.portable", False, True)
def test_portable_needs_the_compiled_engine_and_kernels_for_avx2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")

    def run(model=nn.Linear, **settings) -> str:
        wanted = Settings(rounds=1, check=False, **settings)
        make = lambda: model(4, 3)  # noqa: E731
        return simulate(tiny_federation(), METHODS["local"](), model=make, settings=wanted).engine

    assert run(portable=False).startswith("loop")
    assert run(portable=True).startswith("compiled")
    with pytest.raises(ConfigError, match="takes the compiled engine; found engine = 'loop'"):
        run(portable=True, engine="loop")

    class Decides(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(2 * x)

    with pytest.raises(ConfigError, match="takes the compiled engine: the module cannot be"):
        run(Decides, portable=True)
    with pytest.raises(ConfigError, match="is for a CPU; found device 'cuda'"):
        check_portable("cuda")
    if X86:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        with pytest.raises(ConfigError, match=r"found AVX512, .* set ATEN_CPU_CAPABILITY=avx2"):
            EngineOptions(portable=True)


@pytest.mark.full
def test_a_study_takes_portable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    text = """
    name = "tiny"
    rounds = 1
    seeds = [0]
    portable = true
    model = { kind = "linear" }
    data = { dataset = "digits" }
    methods = [{ kind = "local" }]
    """
    done = run_study(
        config.parse_study_text(text),
        out=tmp_path,
        federation=lambda seed: tiny_federation(seed=seed),
    )
    (noted,) = done.folder.glob("*/seed-0/provenance.json")
    assert json.loads(noted.read_text())["engine"]["name"] == "compiled"
    # It is part of what a run is, and absent where it is not set.
    assert config.make_identity(done.config)["portable"] is True
    plain = config.parse_study_text(text, overrides=["portable=false"])
    assert "portable" not in config.make_identity(plain)
