"""A column- and row-parallel MLP with one all-reduce. Read README.md beside this file first."""

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
        raise NotImplementedError  # 3 lines in the solution


class Leave(torch.autograd.Function):
    """g of Shoeybi et al. (2019), section 3. Each rank has one summand of the output; all leave
    with the sum. Backward, every rank arrives with the gradient of that sum."""

    @staticmethod
    def forward(ctx: object, part_BTD: Tensor) -> Tensor:
        raise NotImplementedError  # 3 lines in the solution

    @staticmethod
    def backward(ctx: object, grad_BTD: Tensor) -> Tensor:
        raise NotImplementedError  # 1 lines in the solution


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
        raise NotImplementedError  # 7 lines in the solution

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return y (B, T, D), the same on every rank; x_BTD is the same on every rank too.

        Backward leaves in each parameter its part of the gradient that one process finds, and in
        x, if it wants one, the whole gradient.

        One all-reduce of B T D numbers forward; one backward, and none if x wants no gradient.
        """
        raise NotImplementedError  # 2 lines in the solution
