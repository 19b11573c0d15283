import tempfile

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from torch import nn


class Progress:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def steps(accelerator, model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.tensor([[1.0 + accelerator.process_index]])  # each rank has its own data
        accelerator.backward(nn.functional.mse_loss(model(x), 3 * x))
        optimizer.step()


def fresh():
    accelerator, progress = Accelerator(cpu=True), Progress()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(progress)
    return accelerator, model, optimizer, progress


def main():
    accelerator, model, optimizer, progress = fresh()
    folder = broadcast_object_list([tempfile.mkdtemp() if accelerator.is_main_process else None])[0]
    steps(accelerator, model, optimizer, 3)
    progress.step = 3
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()

    accelerator, model, optimizer, progress = fresh()  # as in the next job
    accelerator.load_state(folder)
    steps(accelerator, model, optimizer, 3)
    weight = accelerator.unwrap_model(model).weight.item()
    print(f"rank {accelerator.process_index}: from step {progress.step}, weight {weight:.5f}")


main()  # its models go before the process group does
PartialState().destroy_process_group()
