import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import spatial
from scipy import stats as scipy_stats

from ra import attention_maps


def draw(H: int, T: int, D: int, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key = (scale * torch.randn(H, T, D, generator=generator) for _ in range(2))
    return query, key


def explicit(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Compute causal attention from the definition, position by position, in float64: (H, T, T)."""
    H, T, D = query.shape
    result = np.zeros((H, T, T))
    for head in range(H):
        for i in range(T):
            scores = np.array([query[head, i] @ key[head, j] for j in range(i + 1)]) / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            result[head, i, : i + 1] = weights / weights.sum()
    return result


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(2, 40),
    D=st.integers(1, 9),
    rows=st.integers(1, 45),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_slices_of_rows_equal_the_definition_are_causal_and_sum_to_one(
    T: int, D: int, rows: int, scale: float
) -> None:
    query, key = draw(2, T, D, scale=scale)
    expected = explicit(query.double().numpy(), key.double().numpy())
    for first in range(0, T, rows):
        last = min(first + rows, T)
        maps = attention_maps.attention_rows(query, key, first, last).numpy()
        np.testing.assert_allclose(maps, expected[:, first:last, :last], atol=1e-12)
        np.testing.assert_allclose(maps.sum(2), 1, atol=1e-12)
        later = np.arange(last)[None, :] > np.arange(first, last)[:, None]
        assert (maps[:, later] == 0).all()


@settings(max_examples=25, deadline=None)
@given(T=st.integers(2, 30), rows=st.integers(1, 33), scale=st.sampled_from([0.3, 3.0]))
def test_every_statistic_equals_an_independent_implementation(T: int, rows: int, scale: float) -> None:
    query, key = draw(3, T, 4, seed=T, scale=scale)
    maps = attention_maps.layer_maps(query, key, slice_rows=rows)
    standard = explicit(query.double().numpy(), key.double().numpy())
    reciprocal = explicit(key.double().numpy(), query.double().numpy())
    for path, found in ((standard, maps.standard), (reciprocal, maps.reciprocal)):
        for head in range(3):
            chosen = range(1, T)
            entropy = [scipy_stats.entropy(path[head, i], base=2) for i in chosen]
            distance = [sum(path[head, i, j] * (i - j) for j in range(i + 1)) for i in chosen]
            assert found.entropy[head] == pytest.approx(np.mean(entropy))
            assert found.distance[head] == pytest.approx(np.mean(distance))
            assert found.previous[head] == pytest.approx(np.mean([path[head, i, i - 1] for i in chosen]))
            assert found.first[head] == pytest.approx(np.mean([path[head, i, 0] for i in chosen]))
    for head in range(3):
        rows_of = [(standard[head, i, : i + 1], reciprocal[head, i, : i + 1]) for i in range(1, T)]
        jensen_shannon = [spatial.distance.jensenshannon(p, r, base=2) ** 2 for p, r in rows_of]
        variation = [spatial.distance.cityblock(p, r) / 2 for p, r in rows_of]
        assert maps.jensen_shannon[head] == pytest.approx(np.mean(jensen_shannon))
        assert maps.total_variation[head] == pytest.approx(np.mean(variation))


@settings(max_examples=25, deadline=None)
@given(T=st.integers(2, 60), pixels=st.integers(1, 64), rows=st.integers(1, 61))
def test_a_picture_is_the_block_mean_of_the_map_and_its_rows_sum_to_one(
    T: int, pixels: int, rows: int
) -> None:
    query, key = draw(3, T, 4, seed=1)
    pictures = attention_maps.layer_maps(query, key, heads=[2, 0], pixels=pixels, slice_rows=rows).pictures
    whole = {2: explicit(query.double().numpy(), key.double().numpy())[2]}
    block = -(-T // pixels)
    side = -(-T // block)
    assert side <= pixels
    for head, pair in pictures.items():
        for picture in pair:
            assert picture.shape == (side, side)
            np.testing.assert_allclose(picture.sum(1).numpy(), 1, atol=1e-12)
            assert torch.equal(picture, picture.tril())
        if head in whole:
            places = [slice(n * block, (n + 1) * block) for n in range(side)]
            blocks = [[whole[head][a, b].sum() / whole[head][a].shape[0] for b in places] for a in places]
            np.testing.assert_allclose(pair[0].numpy(), blocks, atol=1e-12)


def test_no_tensor_of_heads_by_tokens_by_tokens_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    rows_of = attention_maps.attention_rows

    def watched(*arguments: torch.Tensor | int) -> torch.Tensor:
        rows = rows_of(*arguments)  # type: ignore[arg-type]
        sizes.append(rows.numel())
        return rows

    monkeypatch.setattr(attention_maps, "attention_rows", watched)
    query, key = draw(2, 512, 4)
    maps = attention_maps.layer_maps(query, key, heads=[0])
    assert max(sizes) <= 2 * attention_maps.SLICE_ROWS * 512
    assert maps.pictures[0][0].shape == (256, 256)
