"""bf16: weights and activations of linear and convolution layers in bfloat16, everything else in float32.

The float32 weights stay the model: gradients are applied to them, and the network's bfloat16 copies follow.
The output layer, norm layers, embeddings, losses, penalties and all mixing stay float32.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import time
import warnings
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from cwfed.core.errors import ConfigError

Precision: TypeAlias = Literal["fp32", "bf16"]

CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CRAWLING = 0.2
"""Below this share of fp32's speed, bf16 must be emulated in software."""
PATIENCE = 30.0
"""Seconds that a trial may take."""


def to_bf16(network: nn.Module, output: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Make a network compute in bf16; returns its bf16 parameters, each with its float32 master."""
    pairs = []
    inside = set(output.modules())  # also what an algorithm has put into the output layer
    output.register_forward_pre_hook(_in_float32)
    for module in network.modules():
        if isinstance(module, CAST) and module not in inside:
            module.register_forward_pre_hook(_in_bfloat16)
            for parameter in module.parameters(recurse=False):
                if parameter.dtype == torch.bfloat16:  # shared with a layer that was cast before
                    continue
                master = parameter.detach().clone().requires_grad_(parameter.requires_grad)
                parameter.data = parameter.data.bfloat16()
                pairs.append((parameter, master))
    return pairs


def _in_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.float() for tensor in inputs)


def _in_bfloat16(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.bfloat16() for tensor in inputs)


def require_bf16(device: torch.device) -> str:
    """ConfigError if bf16 cannot run here; else "", or a sentence if it is no faster than fp32."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError('train.precision = "bf16" cannot be used: this GPU has no bf16; use "fp32"')
    if device.type != "cpu":
        return ""
    ratio = bf16_speed()
    if ratio is None:
        raise ConfigError(
            'train.precision = "bf16" would end this process here: a trial died or hung in a bf16 matrix product; use '
            '"fp32", or start with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment'
        )
    if ratio < CRAWLING:
        raise ConfigError(
            f'train.precision = "bf16" is not available on this CPU: it has no bf16 instructions, and a bf16 matrix '
            f'product takes {1 / ratio:.0f} times as long as in fp32; use "fp32"'
        )
    if ratio < 1:
        return f"bf16 is slower than fp32 on this CPU: {ratio:.2f} x the speed of fp32 at matrix products"
    return ""


def bf16_speed() -> float | None:
    """How much faster than fp32 a bf16 matrix product is on this CPU; None where it cannot be done.

    Some virtual machines announce AMX tiles but hide their sizes. There a bf16 product is an illegal instruction
    that would kill the process, so a forked child tries first, and tries again without AMX.
    """
    ratio = _try_in_child()
    if ratio is None and "ONEDNN_MAX_CPU_ISA" not in os.environ:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # read at torch's first use of the library
        ratio = _try_in_child()
        if ratio is None:
            del os.environ["ONEDNN_MAX_CPU_ISA"]
    return ratio


def _try_in_child() -> float | None:
    if not hasattr(os, "fork"):
        return _compare_products()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # it warns of forks in a process with threads: this child uses none
        child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()  # a crash is an expected answer here: no traceback
            torch.set_num_threads(1)
            os.write(write, f"{_compare_products():.4f}".encode())
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], PATIENCE)
    answer = os.read(read, 64) if ready else b""
    os.close(read)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return float(answer) if answer else None


def _compare_products(size: int = 512) -> float:
    """Speed of a bf16 matrix product in units of fp32's: the best of several interleaved trials of each."""
    matrices = [torch.ones(size, size, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    best = [float("inf"), float("inf")]
    for _ in range(8):
        for which, matrix in enumerate(matrices):
            began = time.perf_counter()
            matrix @ matrix
            best[which] = min(best[which], time.perf_counter() - began)
    torch.conv2d(torch.ones(2, 3, 8, 8, dtype=torch.bfloat16), torch.ones(4, 3, 3, 3, dtype=torch.bfloat16))
    return best[0] / best[1]
