"""Train a BERT on the ranks of a plan: torchrun --nproc-per-node 2 train_bert.py FOLDER_WITH_CONFIG PLAN"""

import sys

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

import fxpar

torch.manual_seed(0)
model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
model = fxpar.load(sys.argv[2], model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(5):
    data = torch.Generator().manual_seed(i)
    ids = torch.randint(1, 3000, (8, 64), generator=data)
    labels = torch.where(torch.rand(8, 64, generator=data) < 0.15, ids, -100)
    loss = model.step(input_ids=ids, labels=labels)
    norm = model.clip_grad_norm_(1.0)
    opt.step()
    opt.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {i} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)
