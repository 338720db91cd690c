"""Implement a standard GPT-2 training step, the "plain" case of the benches.

Full logits with cross-entropy, PyTorch's AdamW (fused on a GPU), and autocast and torch.compile on a GPU. Shapes,
arithmetic of a layer and attention call are those of the project's model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases import Sizes


class PlainBlock(nn.Module):
    """Its layers have the names of the project's, so that weights can be copied."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        C = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(C, 3 * C), "proj": nn.Linear(C, C)})
        self.mlp = nn.ModuleDict({"fc": nn.Linear(C, 4 * C), "proj": nn.Linear(4 * C, C)})

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        parts = self.attention["qkv"](self.norm1(x_BTC)).split(C, dim=2)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.attention["proj"](y.transpose(1, 2).contiguous().view(B, T, C))
        wide_BTC = F.gelu(self.mlp["fc"](self.norm2(x_BTC)), approximate="tanh")
        mlp_BTC: Tensor = self.mlp["proj"](wide_BTC)
        return x_BTC + mlp_BTC


class PlainGPT(nn.Module):
    """forward(ids_BT, targets_BT) -> mean cross-entropy. vocabulary: rows of the embedding."""

    def __init__(self, sizes: Sizes, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.block_size, sizes.width)
        self.blocks = nn.ModuleList(PlainBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTC = self.token(ids_BT) + self.position(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return F.cross_entropy(logits_BTV.view(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1))


def take_weights(plain: PlainGPT, ours: nn.Module) -> None:
    """Copy the weights of the project's baseline of the same shape into the plain model, without padded rows."""
    state = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    state["token.weight"] = state["head.weight"] = state["token.weight"][: len(plain.token.weight)]
    plain.load_state_dict(state)


class PlainStep:
    """One optimizer step a call, as in nanoGPT: forward and backward `accumulation` times, clip, AdamW."""

    def __init__(
        self, sizes: Sizes, vocabulary: int, device: str, accumulation: int, learning_rate: float = 1e-4
    ) -> None:
        self.accumulation = accumulation
        torch.manual_seed(0)
        self.model = PlainGPT(sizes, vocabulary).to(device)
        self.on_gpu = device != "cpu"
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=self.on_gpu)
        self.run = torch.compile(self.model) if self.on_gpu else self.model

    def __call__(self, ids_ET: Tensor) -> Tensor:
        """ids_ET: (E, T+1) int64 on the device, E = accumulation x micro-batch -> mean loss in nats, on the device."""
        losses = []
        for ids_BT in torch.split(ids_ET, ids_ET.shape[0] // self.accumulation):
            with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=self.on_gpu):
                loss = self.run(ids_BT[:, :-1], ids_BT[:, 1:]) / self.accumulation
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()
