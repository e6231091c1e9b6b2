"""A small convolutional network on synthetic images: an ordinary training script.

python examples/untouched/train.py --steps 300
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
IMAGES = 2048
SIDE = 24  # pixels


def synthetic_images() -> TensorDataset:
    """One random pattern per class, shifted sideways and buried in noise."""
    patterns = torch.randn(CLASSES, 3, SIDE, SIDE)
    labels = torch.randint(CLASSES, (IMAGES,))
    shifts = torch.randint(SIDE, (IMAGES,)).tolist()
    shifted = [
        patterns[label].roll(shift, dims=-1)
        for label, shift in zip(labels.tolist(), shifts, strict=True)
    ]
    return TensorDataset(torch.stack(shifted) + 2.0 * torch.randn(IMAGES, 3, SIDE, SIDE), labels)


def network() -> nn.Sequential:
    """Three convolutions with BatchNorm, each halving the side, then a linear layer."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (SIDE // 8) ** 2, CLASSES))


def main() -> None:
    """Train for `--steps` steps, over as many epochs as they need."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(synthetic_images(), batch_size=args.batch, shuffle=True, drop_last=True)

    step = 0
    while step < args.steps:
        for images, labels in loader:
            logits = model(images.to(device))
            loss = F.cross_entropy(logits, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step}  loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
