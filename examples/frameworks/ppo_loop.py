"""PPO in plain PyTorch under autockpt: the environment and its generator are attached.

    autockpt run examples/frameworks/ppo_loop.py --digest

Kill the training process while it runs.  The digest of its end is that of an undisturbed run.
"""

import argparse
import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical

import autockpt

STEPS, ENVS, EPOCHS, MINIBATCH = 32, 4, 4, 32
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Corridors:
    """Walks to the end of a corridor of 9 fields, in several copies; each starts anywhere.

    Its state is where each copy stands, the returns so far, and its generator: no pickle.
    """

    def __init__(self, count: int) -> None:
        self._random = torch.Generator().manual_seed(3)
        self.at = torch.randint(0, 8, (count,), generator=self._random)
        self.lasted = torch.zeros(count, dtype=torch.int64)
        self.returns = torch.zeros(count)

    def observe(self) -> torch.Tensor:
        """[count, 9], one-hot."""
        return nn.functional.one_hot(self.at, 9).float()

    def act(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rewards, whether the episode has ended), after 0: left, 1: right."""
        slips = torch.rand(len(self.at), generator=self._random) < 0.1
        moved = torch.where(slips, 1 - actions, actions) * 2 - 1
        self.at = (self.at + moved).clamp(0, 8)
        self.lasted += 1
        rewards = (self.at == 8).float() - 0.01
        ended = (self.at == 8) | (self.lasted >= 40)
        self.returns += rewards
        starts = torch.randint(0, 8, self.at.shape, generator=self._random)
        self.at = torch.where(ended, starts, self.at)
        self.lasted = torch.where(ended, 0, self.lasted)
        self.returns = torch.where(ended, 0.0, self.returns)
        return rewards, ended

    def state_dict(self) -> dict[str, Any]:
        """Of all copies."""
        places = {"at": self.at, "lasted": self.lasted, "returns": self.returns}
        return {**places, "random": self._random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.at, self.lasted, self.returns = state["at"], state["lasted"], state["returns"]
        self._random.set_state(state["random"])


class Policy(nn.Module):
    """Logits of two actions, and the value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 32), nn.Tanh())
        self.actions, self.value = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, seen: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        """(distribution of the action, value)."""
        hidden = self.body(seen)
        return Categorical(logits=self.actions(hidden)), self.value(hidden).squeeze(-1)


def rollout(policy: Policy, environment: Corridors) -> dict[str, torch.Tensor]:
    """Steps of all copies with the policy as it is, [STEPS * ENVS, ...]."""
    rows: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("seen", "action", "logp", "value", "reward", "ended")
    }
    with torch.no_grad():
        for _ in range(STEPS):
            seen = environment.observe()
            chosen, value = policy(seen)
            action = chosen.sample()
            reward, ended = environment.act(action)
            row = (seen, action, chosen.log_prob(action), value, reward, ended.float())
            for name, column in zip(rows, row, strict=True):
                rows[name].append(column)
        last = policy(environment.observe())[1]
    data = {name: torch.stack(column) for name, column in rows.items()}
    advantage, running = torch.zeros(STEPS, ENVS), torch.zeros(ENVS)
    following = torch.cat([data["value"][1:], last[None]])
    for t in reversed(range(STEPS)):
        goes_on = 1 - data["ended"][t]
        error = data["reward"][t] + GAMMA * following[t] * goes_on - data["value"][t]
        running = error + GAMMA * LAMBDA * goes_on * running
        advantage[t] = running
    data["advantage"], data["target"] = advantage, advantage + data["value"]
    return {name: column.flatten(0, 1) for name, column in data.items()}


def learn(policy: Policy, optimizer: torch.optim.Optimizer, data: dict[str, torch.Tensor]) -> None:
    """One update: a few epochs of minibatches over a rollout."""
    advantage = data["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(EPOCHS):
        for rows in torch.randperm(STEPS * ENVS).split(MINIBATCH):
            chosen, value = policy(data["seen"][rows])
            ratio = (chosen.log_prob(data["action"][rows]) - data["logp"][rows]).exp()
            gain = torch.minimum(
                ratio * advantage[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[rows]
            )
            loss = -gain.mean() + 0.5 * (value - data["target"][rows]).square().mean()
            loss = loss - 0.01 * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def main() -> None:
    """An iteration is an update: no rollout is ever within a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--digest", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    policy, environment = Policy(), Corridors(ENVS)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    ckpt = autockpt.attach(
        model=policy, optimizer=optimizer, environment=environment, data="script"
    )
    for update in ckpt.steps(args.updates):
        data = rollout(policy, environment)
        learn(policy, optimizer, data)
        if (update + 1) % 20 == 0:
            print(f"update {update + 1}: reward {data['reward'].mean():.3f}", flush=True)
    if args.digest:
        kept = [*policy.state_dict().values(), *environment.state_dict().values()]
        kept.append(torch.get_rng_state())
        text = b"".join(value.contiguous().numpy().tobytes() for value in kept)
        print("digest", hashlib.sha256(text).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()
