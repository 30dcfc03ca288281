"""Small models, each with one trait that is hard to capture. Entries: name -> () -> (model, args, kwargs, loss)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(high, *shape, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class TiedLM(nn.Module):
    """Tied head, learned positions, attention, cross entropy with ignored labels."""

    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(11, 8, padding_idx=3), nn.Embedding(5, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        b, s = ids.shape
        x = self.tok(ids) + self.pos(torch.arange(s))
        q, k, v = self.qkv(x).view(b, s, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, 8))
        return self.head(x)


def tied_lm():
    targets = labels(11, 3, 5, seed=2)
    targets[1:, 2:] = -100

    def loss(output, inputs):
        return F.cross_entropy(output.reshape(-1, 11), inputs[1]["targets"].reshape(-1))

    class Model(TiedLM):
        def forward(self, ids, targets=None):
            return super().forward(ids)

    return Model(), (labels(11, 3, 5),), {"targets": targets}, loss


class Vision(nn.Module):
    """Batch norm (three kinds), group norm, in-place ops, slice assignment, pooling."""

    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=0.3)
        self.c2, self.b2 = nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8, track_running_stats=False)
        self.gn, self.b3 = nn.GroupNorm(4, 8), nn.BatchNorm1d(8, affine=False)
        self.frozen = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        h = F.relu_(self.b1(self.c1(x)))
        padded = h.new_zeros(h.shape[0], h.shape[1], h.shape[2] + 1, h.shape[3] + 1)
        padded[:, :, 1:, 1:] = h
        padded[:, 0] += 0.1
        h = self.gn(self.b2(self.c2(padded)))
        h.mul_(1.5).sub_(0.1)
        h = F.max_pool2d(h, 2)
        return self.fc(self.frozen(self.b3(h.mean((-2, -1)))))


def vision():
    model = Vision()
    model.frozen.eval()
    model.frozen.running_mean.fill_(0.3)
    targets = labels(4, 6)
    return model, (numbers(6, 3, 7, 7),), {}, lambda output, inputs: F.cross_entropy(output, targets)


class Wide(nn.Module):
    """Dict in and out, None, Python values, an unused input, an unused parameter, a frozen one."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(2, 2)
        self.a.bias.requires_grad_(False)

    def forward(self, batch, *more, labels=None, mask=None, temperature=1.0, step=None):
        h = torch.tanh(self.a(batch["x"][0])) * more[0]
        logits = self.b(h) / temperature
        return {"logits": logits, "pred": (logits.argmax(-1), None), "loss": F.cross_entropy(logits, labels)}


def wide():
    kwargs = {"labels": labels(3, 4), "temperature": 0.7, "step": torch.tensor(3)}
    return Wide(), ({"x": [numbers(4, 5)]}, numbers(4, 7)), kwargs, None


class Straight(torch.autograd.Function):
    """Rounds; passes a clipped gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1.0) * 3.0


class Odd(nn.Module):
    """Hand-written backward, checkpointing, complex numbers, sort, a baked constant, an alias buffer."""

    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 6)
        turn = torch.polar(torch.ones(3), torch.arange(3.0))
        self.register_buffer("turn", turn, persistent=False)
        self.register_buffer("again", turn, persistent=False)
        self.table = torch.arange(6.0)  # neither parameter nor buffer

    def body(self, x):
        return F.gelu(self.g(Straight.apply(self.f(x))))

    def forward(self, x):
        h = checkpoint(self.body, x, use_reentrant=False) + self.table
        z = torch.view_as_real(torch.view_as_complex(h.reshape(-1, 3, 2)) * self.again).flatten(-2)
        return torch.sort(z, -1).values.cumsum(-1) + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def odd():
    return (
        Odd(),
        (numbers(4, 6),),
        {},
        lambda output, inputs: output.square().mean() + output.std() + output.var(0).sum(),
    )


class Compiled(nn.Module):
    """A part wrapped by torch.compile, in a ModuleDict."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "plain": nn.Linear(5, 5),
                "fast": torch.compile(nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)), backend="eager"),
            }
        )
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(5) * i) for i in (1, 2)])

    def forward(self, x):
        for scale, name in zip(self.scales, self.parts, strict=True):
            x = self.parts[name](x) * scale
        return x


def compiled():
    return Compiled(), (numbers(3, 5),), {}, lambda output, inputs: F.smooth_l1_loss(output, inputs[0][0])


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return model, (numbers(3, 5, 8),), {"src_key_padding_mask": padding}, lambda output, inputs: output.square().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 5, 2), nn.GRU(5, 3, bidirectional=True)

    def forward(self, x):
        h, (last, _) = self.lstm(x)
        return self.gru(h)[0].sum(-1), last


def recurrent():
    return Recurrent(), (numbers(4, 3, 4),), {}, lambda output, inputs: output[0].mean() + output[1].abs().sum()


SMALL = {
    "tied_lm": tied_lm,
    "vision": vision,
    "wide": wide,
    "odd": odd,
    "compiled": compiled,
    "encoder": encoder,
    "recurrent": recurrent,
}


def hugging_face():
    """name -> () -> (model, kwargs): tiny transformers models, no dropout."""
    import transformers as hf

    ids, more = labels(50, 2, 6), labels(50, 2, 6, seed=3)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    size = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}

    def bert():
        model = hf.BertForMaskedLM(
            hf.BertConfig(
                vocab_size=50,
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=17,
                max_position_embeddings=8,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        return model, {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids < 25, -100)}

    def gpt2():
        sizes = {"n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 3}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**size, **sizes, **drops)), {"input_ids": ids, "labels": more}

    def llama():
        sizes = {"hidden_size": 16, "intermediate_size": 11, "num_hidden_layers": 2, "use_cache": False}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**size, **sizes, **heads))
        return model, {"input_ids": ids, "attention_mask": mask, "labels": more.masked_fill(mask == 0, -100)}

    def t5():
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 9, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=50, decoder_start_token_id=0, use_cache=False, **sizes)
        )
        return model, {"input_ids": ids, "attention_mask": mask, "labels": more}

    def vit():
        sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 7}
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = hf.ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes, **drops)
        return hf.ViTForImageClassification(config), {"pixel_values": numbers(2, 3, 8, 8), "labels": labels(3, 2)}

    def resnet():
        config = hf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_labels=3)
        return hf.ResNetForImageClassification(config), {"pixel_values": numbers(3, 3, 16, 16), "labels": labels(3, 3)}

    return {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit, "resnet": resnet}
