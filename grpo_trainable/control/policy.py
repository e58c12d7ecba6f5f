"""A small network that acts in a Gymnasium environment, and the distribution of its actions.

Shapes: T steps, A components per continuous action, D width of the hidden states.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_trainable.control.spaces import CONVOLUTIONS, Spaces, convolved, spaces_of
from grpo_trainable.control.tokenizer import control_tokenizer
from grpo_trainable.models.policy import ActingPolicy
from grpo_trainable.models.shape import PolicySettings
from grpo_trainable.models.tokenizer import Tokenizer

WIDTH = 64  # width of both layers, if observations are numbers
IMAGE_WIDTH = 128  # width of the layer after the convolutions, if observations are images
LOG_STD = -0.5  # initial log standard deviation of continuous actions
LOG_STD_RANGE = (-5.0, 2.0)


class ControlPolicy(ActingPolicy):
    """Two tanh layers for numbers or three convolutions for images, followed by a linear head.

    Discrete actions have the distribution softmax(logits / temperature). A continuous action is
    tanh(z), scaled to the bounds of its space, where z is normal. The network computes the mean of
    z. Each component of z has a trained standard deviation, which is multiplied by the temperature.
    At temperature 0, the policy chooses the most likely discrete action or the mean of z, and
    computes the log-prob of that action at temperature 1.
    """

    scale: Tensor  # divisor of observations

    def __init__(self, spaces: Spaces, seed: int) -> None:
        super().__init__()
        self.spaces = spaces
        self.body = _convolutions(spaces) if spaces.is_image else _layers(spaces.observation[0])
        width = IMAGE_WIDTH if spaces.is_image else WIDTH
        self.head = nn.Linear(width, spaces.choices or spaces.action_numbers)
        self.log_std = None
        if spaces.choices is None:
            self.log_std = nn.Parameter(torch.full((spaces.action_numbers,), LOG_STD))
        self.register_buffer("scale", torch.tensor(spaces.scale), persistent=False)
        self._draw(torch.Generator().manual_seed(seed))

    def _draw(self, generator: torch.Generator) -> None:
        """Draw orthogonal weights. Head weights near 0 make all actions about equally likely."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                gain = 0.01 if module is self.head else math.sqrt(2)
                nn.init.orthogonal_(module.weight, gain, generator=generator)
                assert module.bias is not None, "every layer has a bias"
                nn.init.zeros_(module.bias)

    @property
    def head_weight(self) -> Tensor:
        """Weights of the head, (choices or A, D)."""
        return self.head.weight

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of an observation: (components,), or (height, width, channels) for an image."""
        return self.spaces.observation

    @property
    def action_numbers(self) -> int:
        """Number of components of a continuous action, or 0 for discrete actions."""
        return self.spaces.action_numbers

    def hidden(self, observations: Tensor) -> Tensor:
        """Compute hidden states (T, D) from observations (T, …)."""
        seen = observations.to(self.head.weight.dtype) / self.scale
        return self.body(seen.movedim(-1, 1) if self.spaces.is_image else seen)

    # ---- The distribution of actions ---------------------------------------------------------

    def log_probs(
        self, hidden_TD: Tensor, actions: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs of the actions taken, (T,), and entropies, (T,), both in nats.

        For continuous actions, the log-probs are log-densities of tanh(z), and the entropy is
        estimated from the action taken. The entropy carries no gradient.

        Args:
            hidden_TD: Hidden states.
            actions: Choices (T,) int64, or z (T, A).
            temperature: Temperature of the distribution.
        """
        law = self.head(hidden_TD)
        if self.log_std is None:
            return _of_choices(law, actions, temperature)
        return _of_numbers(law, self._std(temperature), actions)

    def act(
        self, observations: Tensor, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Draw actions by inverse CDF, and compute their log-probs (T,).

        Args:
            observations: Observations (T, …).
            uniform: Uniform draws in [0, 1): (T, 1) for discrete actions, (T, A) for continuous
                ones.
            temperature: Temperature of the distribution. 0 selects the most likely action or the
                mean of z.

        Returns:
            Actions, which are choices (T,) or z (T, A), and their log-probs (T,).
        """
        hidden = self.hidden(observations)
        law, drawn = self.head(hidden), temperature or 1.0
        if self.log_std is None:
            if temperature == 0:
                actions = law.argmax(dim=1)
            else:
                reached = (law / drawn).softmax(dim=1).cumsum(dim=1)
                actions = torch.searchsorted(reached, uniform * reached[:, -1:], right=True)[:, 0]
                actions = actions.clamp(max=law.shape[1] - 1)
            return actions, _of_choices(law, actions, drawn)[0]
        std = self._std(drawn)
        z = law if temperature == 0 else law + std * _normal(uniform)
        return z, _of_numbers(law, std, z)[0]

    def _std(self, temperature: float) -> Tensor:
        assert self.log_std is not None, "only continuous actions have a standard deviation"
        return self.log_std.clamp(*LOG_STD_RANGE).exp() * temperature

    def in_environment(self, actions: Tensor) -> Tensor:
        """Convert actions to the environment's form.

        Args:
            actions: Choices (T,), or z (T, A).

        Returns:
            The environment's discrete actions (T,), or continuous actions (T, A) within its bounds.
        """
        if self.spaces.choices is not None:
            return actions + self.spaces.first
        low, high = torch.tensor(self.spaces.low), torch.tensor(self.spaces.high)
        return low + (actions.tanh() + 1) / 2 * (high - low)


def _layers(numbers: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(numbers, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _convolutions(spaces: Spaces) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = spaces.observation[2]
    for out, size in CONVOLUTIONS:
        layers += [nn.Conv2d(channels, out, size, stride=2), nn.ReLU()]
        channels = out
    inner = nn.Linear(math.prod(convolved(spaces.observation)), IMAGE_WIDTH)
    return nn.Sequential(*layers, nn.Flatten(), inner, nn.ReLU())


def _of_choices(logits: Tensor, actions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs = (logits / temperature).log_softmax(dim=1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=1)
    return log_probs.gather(1, actions[:, None])[:, 0], entropy.detach()


def _of_numbers(mean: Tensor, std: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies of continuous actions.

    log p(tanh z) = Σ log N(z; mean, std) - log(1 - tanh² z), as in Soft Actor-Critic (arXiv
    1801.01290, appendix C).
    """
    squeezed = 2 * (math.log(2) - z - F.softplus(-2 * z))  # log(1 - tanh² z)
    of_normal = -0.5 * ((z - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    entropy = (std.log() + 0.5 * math.log(2 * math.pi * math.e) + squeezed).sum(dim=1)
    return (of_normal - squeezed).sum(dim=1), entropy.detach()


def _normal(uniform: Tensor) -> Tensor:
    """Convert uniform draws, which are multiples of 2^-24, to normal draws."""
    # Adding 2^-25 moves each draw to the middle of its bin, so 0 does not become minus infinity.
    return torch.special.ndtri(uniform.double() + 2.0**-25).float()


def build_control_policy(model: PolicySettings, seed: int) -> tuple[ControlPolicy, Tokenizer]:
    """Build the policy that acts in the environment `model.env`, with random weights from `seed`.

    Raises:
        ValueError: If the environment cannot be created, or if its spaces are not supported.
    """
    assert model.env is not None, "only policies with model.env act in an environment"
    spaces = spaces_of(model.env)
    return ControlPolicy(spaces, seed), control_tokenizer(spaces)
