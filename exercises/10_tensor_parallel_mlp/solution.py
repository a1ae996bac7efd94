"""A column- and row-parallel MLP with one all-reduce.

Task: exercises/10_tensor_parallel_mlp/README.md.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# Shapes: B sequences of T tokens, D numbers each; H hidden features, h of them on this rank.


class Enter(torch.autograd.Function):
    """f of Shoeybi et al. (2019), section 3. Every rank has the same x_BTD, and it passes as it is.
    Backward, each rank arrives with one summand of x's gradient; all are to leave with the sum."""

    @staticmethod
    def forward(ctx: object, x_BTD: Tensor) -> Tensor:
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: object, grad_BTD: Tensor) -> Tensor:
        # --- yours
        whole_BTD = grad_BTD.clone()
        dist.all_reduce(whole_BTD)
        return whole_BTD
        # --- end


class Leave(torch.autograd.Function):
    """g of Shoeybi et al. (2019), section 3. Each rank has one summand of the output; all leave
    with the sum. Backward, every rank arrives with the gradient of that sum."""

    @staticmethod
    def forward(ctx: object, part_BTD: Tensor) -> Tensor:
        # --- yours
        whole_BTD = part_BTD.clone()
        dist.all_reduce(whole_BTD)
        return whole_BTD
        # --- end

    @staticmethod
    def backward(ctx: object, grad_BTD: Tensor) -> Tensor:
        # --- yours
        return grad_BTD
        # --- end


class ParallelMLP(nn.Module):
    """This rank's part of y = gelu(x w1' + b1) w2' + b2, where ' transposes: F.linear's order.

    It is given the whole weights, the same on all ranks: w1 (H, D), b1 (H,), w2 (D, H), b2 (D,).
    Its parameters, of the same names, are copies of this rank's part of them: the features
    torch.tensor_split deals it, h of H, any H. b2 it has whole. The whole weights can be freed.

    On 2 ranks with H = 5, D = 2: w1 is (3, 2) on rank 0 and (2, 2) on rank 1, b1 (3,) and (2,),
    w2 (2, 3) and (2, 2), and b2 (2,) on both.
    """

    def __init__(self, w1_HD: Tensor, b1_H: Tensor, w2_DH: Tensor, b2_D: Tensor) -> None:
        super().__init__()
        # --- yours
        rank = dist.get_rank()
        n = dist.get_world_size()
        w1_hD, b1_h = (whole.tensor_split(n)[rank] for whole in (w1_HD, b1_H))
        w2_Dh = w2_DH.tensor_split(n, dim=1)[rank]
        self.w1, self.b1, self.w2, self.b2 = (
            nn.Parameter(part.detach().clone()) for part in (w1_hD, b1_h, w2_Dh, b2_D)
        )
        # --- end

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return y (B, T, D), the same on every rank; x_BTD is the same on every rank too.

        Backward leaves in each parameter its part of the gradient that one process finds, and in
        x, if it wants one, the whole gradient.

        One all-reduce of B T D numbers forward; one backward, and none if x wants no gradient.
        """
        # --- yours
        h_BTh = F.gelu(F.linear(Enter.apply(x_BTD), self.w1, self.b1))
        return Leave.apply(F.linear(h_BTh, self.w2)) + self.b2
        # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/10_tensor_parallel_mlp.py


def main() -> None:
    """Print the time of the MLP, whole and in parts, and how far their outputs are apart."""
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        width = 4096 if device.type == "cuda" else 128
        torch.manual_seed(0)  # the same weights and input on all ranks
        sizes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
        whole = [torch.randn(size, device=device) / width**0.5 for size in sizes]
        x = torch.randn(4, width, width, device=device)
        parts = ParallelMLP(*whole)

        def alone() -> Tensor:
            h = nn.functional.gelu(nn.functional.linear(x, *whole[:2]))
            return nn.functional.linear(h, *whole[2:])

        due = alone()
        off = largest((parts(x) - due).norm() / due.norm(), device)
        times = [milliseconds(call, device) for call in (alone, lambda: parts(x))]
        say(f"{dist.get_world_size()} ranks on {device.type}: {times[0]:.2f} ms whole,")
        say(f"{times[1]:.2f} ms in parts; outputs are {off:.1g} of their length apart")


if __name__ == "__main__":
    main()
