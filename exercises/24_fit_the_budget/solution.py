"""A plan that fits the memory. Task: exercises/24_fit_the_budget/README.md."""

from typing import NamedTuple


class Job(NamedTuple):
    """L blocks y = x + down(gelu(up(x))) from D to 4 D features and back, without biases.

    All is float32; Adam keeps two moments. A rank's step has B tokens, whatever the plan.
    """

    L: int
    D: int
    B: int


class Plan(NamedTuple):
    """How a step is run: micro-batches, recomputation of each block, ZeRO's stage 0 to 3."""

    pieces: int = 1  # divides B
    recompute: bool = False
    stage: int = 0  # 1: moments are sharded; 2: gradients, too; 3: parameters, too


class Machine(NamedTuple):
    """What work costs."""

    flops: float  # per second
    link: float  # bytes per second, each way
    overhead: float  # seconds per micro-batch


def bytes_per_rank(job: Job, plan: Plan, n: int) -> int:
    """The most that a rank of n holds at two moments: after the last micro-batch's forward, and
    after its backward, before the optimizer. What lives within one block's work is left out.

    After forward these are alive: each block's input; without recomputation also what goes into
    GeLU and what comes out; the last block's output. Backward leaves nothing of that.
    Gradients are freed after the optimizer's step; in between they are summed in place.
    """
    # --- yours
    P = job.L * 8 * job.D**2
    tokens = job.B // plan.pieces
    parameters = 4 * P // (n if plan.stage >= 3 else 1)
    gradients = 4 * P // (n if plan.stage >= 2 else 1)
    moments = 8 * P // (n if plan.stage >= 1 else 1)
    activations = 4 * job.D * tokens * (job.L * (1 if plan.recompute else 9) + 1)
    earlier = gradients if plan.pieces > 1 else 0
    return parameters + moments + max(activations + earlier, gradients)
    # --- end


def seconds_per_step(job: Job, plan: Plan, n: int, machine: Machine) -> float:
    """FLOPs, bytes sent, and overhead of all micro-batches, one after the other.

    Only matrix products count, and only those that run; every block's input gets a gradient.
    Recomputing a block brings back what goes into GeLU and what comes out, and computes nothing
    that its backward does not need: the block's output is not computed again.
    Stages 0 and 1 sum gradients at home, and send once per step. Stages 2 and 3 reduce-scatter
    in every micro-batch. Stage 3 gathers each block before its forward and before its backward.
    All-gather and reduce-scatter of N bytes send N (n - 1) / n, an all-reduce twice that.
    """
    # --- yours
    P = job.L * 8 * job.D**2
    flops = (7 if plan.recompute else 6) * P * job.B
    sent = 8 * P
    if plan.stage == 2:
        sent = 4 * P * plan.pieces + 4 * P
    elif plan.stage == 3:
        sent = 12 * P * plan.pieces
    wire = sent * (n - 1) / n / machine.link
    return flops / machine.flops + wire + plan.pieces * machine.overhead
    # --- end


def cheapest_plan(job: Job, budget: int, n: int, machine: Machine) -> Plan | None:
    """The plan that takes the fewest seconds of those that fit into `budget` bytes; None if none
    does. Micro-batches are all of one size."""
    # --- yours
    plans = []
    for pieces in [k for k in range(1, job.B + 1) if job.B % k == 0]:
        for stage in range(4):
            plans += [Plan(pieces, False, stage), Plan(pieces, True, stage)]
    plans = [plan for plan in plans if bytes_per_rank(job, plan, n) <= budget]
    if not plans:
        return None
    return min(plans, key=lambda plan: seconds_per_step(job, plan, n, machine))
    # --- end
