"""A model can be pickled, copied and scripted while it is attached, and after close()."""

import copy
import pickle

import torch

import autockpt

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for closed in (False, True):
    torch.save(model, "model.pt")
    loaded = torch.load("model.pt", weights_only=False)
    for made in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made.weight, model.weight)
        assert not made._forward_pre_hooks, f"expected no hook in the copy, closed={closed}"
    torch.jit.script(model)
    if not closed:
        for _ in ckpt.steps(3):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
        ckpt.close()
