"""The CPU layer apart from the trainer: its flags and refusals, and what its replacements promise.

install() changes torch for the whole process, so what needs it runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.hotswap.device import cpu
from megatron.hotswap.errors import UsageError

ROOT = Path(__file__).parents[2]


DEFAULT_FLAGS = """
--distributed-backend gloo --transformer-impl local --attention-backend unfused --use-cpu-initialization
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion
--no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
"""


def test_default_flags_of_an_empty_command_line() -> None:
    """The whole set, frozen: a new one changes what a user's command means."""
    assert cpu.default_flags([]) == DEFAULT_FLAGS.split()


def test_flags_that_are_given_are_not_given_again() -> None:
    argv = ["--distributed-backend=gloo", "--transformer-impl", "local", "--no-rope-fusion", "--lr", "-1"]
    flags = cpu.default_flags(argv)
    assert not {"--distributed-backend", "--transformer-impl", "--no-rope-fusion"} & set(flags)
    assert cpu.default_flags(argv + flags) == []


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--transformer-impl transformer_engine", "transformer_engine"),
        ("--transformer-impl=transformer_engine", "transformer_engine"),
        ("--distributed-backend nccl", "nccl"),
        ("--attention-backend flash", "flash"),
        ("--context-parallel-size 2", "'2'"),
        ("--context-parallel-size 1 --context-parallel-size 2", "'2'"),
        ("--moe-token-dispatcher-type flex", "flex"),
        ("--fp8-format hybrid", "--fp8-format"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp"),
    ],
)
def test_flags_that_need_a_gpu_are_refused(argv: str, named: str) -> None:
    """The message names the flag, its value, and what to do."""
    with pytest.raises(UsageError) as error:
        cpu.default_flags(argv.split())
    message = str(error.value)
    assert argv.split("=")[0].split()[0] in message
    assert named in message
    assert "Drop" in message


def test_values_that_a_cpu_can_do_are_accepted() -> None:
    argv = ["--context-parallel-size", "1", "--moe-token-dispatcher-type", "alltoall", "--attention-backend", "auto"]
    assert not set(argv) & set(cpu.default_flags(argv))


def test_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    assert cpu.environment()["OMP_NUM_THREADS"] == "4"
    assert cpu.environment()["TORCHDYNAMO_DISABLE"] == "1"


def test_a_gpu_that_torch_cannot_use_is_no_reason_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not cpu.needed()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cpu.needed()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu.needed()


INSTALLED = """
import torch
from megatron.hotswap.device import cpu

cpu.install()
to = torch.Tensor.to
cpu.install()
assert torch.Tensor.to is to, "installed twice"
assert cpu.needed(), "torch.cuda.is_available() is true now, yet this is still a machine without a GPU"

tensor = torch.zeros(2, device="cuda")
for same in (tensor, tensor.to("cuda"), tensor.cuda(), torch.empty(2, device=torch.cuda.current_device())):
    assert same.device == torch.device("cpu")
assert tensor.type() == "torch.cuda.FloatTensor" and isinstance(tensor, torch.cuda.FloatTensor)
assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"

torch.manual_seed(1)
drawn = torch.rand(3)
torch.cuda.manual_seed(1)
assert torch.equal(drawn, torch.rand(3)), "one generator for both"
state = torch.get_rng_state()
next(iter(torch.utils.data.DataLoader(range(4))))
assert torch.equal(state, torch.get_rng_state()), "opening a data loader moved the generator of dropout"

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

config = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2, sequence_parallel=True,
    pipeline_dtype=torch.float32, use_cpu_initialization=True,
)
norm = WrappedTorchNorm(config, 8)
assert isinstance(norm, torch.nn.LayerNorm) and config.sequence_parallel
assert all(parameter.sequence_parallel for parameter in norm.parameters())
"""


def test_replacements_in_torch_and_megatron() -> None:
    command = [sys.executable, "-W", "ignore", "-c", INSTALLED]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
