"""Fixes of a model: results and gradients against float64, names, undoing, recomputation, tied weights, autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numerics import NumericsError
from numerics.search.fix_words import fix

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Model(nn.Module):
    """A language model whose head is tied to its embedding. recompute: the blocks are recomputed in backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 50, bias=False)
        self.lm_head.weight = self.wte.weight
        self.recompute = recompute

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())


def model_of(dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    torch.manual_seed(1)
    return Model(**options).to(dtype)


IDS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients by name."""
    model.zero_grad()
    loss: Tensor = model(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true.double()).detach().double().norm() / true.detach().double().norm())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "words",
    ["small:blocks.*", "small:*.gelu", "small:blocks.1.attention.attention", "cpu:blocks.0.mlp", "cpu:lm_head",
     "upcast:blocks.1.mlp", "upcast:wte", "upcast:*.scaled_dot_product_attention",
     "upcast:blocks.0 small:blocks.0.mlp"],
)  # fmt: skip
def test_a_fixed_model_has_the_loss_and_gradients_of_float64(words: str, recompute: bool) -> None:
    true_loss, true = step(model_of().double())
    model = model_of(recompute=recompute)
    plain, gradients = step(model)
    gradients = {name: one.clone() for name, one in gradients.items()}
    with fix(model, words) as applied:
        loss, found = step(model)
        if not words.startswith("cpu"):  # no tensor is on another device
            applied.require_used()
        assert found.keys() == true.keys() == gradients.keys()
        assert error(loss, true_loss) < 1e-6
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            assert error(gradient, true[name]) < 3e-6, name
    again, restored = step(model)
    assert torch.equal(again, plain)
    assert all(torch.equal(restored[name], gradients[name]) for name in gradients)
    assert type(model.blocks[0]) is Block


def test_what_stays_on_the_cpu_is_the_same_to_the_bit() -> None:
    plain, gradients = step(model_of())
    model = model_of()
    with fix(model, "cpu:blocks.*"):
        loss, found = step(model)
    assert torch.equal(loss, plain)
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)


def test_an_upcast_module_of_a_bfloat16_model_has_float32_accuracy() -> None:
    model = model_of(torch.bfloat16)
    mlp, exact = model.blocks[0].mlp, copy.deepcopy(model.blocks[0].mlp).double()
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    seen: list[Tensor] = []
    true = exact(x.double())
    before = error(mlp(x), true)
    with fix(model, "upcast:blocks.0.mlp"):
        result = mlp(x)
        mlp[2].register_forward_hook(lambda module, inputs, output: seen.append(output))
        mlp(x)
    assert seen[0].dtype == torch.float32
    assert error(seen[0], true) < 1e-6
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, true.bfloat16())
    assert before > 1e-3
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}


def test_gradients_of_an_upcast_module_are_rounded_once() -> None:
    model = model_of(torch.bfloat16)
    mlp, exact = model.blocks[0].mlp, copy.deepcopy(model.blocks[0].mlp).double()
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    direction = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    true = torch.autograd.grad(exact(x.double()), list(exact.parameters()), direction.double())
    with fix(model, "upcast:blocks.0.mlp"):
        found = torch.autograd.grad(mlp(x), list(mlp.parameters()), direction)
    for mine, right in zip(found, true, strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.allclose(mine.float(), right.bfloat16().float(), rtol=2**-7, atol=1e-6)
        assert error(mine, right) < 2**-8


def test_a_fix_acts_within_autocast_and_tied_weights_keep_their_gradient() -> None:
    def run(words: str) -> tuple[Tensor, dict[str, Tensor]]:
        model = model_of()
        with fix(model, words):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(IDS[:, :-1], IDS[:, 1:])
            loss.backward()
        return loss.detach(), {
            name: one.grad for name, one in model.named_parameters() if one.grad is not None
        }

    true_loss, true = step(model_of().double())
    plain_loss, plain = run("")
    loss, found = run("upcast:blocks.* upcast:norm upcast:lm_head")
    assert error(plain_loss, true_loss) > 1e-5
    assert error(loss, true_loss) < 1e-6
    assert all(error(found[name], true[name]) < 1e-5 for name in true)
    assert max(error(plain[name], true[name]) for name in true) > 1e-3
    kept, gradients = run("cpu:lm_head cpu:blocks.*")  # the same computation, so the same bits
    assert torch.equal(kept, plain_loss)
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)


class HalfInside(nn.Module):
    """Computes in bfloat16 whatever its input is: by casts, by autocast and by types that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.bfloat16).float() + x.bfloat16().float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(y).float()
        result: Tensor = y * torch.full((1,), 1 / 3, dtype=torch.bfloat16)
        return result


