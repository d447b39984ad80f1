import pytest
import torch

from quasiglobal.reproduction.paper.toy import (
    NoisyWell,
    gradient_of,
    pull_towards,
    rosenbrock,
    winding_valley,
)
from quasiglobal.training.metrics import consensus_distance


def numerical_gradient(function, x, h=1e-6):
    shifts = h * torch.eye(x.shape[-1], dtype=x.dtype)
    return torch.stack([(function(x + s) - function(x - s)) / (2 * h) for s in shifts], dim=-1)


@pytest.mark.parametrize(("function", "minimum"), [(rosenbrock, (1.0, 1.0)), (winding_valley, (0.0, 0.0))])
def test_functions_have_their_minimum_and_gradient(function, minimum):
    at = torch.tensor([minimum], dtype=torch.float64)
    torch.testing.assert_close(gradient_of(function)(at, 1), torch.zeros_like(at))
    x = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slopes = gradient_of(function)(x, 1)
    torch.testing.assert_close(slopes, numerical_gradient(function, x), rtol=1e-5, atol=1e-5)
    assert (function(x) > function(at)).all()


def test_the_pull_has_length_one_and_points_away_from_the_minimum():
    minima = torch.tensor([[0.0, 5.0], [4.0, 0.0]])
    pull = pull_towards(minima)(torch.zeros(2, 2), 1)
    torch.testing.assert_close(pull, torch.tensor([[0.0, -1.0], [-1.0, 0.0]]))


def test_the_noisy_well_is_heterogeneous_with_a_common_mean_and_repeatable_noise():
    well = NoisyWell(n=8, runs=2, sigma=0.0)
    x = torch.randn(16, 10, generator=torch.Generator().manual_seed(0))
    one_point = x[:1].expand(16, 10)
    gradients = well.gradients()(one_point, 1).view(2, 8, 10)
    torch.testing.assert_close(gradients.mean(dim=1)[0], well.mean_gradient(x[0]), rtol=1e-4, atol=1e-5)
    assert well.tilts().square().sum(dim=1).mean().sqrt().item() == pytest.approx(3, rel=1e-5)
    noisy = NoisyWell(n=8).gradients()
    assert noisy(x[:8], 5).equal(noisy(x[:8], 5))
    assert not noisy(x[:8], 5).equal(noisy(x[:8], 6))


def test_the_noise_has_the_stated_variance():
    well = NoisyWell(n=1000, zeta=0.0)
    noise = well.gradients()(torch.zeros(1000, 10), 1)
    assert noise.square().sum(dim=1).mean().item() == pytest.approx(9, rel=0.1)


def test_consensus_distance_is_over_the_nodes():
    x = torch.randn(5, 4, 3)
    by_hand = torch.stack([sum((row - run.mean(dim=0)).norm() ** 2 for row in run) / 4 for run in x])
    torch.testing.assert_close(consensus_distance(x), by_hand)
