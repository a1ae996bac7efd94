"""A trace of two steps on a GPU, with what a CPU's trace has not: kernels, launches, twins.

In milliseconds from a step's begin; `late` is by how much its rank comes late to the barrier:

    host      step     [0 ------------------------------------------------------------- 100]
              loader   [0 10]    compute [11 12]   [13 14]        barrier [70+late ----- 95]
              synchronizes                                                         [95 - 99]
    stream 7  kernels                   [12 --- 40][40 -- 60]
    stream 20 NCCL                                   [50 ---- 70]   its barrier   [90 -- 95]
    twins     step     [12 --------- 40]   (only what the host's main thread launched)
              compute  [12 --------- 40]   nccl:all_reduce [50 70]
"""

PROCESS, GPU = 771, 0  # a GPU's rows have the GPU's number for a pid
MAIN, AUTOGRAD = 771, 805  # threads of the process
COMPUTE, NCCL = 7, 20  # streams of the GPU
STEP_MS, STEPS = 100.0, 2
KERNELS = {  # name: (start and end in ms, stream, the thread that launched it)
    "void at::native::spin_kernel(long)": (12, 40, COMPUTE, MAIN),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n": (40, 60, COMPUTE, AUTOGRAD),
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)": (50, 70, NCCL, AUTOGRAD),
    "ncclDevKernel_AllReduce_Sum_u8_RING_LL(ncclDevKernelArgs)": (90, 95, NCCL, MAIN),  # barrier
}
# What a step of this trace holds, by hand. Of the 20 ms of all-reduce 10 hide behind compute.
MS = {"compute": 48, "barrier": 25, "all-reduce": 10, "loader": 10, "idle": 7}


def span(category: str, name: str, start: float, end: float, pid: int, tid: int) -> dict:
    """One span as Kineto writes it; start and end in ms, `ts` and `dur` in us."""
    place = {"pid": pid, "tid": tid, "ts": 1e3 * start, "dur": 1e3 * (end - start)}
    return {"ph": "X", "cat": category, "name": name, "args": {}} | place


def one_step(begin: float, number: int, late: float) -> list[dict]:
    """The events of one step that begins at `begin`."""

    def host(category: str, name: str, start: float, end: float, tid: int = MAIN) -> dict:
        return span(category, name, begin + start, begin + end, PROCESS, tid)

    def twin(name: str, start: float, end: float, stream: int) -> dict:
        return span("gpu_user_annotation", name, begin + start, begin + end, GPU, stream)

    events = [
        host("user_annotation", "step", 0, STEP_MS),
        host("user_annotation", f"ProfilerStep#{number}", -1, STEP_MS + 1),
        host("user_annotation", "loader", 0, 10),
        host("user_annotation", "compute", 11, 12),
        host("user_annotation", "compute", 13, 14, AUTOGRAD),
        host("cpu_op", "aten::mm", 13, 13.5, AUTOGRAD),
        host("cpu_op", "c10d::allreduce_", 14, 15, AUTOGRAD),
        host("user_annotation", "nccl:all_reduce", 14, 15, AUTOGRAD),
        host("user_annotation", "barrier", 70 + late, 95),
        host("cpu_op", "c10d::barrier", 70 + late, 95),
        host("cuda_runtime", "cudaDeviceSynchronize", 95, 99),
        twin("step", 12, 40, COMPUTE),
        twin("compute", 12, 40, COMPUTE),
        twin("compute", 40, 60, COMPUTE),
        twin("nccl:all_reduce", 50, 70, NCCL),
        twin("barrier", 90, 95, NCCL),
    ]
    for place, (name, (start, end, stream, thread)) in enumerate(KERNELS.items()):
        launch = 11 + place
        arrow = {"cat": "ac2g", "name": "ac2g", "id": 10 * number + place}
        events += [
            host("cuda_runtime", "cudaLaunchKernel", launch, launch + 0.1, thread),
            arrow | {"ph": "s", "pid": PROCESS, "tid": thread, "ts": 1e3 * (begin + launch)},
            span("kernel", name, begin + start, begin + end, GPU, stream),
            arrow | {"ph": "f", "pid": GPU, "tid": stream, "ts": 1e3 * (begin + start), "bp": "e"},
        ]
    return events


def gpu_trace(rank: int, ranks: int = 2, late: float = 0.0, base_ms: float = 0.0) -> dict:
    """One rank's file; `base_ms` is by how much it began after the first one."""
    events = []
    for pid, tid, name in ((PROCESS, 0, "process_name"), (GPU, 0, "process_name")):
        events.append({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": "python"}})
    for number in range(STEPS):
        events += one_step(1000.0 + 150 * number - base_ms, number, late)
    end = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 2e6}
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
        "baseTimeNanoseconds": 1_790_857_026_000_000_000 + int(1e6 * base_ms),
        "traceEvents": [*events, end],
    }
