"""Train a torchvision CNN for four steps, as the runs of xMem's public data did: ``MODEL OPTIMIZER BATCH ZERO_GRAD``.

fp32 on random weights, 3 x 86 x 86 random images, cross entropy, lr 1e-3 and nothing else for the optimizer.
``ZERO_GRAD`` says where the gradients go: 0 at the top of the step, 1 before the backward pass, 2 after the step.
"""

import sys

import torch
import torchvision

NAMES = {
    "ConvNeXtBase": "convnext_base",
    "ConvNeXtTiny": "convnext_tiny",
    "MnasNet": "mnasnet1_0",
    "MobeNetV3Large": "mobilenet_v3_large",
    "MobeNetV3Small": "mobilenet_v3_small",
    "MobileNetV2": "mobilenet_v2",
    "RegNetX400MF": "regnet_x_400mf",
    "RegNetY400MF": "regnet_y_400mf",
    "ResNet101": "resnet101",
    "ResNet152": "resnet152",
    "VGG16": "vgg16",
    "VGG19": "vgg19",
}


def main(name: str, optimizer_name: str, batch: int, zero_grad: int) -> None:
    classes = 10 if name.startswith(("MobeNetV3", "MnasNet")) else 1000
    model = getattr(torchvision.models, NAMES[name])(weights=None, num_classes=classes).cuda()
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    for _ in range(4):
        images, labels = torch.randn(batch, 3, 86, 86), torch.randint(0, classes, (batch,))
        if zero_grad == 0:
            optimizer.zero_grad()
        images, labels = images.cuda(), labels.cuda()  # the last step's are gone, its outputs are not
        outputs = model(images)
        loss = loss_of(outputs, labels)
        if zero_grad == 1:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero_grad == 2:
            optimizer.zero_grad()
        torch.max(outputs, 1)
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
