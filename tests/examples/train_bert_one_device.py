"""The training of train_bert.py in plain PyTorch on one device: python train_bert_one_device.py FOLDER_WITH_CONFIG"""

import sys

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

torch.manual_seed(0)
model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(5):
    data = torch.Generator().manual_seed(i)
    ids = torch.randint(1, 3000, (8, 64), generator=data)
    labels = torch.where(torch.rand(8, 64, generator=data) < 0.15, ids, -100)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    print(f"step {i} loss {loss.item():.6f} norm {norm.item():.6f}", flush=True)