def test_an_upcast_module_does_not_cast_down_within() -> None:
    model = nn.Sequential(HalfInside())
    x = torch.randn(5, WIDTH)
    exact = copy.deepcopy(model[0].linear).double()
    true = exact(2 * x.double()) / 3
    before = error(model(x), true)
    with fix(model, "upcast:0"):
        assert error(model(x), true) < 1e-6
    assert before > 1e-3


class Inner(nn.Module):
    """Recomputes a part of itself in backward, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda z: F.dropout(F.gelu(self.first(z)), 0.5), x, use_reentrant=False)
        result: Tensor = self.second(y)
        return result


@pytest.mark.parametrize("words", ["upcast:0", "small:0", "cpu:0"])
def test_recomputation_and_random_numbers_within_a_fixed_module(words: str) -> None:
    def run(given: str) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(3)
        model = nn.Sequential(Inner())
        x = torch.randn(4, WIDTH)
        with fix(model, given):
            y = model(x)
            after = torch.rand(1)
            y.square().sum().backward()
        return torch.cat([y.detach().flatten(), after]), [one.grad for one in model.parameters()]  # type: ignore[misc]

    (plain, gradients), (found, mine) = run(""), run(words)
    assert torch.equal(plain[-1], found[-1])  # the generator is where it was
    assert error(found, plain) < 1e-6
    for one, other in zip(mine, gradients, strict=True):
        assert error(one, other) < 1e-6


def test_statistics_of_a_batch_norm_are_updated_once() -> None:
    model, other = (nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)) for _ in range(2))
    x = torch.randn(8, 4)
    with fix(model, "upcast:0 cpu:1"):
        for _ in range(2):
            model(x).square().sum().backward()
    for _ in range(2):
        other(x).square().sum().backward()
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(one, two, atol=1e-6), name
        assert one.dtype == two.dtype


def test_small_adamw_updates_as_the_fused_one_and_keeps_its_state() -> None:
    model, other = model_of(), model_of()
    optimizer, plain = (torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True) for one in (model, other))
    step(model), step(other)
    optimizer.step(), plain.step()
    with fix(model, "small:adamw", optimizer=optimizer):
        assert optimizer.param_groups[0]["fused"] is False
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        assert optimizer.param_groups[0]["fused"] is False
        step(model), step(other)
        optimizer.step(), plain.step()
    assert optimizer.param_groups[0]["fused"] is True
    states = zip(optimizer.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True)
    for mine, theirs in states:
        for name, value in theirs.items():
            assert mine[name].dtype == value.dtype
            assert torch.allclose(mine[name], value, rtol=1e-5, atol=1e-8)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def test_changes_name_modules_and_functions() -> None:
    model = model_of()
    with fix(model, "upcast:blocks.?.mlp small:blocks.0.attention.attention cpu:blocks.*") as applied:
        assert [f"{change}" for change in applied.changes] == [
            "blocks.0.mlp (Sequential) in a wider format",
            "blocks.1.mlp (Sequential) in a wider format",
            "scaled_dot_product_attention in blocks.0.attention (Attention) by small operations",
            "blocks.0 (Block) on the CPU",
            "blocks.1 (Block) on the CPU",
        ]
        assert applied.changes[0].parameters == sum(one.numel() for one in model.blocks[0].mlp.parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("upcast:blocks.0.mpl", "blocks.0.mpl matches no module and no function; fix: did you mean blocks.0.mlp"),
        ("small:blocks.0.mlp.tanh", "small:blocks.0.mlp.tanh matches no module"),
        ("raise:blocks.0", "'raise:blocks.0' is not a fix; fix: use KIND:PATTERN"),
        ("blocks.0", "'blocks.0' is not a fix"),
        ("cpu:", "'cpu:' is not a fix"),
        ("small:adamw", "needs an AdamW of torch: none was given"),
        ("cpu:adamw", "cpu:adamw is unknown; fix: use small:adamw"),
    ],
)  # fmt: skip
def test_a_wrong_word_changes_nothing(words: str, message: str) -> None:
    model = model_of()
    with pytest.raises(NumericsError, match=message) as caught:
        fix(model, f"upcast:blocks.0 {words}")
    assert "\n" not in str(caught.value)
    assert type(model.blocks[0]) is Block


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("upcast:blocks.0.softmax", "blocks.0 did not call softmax; fix: use one of"),
        ("small:blocks.0.mlp.0", "blocks.0.mlp.0 calls none of scaled_dot_product_attention, gelu"),
        (
            "cpu:blocks.0.mlp",
            "cpu:blocks.0.mlp has no effect: the tensors of blocks.0.mlp are on the CPU without",
        ),
        ("cpu:blocks.*.layer_norm", "are on the CPU without it; fix: remove it"),
    ],
)
def test_a_fix_without_effect_is_an_error(words: str, message: str) -> None:
    model = model_of()
    with fix(model, words) as applied:
        step(model)
        with pytest.raises(NumericsError, match=message):
            applied.require_used()


def test_another_name_of_a_module_is_answered_with_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.alias = model[0]
    with pytest.raises(NumericsError, match="upcast:alias: alias is another name of 0; fix: use upcast:0"):
        fix(model, "upcast:alias")
    fix(model, "upcast:0").undo()


class Box:
    def __init__(self, value: Tensor | None = None) -> None:
        self.value = value


class Exchanging(nn.Module):
    def forward(self, x: Tensor, box: Box) -> Tensor:
        if box.value is None:
            box.value = 2 * x
            return x
        return x + box.value


def test_tensors_in_an_object_and_overwritten_arguments_are_refused() -> None:
    model = nn.ModuleDict({"a": Exchanging(), "b": nn.ReLU(inplace=True)})
    with fix(model, "upcast:a upcast:b"):
        for box in (Box(), Box(torch.ones(2, requires_grad=True))):
            with pytest.raises(
                NumericsError, match="a reads or sets tensors of an object among its arguments"
            ):
                model["a"](torch.ones(2, requires_grad=True), box)
        with pytest.raises(NumericsError, match="b overwrites one of its arguments"):
            model["b"](torch.ones(2))


def test_a_copy_of_a_fixed_model_is_fixed_and_has_its_own_weights() -> None:
    model = model_of(torch.bfloat16)
    with fix(model, "upcast:blocks.0.mlp"):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.blocks[0].mlp[2].bias += 1.0
        x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
        assert not torch.equal(twin.blocks[0].mlp(x), model.blocks[0].mlp(x))
        assert twin.state_dict().keys() == model.state_dict().keys()


def test_a_compiled_model_runs_with_the_fix_and_a_compiled_module_is_refused() -> None:
    model = model_of()
    true_loss, true = step(model_of().double())
    compiled = torch.compile(model, backend="eager")
    with fix(model, "upcast:blocks.0.mlp") as applied:
        loss, found = step(compiled)
        applied.require_used()
    assert error(loss, true_loss) < 1e-6
    assert all(error(one, true[name.removeprefix("_orig_mod.")]) < 3e-6 for name, one in found.items())
    with pytest.raises(NumericsError, match="OptimizedModule has a forward of its own"):
        fix(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")), "upcast:0")


def test_a_sparse_gradient_of_a_function_is_one_line() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(10, 4))

        def forward(self, ids: Tensor) -> Tensor:
            return F.embedding(ids, self.table, sparse=True)

    model = nn.Sequential(Lookup())
    with fix(model, "upcast:0"), pytest.raises(NumericsError, match="fix: sparse=False"):
        model(torch.tensor([1, 2, 2])).sum().backward()
