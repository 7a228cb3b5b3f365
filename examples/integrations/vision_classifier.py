"""A vision classifier: a ViT of transformers, ``xent_ops.cross_entropy`` with label smoothing and mixed targets.

    python examples/integrations/vision_classifier.py

With a thousand classes the logits are small beside the activations: nothing is gained by leaving them out, and
``xent_ops.cross_entropy`` takes the place of ``F.cross_entropy``, class probabilities (mixup) included. With tens of
thousands (ImageNet-21k, faces) the head and the loss are better one call, ``xent_ops.linear_cross_entropy``: the last
steps here.
"""

import torch
import torch.nn.functional as F
from common import compare
from transformers import ViTConfig, ViTForImageClassification

import xent_ops

CLASSES = 100


def batches():
    """Random images whose brightness tells their class, class indices, and mixtures of two classes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(9):
        target = torch.randint(0, CLASSES, (8,), generator=generator)
        images = torch.randn(8, 3, 32, 32, generator=generator) + target.view(-1, 1, 1, 1) / CLASSES
        mixed = 0.7 * F.one_hot(target, CLASSES) + 0.3 * F.one_hot(target.flip(0), CLASSES)
        yield images, target, mixed


def run(with_xent: bool) -> list[float]:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=CLASSES,
    )  # fmt: skip
    model = ViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cross_entropy = xent_ops.cross_entropy if with_xent else F.cross_entropy
    losses = []
    for step, (images, target, mixed) in enumerate(batches()):
        if step < 3:
            loss = cross_entropy(model(images).logits, target, label_smoothing=0.1)
        elif step < 6:
            loss = cross_entropy(model(images).logits, mixed)
        elif with_xent:
            features = model.vit(images).last_hidden_state[:, 0]
            head = model.classifier
            loss = xent_ops.linear_cross_entropy(
                features, head.weight, target, linear_bias=head.bias, label_smoothing=0.1
            )
        else:
            loss = F.cross_entropy(model(images).logits, target, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    compare(run)
