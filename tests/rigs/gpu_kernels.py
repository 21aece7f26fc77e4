"""Runs inside the image: compiles for GPUs that are not here, which takes no driver, and prints the sizes as JSON.

It loads what training with --compile loads on a GPU up to the driver: Triton, its assemblers, libdevice, and NVRTC."""

import json

import triton
import triton.language as tl
from cuda.bindings import nvrtc
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice


@triton.jit
def erf(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, libdevice.erf(tl.load(x + at, mask=at < n)), mask=at < n)


def by_triton(capability: int) -> int:
    """Bytes of machine code for GPUs of this compute capability, 90 for 9.0."""
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(erf, signature=signature, constexprs={"BLOCK": 128})
    return len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])


def by_nvrtc(capability: int) -> int:
    code = b"__global__ void twice(float *x) { x[threadIdx.x] *= 2; }"
    _, program = nvrtc.nvrtcCreateProgram(code, b"twice.cu", 0, [], [])
    nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_%d" % capability])
    error, size = nvrtc.nvrtcGetCUBINSize(program)
    return int(size) if error == nvrtc.nvrtcResult.NVRTC_SUCCESS else 0


if __name__ == "__main__":
    # From 100 on Triton calls another assembler, ptxas-blackwell
    sizes = {f"triton {capability}": by_triton(capability) for capability in (80, 90, 100)}
    print(json.dumps({**sizes, "nvrtc 90": by_nvrtc(90)}))
