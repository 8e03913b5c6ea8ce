"""Small modules without outside code, and an inner backend that counts: what the tests of the compile door share."""

import weakref

import torch
from torch import nn
from torch.nn import functional as F

TOLERANCE = dict(rtol=2e-5, atol=2e-5)


class Attention(nn.Module):
    def __init__(self, dim: int = 32, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Counting:
    """An inner backend that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.inputs: list[list] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list):
        self.graphs.append(gm)
        self.inputs.append([weakref.ref(value) for value in inputs if isinstance(value, torch.Tensor)])
        return gm.forward

    def calls(self, i: int = -1) -> list[str]:
        return [str(node.target) for node in self.graphs[i].graph.nodes if node.op == "call_function"]


def agree(compiled, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), **TOLERANCE)
