"""timm: a ViT with its losses for label smoothing and mixup in our place, and a head of many classes.

    python examples/integrations/timm_classifier.py

``xent_ops.CrossEntropyLoss`` is the train_loss_fn for class indices (timm's ``LabelSmoothingCrossEntropy``) and for the
class probabilities of timm's ``Mixup`` (``SoftTargetCrossEntropy``). With tens of thousands of classes take the
features before the head, and ``xent_ops.linear_cross_entropy``: the last steps here.
"""

import numpy as np
import timm
import torch
from common import compare
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

import xent_ops

CLASSES = 100


def batches():
    """Random images whose brightness tells their class, and the class."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(9):
        target = torch.randint(0, CLASSES, (8,), generator=generator)
        yield torch.randn(8, 3, 32, 32, generator=generator) + target.view(-1, 1, 1, 1) / CLASSES, target


def run(with_xent: bool) -> list[float]:
    torch.manual_seed(0)
    np.random.seed(0)  # of Mixup
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=CLASSES)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=CLASSES).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    smooth = xent_ops.CrossEntropyLoss(label_smoothing=0.1) if with_xent else LabelSmoothingCrossEntropy(0.1)
    soft = xent_ops.CrossEntropyLoss() if with_xent else SoftTargetCrossEntropy()
    losses = []
    for step, (images, target) in enumerate(batches()):
        if step < 3:
            loss = smooth(model(images), target)
        elif step < 6:
            images, mixed = mixup(images, target)
            loss = soft(model(images), mixed)
        elif with_xent:
            features = model.forward_head(model.forward_features(images), pre_logits=True)
            head = model.get_classifier()
            loss = xent_ops.linear_cross_entropy(
                features, head.weight, target, linear_bias=head.bias, label_smoothing=0.1
            )
        else:
            loss = smooth(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    compare(run)
